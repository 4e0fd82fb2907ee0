"""The protocol on a fake network: whatever happens to messages and nodes, no mass is lost."""

import random

import pytest
from fake_network import PATIENCE, Network, find_place, make_address

from gossipjax.asynchronous._membership import MAX_UNMET, NEIGHBORS
from gossipjax.asynchronous._messages import Message


def run_history(seed, algorithm, length=200):
    """A random history: steps, lost, late and doubled messages, kills, stops, joins, goodbyes."""
    rng = random.Random(seed)
    network = Network(rng.choice([2, 3, 5, 8]), rng.choice([1, 8]), rng.choice([1, 16]))
    weights = {
        "step": 20, "deliver": 30, "drop": 4, "double": 6, "advance": 15, "kill": 1, "start": 2,
        "stop": 1, "go": 3, "cut": 1, "narrow": 1, "leave": 0.2,
    }  # fmt: skip
    for _ in range(length):
        process = rng.choice(network.processes)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind == "step" and process.is_running and not process.is_stopped:
            process.make_step(algorithm)
            network.collect()
        elif kind == "deliver":
            for _ in range(rng.randrange(2 * network.size)):
                network.deliver(rng.randrange(1 << 30))
        elif kind == "double":
            network.deliver(rng.randrange(1 << 30), keep=True)
        elif kind == "drop" and network.messages:
            del network.messages[rng.randrange(len(network.messages))]
        elif kind == "advance":
            network.advance(rng.choice([0.1, 1.0, 1.0, PATIENCE / 3]))
        elif kind == "kill" and process.is_running:
            process.kill()
        elif kind == "start" and not process.is_running:
            process.start(founder=False)
        elif kind == "stop":
            process.is_stopped = True
        elif kind == "go":
            process.is_stopped = False
        elif kind == "cut":
            network.messages = [m for m in network.messages if rng.random() < 0.5]
        elif kind == "narrow":
            other = rng.choice(network.processes)
            network.narrow ^= {(process.place, other.place)}
        elif kind == "leave" and process.is_running:
            process.node.ending.leave()
        network.check()
    return network


@pytest.mark.parametrize("algorithm", ["sgp", "adpsgd"])
def test_mass_is_kept_in_any_history(algorithm):
    for seed in range(80):
        run_history(seed, algorithm)


def run_calmly(network, seconds, algorithm="sgp", steps=True):
    """Everything that is sent arrives at once; a step of every node ten times a second."""
    for _ in range(int(10 * seconds)):
        for process in network.processes:
            if steps and process.is_running and not process.is_stopped:
                process.make_step(algorithm)
        network.collect()
        network.advance(0.1)
        deliver_all(network)
        network.check()


def deliver_all(network):
    for _ in range(10_000):
        receivers = [network.processes[find_place(a)] for a, _ in network.messages]
        index = next((i for i, p in enumerate(receivers) if not p.is_stopped), None)
        if index is None:
            return
        network.deliver(index)
    raise AssertionError("messages without end")


def models(network):
    return [p.holder.mass.x[0] / p.holder.mass.w for p in network.processes if p.is_running]


@pytest.mark.parametrize("algorithm", ["sgp", "adpsgd"])
@pytest.mark.parametrize("size", [2, 5])
def test_models_meet(algorithm, size):
    network = Network(size)
    run_calmly(network, 5, algorithm)
    for process in network.processes:
        assert len(process.node.members.list_members()) == size - 1
    spread = max(models(network)) - min(models(network))
    assert spread < 8
    total = network.account.brought
    assert finish(network, 1) == [total.x[0] / total.w] * size


def test_of_two_asks_that_cross_one_counts():
    """If both counted, the nodes would swap their models."""
    network = Network(2)
    run_calmly(network, 1, steps=False)
    before = models(network)
    for process, other in zip(network.processes, network.processes[::-1], strict=True):
        assert process.node.ask(other.node.members.identity, network.now)
    network.collect()
    deliver_all(network)
    network.check()
    assert models(network) == [sum(before) / 2] * 2 != before


@pytest.mark.parametrize("algorithm", ["sgp", "adpsgd"])
def test_a_killed_node_is_back(algorithm):
    network = Network(4)
    run_calmly(network, 2, algorithm)
    network.processes[2].kill()
    run_calmly(network, 3, algorithm)
    network.processes[2].start(founder=False)
    run_calmly(network, 2, algorithm)
    node = network.processes[2].node
    assert not node.founding.wants_mass
    assert all(len(p.node.members.list_members()) == 3 for p in network.processes)
    assert network.processes[0].node.members.steps.keys() >= node.members.steps.keys()
    held = [p.holder.mass for p in network.processes]
    assert all(m.w > 0.1 for m in held)
    assert 2.5 < sum(m.w for m in held) < 4


@pytest.mark.parametrize("seconds", [3, 30])
def test_a_stopped_node_goes_on(seconds):
    network = Network(3)
    run_calmly(network, 2)
    stopped = network.processes[1]
    life = stopped.node.life
    stopped.is_stopped = True
    run_calmly(network, seconds)
    stopped.is_stopped = False
    run_calmly(network, 3)
    assert (stopped.node.life == life) == (seconds < PATIENCE)
    assert not stopped.node.founding.wants_mass
    assert all(len(p.node.members.list_members()) == 2 for p in network.processes)


def test_a_node_that_leaves_hands_over():
    network = Network(3)
    run_calmly(network, 2)
    for leaving in network.processes[:1], network.processes[1:]:
        for process in leaving:
            process.node.ending.leave()
        run_calmly(network, 2)
        assert all(process.node.ending.has_left for process in leaving)
        assert sum(p.holder.mass.w for p in network.processes) == 3
    assert network.processes[0].holder.mass.w == 0
    assert not network.account.returned


@pytest.mark.parametrize("hung", [{3}, {3, 5}])
def test_a_node_takes_no_more_than_it_gives(hung):
    """One whose loop hangs has its weight when it is back, and a model that is near the others'.

    Of two that hang none sends back what comes back.
    """
    network = Network(8)
    run_calmly(network, 5)
    for place in hung:
        network.processes[place].make_step = lambda algorithm: None
    run_calmly(network, 40)
    held = [p.holder.mass for p in network.processes]
    others = [mass for place, mass in enumerate(held) if place not in hung]
    mean = sum(m.x[0] for m in others) / sum(m.w for m in others)
    for place in hung:
        assert held[place].w < 1
        assert abs(held[place].x[0] / held[place].w - mean) < 2
    assert not any(p.node.post.dropped for p in network.processes)


@pytest.mark.parametrize("algorithm", ["sgp", "adpsgd"])
@pytest.mark.parametrize("lost", ["to it", "from it", "both"])
def test_a_path_that_loses_what_is_large_holds_nobody_up(algorithm, lost):
    """All live, and the others mix as before; what was sent counts once."""
    network = Network(4)
    run_calmly(network, 2, algorithm)
    lives = [p.node.life for p in network.processes]
    network.narrow = {(i, 3) for i in range(3)} if lost != "from it" else set()
    network.narrow |= {(3, i) for i in range(3)} if lost != "to it" else set()
    for seconds in (PATIENCE, 3 * PATIENCE):
        run_calmly(network, seconds, algorithm)
        before = len(network.account.received) + len(network.account.settled)
        run_calmly(network, PATIENCE / 2, algorithm)
        assert len(network.account.received) + len(network.account.settled) > before + (
            80 if algorithm == "sgp" else 40
        )
    assert [p.node.life for p in network.processes] == lives
    if (algorithm, lost) != ("sgp", "from it"):
        assert all(list(p.node.members.notes) == [make_address(3)] for p in network.processes[1:3])
    stop(network)
    run_calmly(network, 4 * PATIENCE, algorithm)
    healthy = [p.node.ending.finals for p in network.processes[:3]]
    assert all(p.node.ending.is_ended for p in network.processes[:3])
    assert healthy == [healthy[0]] * 3
    assert network.processes[3].node.ending.is_cut_off  # it says so, and nobody waits for it


def test_a_path_that_is_far_slower_than_others_holds_none_up():
    network = Network(3)
    run_calmly(network, PATIENCE)
    node = network.processes[0].node
    others = [peer.identity for peer in node.members.peers.values()]
    node.share(others[0], network.processes[0].holder.halve(), network.now)
    assert not node.may_send(others[1], is_share=True)
    for _ in range(20):
        network.advance(0.1)
        node.members.note_progress(others[0].life, network.now, True)
    assert node.may_send(others[1], is_share=True)


def test_what_was_taken_back_does_not_count_when_it_comes():
    network = Network(2)
    run_calmly(network, 2)
    network.narrow = {(0, 1)}
    one, two = network.processes
    one.make_step("sgp")
    late = next(message for _, message in one.node.post.outbox if message.kind == "share")
    run_calmly(network, 3 * PATIENCE, steps=False)
    network.narrow = set()
    assert len(network.account.returned) == 1
    two.node.receive(late, network.now)
    assert not network.account.returned.keys() & network.account.received.keys()
    before = len(network.account.received)
    run_calmly(network, 11 * PATIENCE)
    assert len(network.account.received) > before + 20  # the numbers of parcels go on


def test_a_node_joins_others_that_always_wait_for_an_answer():
    """Half of what they hold is promised whenever they are asked for it."""
    network = Network(5)
    run_calmly(network, 2, "adpsgd")
    joiner = network.processes[-1]
    joiner.kill()
    run_calmly(network, 2 * PATIENCE, "adpsgd")
    joiner.start(founder=False)
    for _ in range(50):
        for process in network.processes[:-1]:
            process.make_step("adpsgd")
        network.collect()
        network.advance(0.1)
        while network.messages:
            kinds = [message.kind for _, message in network.messages]
            network.deliver(kinds.index("view") if "view" in kinds else 0)
    network.check()
    assert not joiner.node.founding.wants_mass


def stop(network):
    for process in network.processes:
        process.node.ending.is_finished = True


def finish(network, seconds):
    stop(network)
    run_calmly(network, seconds)
    averages = []
    for process in network.processes:
        assert process.node.ending.is_ended, process.node.ending.explain_missing()
        finals = [mass for _, mass in process.node.ending.finals.values()]
        averages.append(sum(m.x[0] for m in finals) / sum(m.w for m in finals))
    return averages


@pytest.mark.parametrize("since", [1.7 * PATIENCE, 4 * PATIENCE])
@pytest.mark.parametrize("meets", [False, True])
def test_nodes_that_do_not_hear_each_other_have_the_same_average(since, meets):
    """A third hears both, and passes on what each holds. Of two that met before one gives up."""
    network = Network(3)
    run_calmly(network, 3 * meets)
    network.cut = {frozenset((0, 1))}
    run_calmly(network, since + 5 * (not meets))
    if not meets:
        assert [len(p.node.members.list_members()) for p in network.processes] == [1, 1, 2]
    averages = finish(network, 3 * PATIENCE)
    masses = [p.holder.mass for p in network.processes]
    held = sum(m.w for m in masses)
    assert averages == [sum(m.x[0] for m in masses) / held] * 3
    assert held == 3 or (meets and held >= 1.5)


@pytest.mark.parametrize("heals", ["before the end", "in the end"])
def test_after_a_partition_the_average_is_the_same_on_all(heals):
    """Of a partition that heals too late each side has its own."""
    network = Network(4)
    run_calmly(network, 3)
    network.cut = {frozenset((a, b)) for a in (0, 1) for b in (2, 3)}
    run_calmly(network, 2 * PATIENCE)
    assert all(len(p.node.members.list_members()) == 1 for p in network.processes)
    if heals == "in the end":
        finish(network, 1)
    network.cut = set()
    if heals == "before the end":
        run_calmly(network, 2 * PATIENCE)
    averages = finish(network, 4 * PATIENCE)
    assert averages[0] == averages[1]
    assert averages[2] == averages[3]
    assert (averages[0] == averages[2]) == (heals == "before the end")
    network.check()


@pytest.mark.parametrize(("side", "gone"), [({0}, {0}), ({0, 3}, {1, 2}), ({0, 1, 3}, {2})])
def test_of_a_healed_partition_one_side_goes_on(side, gone):
    """The one with most of the places, or else with the smallest."""
    network = Network(4)
    run_calmly(network, 3)
    lives = [p.node.life for p in network.processes]
    network.cut = {frozenset((a, b)) for a in side for b in {0, 1, 2, 3} - side}
    run_calmly(network, 2 * PATIENCE)
    network.cut = set()
    run_calmly(network, PATIENCE)
    assert {p.place for p in network.processes if p.node.life not in lives} == gone
    assert all(len(p.node.members.list_members()) == 3 for p in network.processes)


@pytest.mark.parametrize("dies", [False, True])
def test_many_nodes_end_at_once_and_alike(dies):
    """A message from each to each, and few views. If the eldest dies, the next one decides."""
    network = Network(24)
    run_calmly(network, PATIENCE, steps=False)
    stop(network)
    network.advance(0.1)
    if dies:
        network.processes[0].kill()
    run_calmly(network, 2 * PATIENCE if dies else 1, steps=False)
    living = [p.node for p in network.processes if p.is_running]
    assert all(node.ending.is_ended for node in living)
    assert all(node.ending.finals == living[0].ending.finals for node in living)
    assert len(living[0].ending.finals) == len(living)


def test_the_dead_are_forgotten():
    """Addresses, deaths and counts of steps: what is told and tried does not grow."""
    network = Network(4)
    *others, lost = network.processes
    for process in network.processes:
        process.node.members._given = frozenset()
    run_calmly(network, 2)
    for _ in range(3):
        run_calmly(network, 1.2 * PATIENCE)
        lost.kill()
        run_calmly(network, 1.2 * PATIENCE)
        lost.start(founder=False)
    lost.kill()
    run_calmly(network, 5 * PATIENCE, steps=False)
    assert any(make_address(3) in p.node.members.contacts for p in others)
    run_calmly(network, 10 * PATIENCE, steps=False)
    for process in others:
        view = process.node._make_view()
        assert view.deaths == ()
        assert len(view.steps) == 4
        assert make_address(3) not in process.node.members.contacts


def test_many_nodes_are_told_little():
    """Of 24: some views at a beat, one view at a tick, and one line for each death."""
    network = Network(24)
    run_calmly(network, 2 * PATIENCE, steps=False)
    assert [len(process.node.members.peers) for process in network.processes] == [23] * 24
    one = network.processes[5]
    first, *_ = one.node.members.peers.values()
    one.node.members.next_beat = network.now
    for begs in (False, True):
        first.owe_view(begs=begs)
    one.node.tick(network.now)
    views = [message for _, message in one.node.post.outbox if message.kind == "view"]
    assert len({message.receiver for message in views}) == len(views) <= 1 + NEIGHBORS
    assert views[0].view is not None
    assert views[0].view.begs
    one.kill()
    life = one.node.life
    run_calmly(network, 2 * PATIENCE, steps=False)
    network.check()
    for process in network.processes:
        if process is not one:
            assert len(process.node.members.peers) == 22
            ((declarer, dead, _),) = process.node._make_view().deaths
            assert (declarer.place, dead) == (0, life)


def test_a_parcel_that_is_refused_returns():
    network = Network(2)
    run_calmly(network, 2)
    one, two = network.processes
    half = one.holder.mass / 2
    one.holder.add(-half)
    one.node.share(two.node.members.identity, half, network.now)
    (address, message) = one.node.post.outbox.pop()
    one.node.post.outbox.append((address, message._replace(mass=None, text="with NaN or infinity")))
    network.collect()
    deliver_all(network)
    network.check()
    assert list(one.node.post.dropped) == ["refused by place 1: with NaN or infinity"]
    assert one.node.may_send(two.node.members.identity, is_share=True)
    run_calmly(network, 2)  # the numbers of parcels go on
    assert len(network.account.returned) == 1


def test_only_the_eldest_says_that_the_end_has_come():
    """A younger node, which says so too early and of nobody, is not believed."""
    network = Network(3)
    run_calmly(network, PATIENCE)
    stop(network)
    liar = network.processes[2].node
    for process in network.processes[:2]:
        view = liar._make_view()._replace(is_ended=True, finals=())
        message = Message("view", liar.members.identity, process.node.life, view=view)
        process.node.receive(message, network.now)
        assert liar.members.identity in process.node.ending._verdicts
    finish(network, PATIENCE)


def test_places_of_which_one_node_tells_do_not_grow_all_views():
    network = Network(2)
    run_calmly(network, PATIENCE)
    a, b = (process.node for process in network.processes)
    view = b._make_view()._replace(steps=tuple((100 + n, 1) for n in range(9000)))
    a.receive(Message("view", b.members.identity, a.life, view=view), network.now)
    assert len(a._make_view().steps) <= MAX_UNMET + 2
