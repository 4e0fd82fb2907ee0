"""Who brings a model: all nodes of a new job, and none that comes back to one that goes on."""

import itertools
import random
import re
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from fake_network import PATIENCE, Network
from test_protocol import run_calmly

import gossipjax.asynchronous as ga
from gossipjax.asynchronous._messages import Mass


def make_network(size, running):
    network = Network(size, founders=0)
    for process in network.processes:
        process.is_running = False
    for place in running:
        network.processes[place].start(founder=None)
    return network


def weights(network) -> list[Any]:
    return [float(p.holder.mass.w) if p.is_running else None for p in network.processes]


@pytest.mark.parametrize("seed", range(9))
def test_none_asks_another_that_has_just_begun(seed):
    """However late messages come: of saved models none is lost."""
    network = make_network(3, [0, 1, 2])
    rng = random.Random(seed)
    for process in network.processes:
        process.node.founding.bring(Mass((Fraction(1),), Fraction(1)), steps=5 + process.place)
    for _ in range(100):
        network.advance(PATIENCE / 50)
        for _ in range(rng.randrange(9)):
            network.deliver(0)
    run_calmly(network, PATIENCE / 10, steps=False)
    assert weights(network) == [1, 1, 1]


def test_most_begin_after_a_while_and_who_comes_later_asks():
    network = make_network(3, [0, 1])
    run_calmly(network, PATIENCE / 2)
    assert weights(network) == [0, 0, None]
    run_calmly(network, PATIENCE)
    network.processes[2].start(founder=None)
    run_calmly(network, 3 * PATIENCE)
    assert sum(weights(network)) == pytest.approx(2)
    assert not network.processes[2].node.founding.wants_mass


def test_one_of_two_begins_nothing_alone():
    network = make_network(2, [0])
    run_calmly(network, 30 * PATIENCE)
    assert weights(network) == [0, None]
    network.processes[1].start(founder=None)
    run_calmly(network, PATIENCE)
    assert sum(weights(network)) == pytest.approx(2)


@pytest.mark.parametrize("is_cut", [False, True])
def test_who_comes_back_after_a_long_time_gets_half(is_cut):
    """Also when its network comes later than its process."""
    network = make_network(2, [0, 1])
    run_calmly(network, 2 * PATIENCE)
    network.processes[1].kill()
    run_calmly(network, 30 * PATIENCE)
    left = weights(network)[0]
    network.processes[1].start(founder=None)
    network.cut = {frozenset((0, 1))} if is_cut else set()
    run_calmly(network, 3 * PATIENCE)
    network.cut = set()
    run_calmly(network, PATIENCE)
    assert not network.processes[1].node.founding.wants_mass
    assert sum(weights(network)) == pytest.approx(left)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (2, 2), (3, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("ends", ["killed", "leaves"])
@pytest.mark.parametrize("network_comes", ["in time", "late", "after a day"])
def test_what_nodes_with_saves_do_when_they_come_back(size, count, ends, network_comes):
    """The table in docs/guides/asynchronous.md: the job that went on goes on, and no old model."""
    network = make_network(size, range(size))
    run_calmly(network, 2 * PATIENCE)
    gone = network.processes[size - count :]
    saves = [(p.holder.mass, p.node.members.own_steps, p.node.founding.branch) for p in gone]
    if ends == "leaves":
        for process in gone:
            process.node.ending.leave()
        run_calmly(network, PATIENCE, steps=False)
    for process in gone:
        process.kill()
    run_calmly(network, 3 * PATIENCE)
    left = sum(w for w in weights(network) if w is not None)
    assert left == (size if count < size and ends == "leaves" else left)
    if network_comes != "in time":
        pairs = itertools.product([p.place for p in gone], range(size))
        network.cut = {frozenset(pair) for pair in pairs}
    for process, (mass, steps, branch) in zip(gone, saves, strict=True):
        process.start(founder=None)
        process.node.founding.bring(mass / mass.w, steps, 0, branch)
    run_calmly(
        network, {"in time": 0, "late": PATIENCE / 2, "after a day": 4 * PATIENCE}[network_comes]
    )
    is_alone = network_comes == "after a day"
    assert [p.node.founding.wants_mass for p in gone] == [not is_alone] * count
    assert set(weights(network)[size - count :]) == {float(is_alone)}
    network.cut = set()
    run_calmly(network, 3 * PATIENCE)
    network.check()
    assert not any(p.node.founding.wants_mass for p in network.processes)
    # Who goes on alone has weight 1, of which the oldest is kept if no other has any.
    kept = left if count < size else 1 if is_alone else size
    on_way = sum(mass.w for p in network.processes for mass in p.node.post.list_moving())
    assert sum(weights(network)) + float(on_way) == pytest.approx(float(kept))
    told = ["branch" in p.node.members.notes for p in gone]
    assert sum(told) == (0 if not is_alone else count - (count == size))


def test_a_job_that_is_lost_begins_anew():
    """All have died one after the other, so that each knows that there was one."""
    network = make_network(2, [0, 1])
    run_calmly(network, 2 * PATIENCE)
    network.processes[0].kill()
    network.processes[0].start(founder=None)
    network.cut = {frozenset((0, 1))}
    network.processes[1].kill()
    network.processes[0].node.members.steps[1] = 20  # it has heard of them, and got nothing
    network.processes[1].start(founder=None)
    network.cut = set()
    run_calmly(network, PATIENCE / 2)
    assert weights(network) == [0, 0]
    run_calmly(network, 2 * PATIENCE)
    assert sum(weights(network)) > 0


def test_a_place_founds_once():
    """The models of the others do not move to one that was founded again."""
    network = make_network(3, [0, 1, 2])
    run_calmly(network, 2 * PATIENCE, steps=True)
    network.processes[1].kill()
    run_calmly(network, 3 * PATIENCE)
    left = sum(w for w in weights(network) if w is not None)
    network.processes[1].start(founder=True)
    run_calmly(network, PATIENCE)
    assert "place 1 founds once" in network.processes[1].node.members.notes["founds"]
    assert sum(weights(network)) == pytest.approx(left)


def test_what_a_launcher_says_is_found_and_arguments_win(monkeypatch):
    monkeypatch.setenv("GOSSIPJAX_NODE_ADDRESSES", "127.0.0.1:5961,127.0.0.1:5962")
    monkeypatch.setenv("GOSSIPJAX_NODE", "1")
    monkeypatch.setenv("GOSSIPJAX_JOB", "it")
    tx = optax.sgd(0.1)
    with ga.join(tx, jnp.zeros(3), algorithm=ga.sgp(), patience=0.2) as node:
        assert (node.place, node.address, node._settings.job) == (1, "127.0.0.1:5962", "it")
        begins = "127.0.0.1:5961 (Connection refused). A job of 2 nodes begins when all of them"
        with pytest.raises(TimeoutError, match=re.escape(begins)):
            node.wait_for_mass()
        other = ga.join(tx, jnp.zeros(3), algorithm=ga.sgp(), listen="127.0.0.1:5961", place=0)
        with other:
            other.wait_for_mass(20)
            node.wait_for_mass(20)
