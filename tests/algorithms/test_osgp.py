"""Overlap SGP: messages in flight, in pieces, over switches, and as a program of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import Mesh
from modes import MODES, run

import gossipjax as gx
from gossipjax.state import find_state

N = 8
GRAPHS = {
    "one peer": gx.topology.one_peer_exponential(N),
    "two peers": gx.topology.k_peer_exponential(N, 2),
    "random_peer": gx.topology.random_peer(N, 5, seed=3),
    "complete": gx.topology.complete(N),
    "three sevenths": gx.topology.from_matrices(
        np.eye(N) * 3 / 7 + np.roll(np.eye(N), 1, axis=0) * 4 / 7
    ),
}


def lowest(schedule, overlap):
    """The static step that a loop passes at each step."""
    spread = schedule.every(overlap)
    return lambda k: spread.canonical_step(k, lookback=overlap)


def history(tx, updates, step_of, mode="vmap", static=True, starts=None, received=False):
    """z after every step, `[S, N, D]`, and the last state; `updates` is `[S, N, D]`."""
    n = updates.shape[1]
    z = jnp.zeros(updates.shape[1:]) if starts is None else jnp.asarray(starts, jnp.float32)

    def update(z, state, u, k):
        late = {"received": gx.exchange(state, k, "nodes")} if received else {}
        moved, state = tx.update(u, state, z, step=k, **late)
        return z + moved, state

    state, seen = run(mode, tx.init, n)(z), []
    traced = run(mode, update, n, shared=(3,))
    programs = {}
    for k, u in enumerate(jnp.asarray(updates, jnp.float32)):
        at = step_of(k)
        if static and at not in programs:
            programs[at] = run(mode, partial(update, k=at), n)
        z, state = programs[at](z, state, u) if static else traced(z, state, u, jnp.int32(at))
        seen.append(np.asarray(z))
    return np.stack(seen), state


def problem(steps, n=N, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.normal(size=(steps, n, 3))


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_any_overlap_on_any_graph(graph, overlap, static):
    """Through two cycles, so that canonical steps come round again."""
    schedule = GRAPHS[graph]
    steps = 2 * overlap * schedule.period + overlap + 1
    starts, updates = problem(steps)
    at = lowest(schedule, overlap) if static else lambda k: k
    found, state = history(gx.osgp(schedule, overlap), updates, at, static=static, starts=starts)
    expected = list(oracle.osgp(schedule.matrices(), starts, updates, overlap))
    for k, (z, _, _) in enumerate(expected):
        np.testing.assert_allclose(found[k], z, rtol=2e-4, atol=1e-4, err_msg=f"step {k}")
    w = expected[-1][-1]
    np.testing.assert_allclose(find_state(state).weight, w, rtol=1e-5)  # pyright: ignore


HYBRIDS = {
    "all-reduce, then one peer": {0: "complete", 3: "one peer"},
    "two peers, then one peer": {0: "two peers", 4: "one peer"},
    "one peer, then all-reduce": {0: "one peer", 2: "complete"},
}


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_messages_are_delivered_over_a_switch(hybrid, overlap):
    """What was sent in the last round before the switch arrives by that round's edges."""
    parts = {start: GRAPHS[name] for start, name in HYBRIDS[hybrid].items()}
    schedule = gx.topology.piecewise(parts)
    steps = overlap * 10
    starts, updates = problem(steps)
    matrices = schedule.matrices(steps)  # of the rounds: one per `overlap` steps
    expected = [z for z, *_ in oracle.osgp(matrices, starts, updates, overlap)]
    for static in (True, False):
        at = lowest(schedule, overlap) if static else lambda k: k
        tx = gx.osgp(schedule, overlap)
        found, _ = history(tx, updates, at, static=static, starts=starts)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sgp", "dpsgd", "adpsgd"])
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_hybrids_of_the_other_algorithms(name, hybrid):
    parts = {start: GRAPHS[graph] for start, graph in HYBRIDS[hybrid].items()}
    schedule = gx.topology.piecewise(parts)
    starts, updates = problem(9)
    matrices = schedule.matrices(9)
    tx, expected = {
        "sgp": (gx.sgp(schedule), oracle.sgp(matrices, starts, updates)),
        "dpsgd": (
            gx.dpsgd(schedule),
            oracle.dpsgd_combine_while_adapting(matrices, starts, updates),
        ),
        "adpsgd": (gx.adpsgd(schedule, 1), oracle.adpsgd(matrices, starts, updates, [[1] * N])),
    }[name]
    found, _ = history(tx, updates, schedule.canonical_step, starts=starts)
    np.testing.assert_allclose(found, [z for z, *_ in expected], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [1, 2])
def test_the_two_halves_are_the_whole(overlap, mode):
    schedule = GRAPHS["one peer"]
    _, updates = problem(7)
    at = lowest(schedule, overlap)
    whole, halves = (
        history(gx.osgp(schedule, overlap), updates, at, mode, received=received)
        for received in (False, True)
    )
    jax.tree.map(np.testing.assert_array_equal, whole, halves)


def test_the_halves_are_programs_of_their_own_and_the_second_exchanges_nothing():
    schedule, counts = GRAPHS["one peer"], []
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule))
    z = jnp.ones((N, 5))
    state = gx.spmd(tx.init)(z)
    first = gx.spmd(lambda s: gx.exchange(s, 1, "nodes"))
    second = gx.spmd(lambda g, s, z, r: tx.update(g, s, z, step=1, received=r))
    received = first(state)
    for program, args in ((first, (state,)), (second, (z, state, z, received))):
        text = program.lower(*args).compile().as_text()
        counts.append(sum(text.count(f" {c}(") for c in ("collective-permute", "all-reduce")))
    assert counts == [1, 0]


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_a_message_travels_in_pieces_of_equal_size(overlap):
    """One collective-permute per step, of a tau-th of the model and the weight."""
    tx = gx.osgp(GRAPHS["one peer"], overlap)
    z = jnp.ones((N, 599))
    state = gx.spmd(tx.init)(z)
    for step in range(2 * overlap):
        program = gx.spmd(lambda z, s, k=step: tx.update(z, s, z, step=k))
        text = program.lower(z, state).compile().as_text()
        lines = [line for line in text.splitlines() if " collective-permute(" in line]
        assert len(lines) == 1
        assert f"f32[{600 // overlap}]" in lines[0].split(" collective-permute(")[0]


@pytest.mark.parametrize("overlap", [1, 2])
def test_the_mass_is_whole_at_every_step(overlap):
    schedule = GRAPHS["random_peer"]
    tx = gx.osgp(schedule, overlap)
    starts, updates = problem(8)
    z = jnp.asarray(starts, jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(z)
    masses = gx.spmd(gx.diagnostics.total_mass, nodes=N)
    average = gx.spmd(gx.average_model, nodes=N)
    total = starts.sum(axis=0)
    for k, u in enumerate(updates):
        step = gx.spmd(lambda u, s, z, k=k: tx.update(u, s, z, step=k), nodes=N)
        moved, state = step(jnp.asarray(u, jnp.float32), state, z)
        z, total = z + moved, total + u.sum(axis=0)
        mass, weight = masses(z, state)
        np.testing.assert_allclose(mass, np.tile(total, (N, 1)), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(weight, N, rtol=1e-6)
        np.testing.assert_allclose(average(z, state)[0], total / N, rtol=1e-4, atol=1e-5)
        assert float(state.weight.sum()) < N - 1, "some of it is on its way"


def test_ten_thousand_rounds_at_random_lose_nothing():
    """On `random_peer`, in float32: weights and messages add up to N, and z is the oracle's."""
    schedule = gx.topology.random_peer(N, 20, seed=0)
    tx = gx.osgp(schedule)
    starts = np.random.default_rng(0).normal(size=(N, 3))

    def rounds(z):
        def body(k, carry):
            z, state = carry
            moved, state = tx.update(jnp.zeros_like(z), state, z, step=k)
            return z + moved, state

        z, state = jax.lax.fori_loop(0, 10_000, body, (z, tx.init(z)))
        return z, state, gx.diagnostics.total_mass(z, state)[1]

    z, state, weight = jax.jit(jax.vmap(rounds, axis_name="nodes"))(jnp.asarray(starts, "f4"))
    assert abs(float(weight[0]) - N) < 1e-5 * N
    *_, (expected, _, w) = oracle.osgp(schedule.matrices(), starts, np.zeros((10_000, N, 3)), 1)
    np.testing.assert_allclose(z, expected, atol=1e-4)
    np.testing.assert_allclose(state.weight, w, rtol=1e-4)
    assert np.ptp(w) > 0.5, "the weights must differ for this to mean anything"


def test_biased_models_lack_what_is_on_its_way():
    """With one peer two thirds of the mass is at home: z = x is as much too small."""
    tx = gx.osgp(GRAPHS["one peer"], biased=True)
    found, state = history(tx, np.zeros((40, N, 3)), lambda k: k % 3 + 3, starts=np.ones((N, 3)))
    np.testing.assert_allclose(found[-1], 2 / 3, rtol=1e-5)
    z = jnp.asarray(found[-1])
    np.testing.assert_allclose(gx.spmd(gx.average_model, nodes=N)(z, state), 1, rtol=1e-5)


def test_weight_decay_and_momentum_act_on_the_unbiased_model():
    """Under overlap, decay on the numerator would be weaker by the mass that is on its way."""
    schedule = gx.topology.random_peer(N, 4, seed=1)
    tx = optax.chain(
        optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.9, nesterov=True),
        gx.osgp(schedule),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    z, gradients = rng.normal(size=(N, 3)), rng.normal(size=(7, N, 3))
    # The oracle one step at a time: its updates depend on its own z.
    updates, momentum, expected, w = [], np.zeros((N, 3)), z, np.ones(N)
    for g in gradients:
        g = g + 0.5 * expected
        momentum = 0.9 * momentum + g
        updates.append(-0.1 * (g + 0.9 * momentum))
        *_, (expected, _, w) = oracle.osgp(schedule.matrices(), z, updates, 1)
    held = jnp.asarray(z, jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(held)
    step = gx.spmd(tx.update, nodes=N)
    for g in gradients:
        moved, state = step(jnp.asarray(g, jnp.float32), state, held)
        held = held + moved
    np.testing.assert_allclose(held, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(w - 1).max() > 0.2


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("overlap", [1, 2])
def test_servers_of_several_devices(overlap, check_vma):
    """Each device sends its share of a message; the replicas inside a server stay equal."""
    nodes = 4
    schedule = gx.topology.random_peer(nodes, 4, seed=2)
    tx = gx.osgp(schedule, overlap, local_axis_name="local")
    servers = Mesh(np.array(jax.devices()).reshape(nodes, 2), ("nodes", "local"))
    starts, updates = problem(2 * overlap + 3, nodes)
    z = jnp.asarray(starts, jnp.float32)
    state = gx.spmd(tx.init, mesh=servers, check_vma=check_vma)(z)
    expected = oracle.osgp(schedule.matrices(), starts, updates, overlap)
    for k, (wanted, _, _) in enumerate(expected):
        update = gx.spmd(
            lambda u, s, z, k=k: tx.update(u, s, z, step=k), mesh=servers, check_vma=check_vma
        )
        moved, state = update(jnp.asarray(updates[k], jnp.float32), state, z)
        z = z + moved
        np.testing.assert_allclose(z, wanted, rtol=1e-4, atol=1e-5)


class TestBadInput:
    @pytest.mark.parametrize("overlap", [-1, 1.5, True])
    def test_overlaps(self, overlap):
        with pytest.raises(ValueError, match=r"overlap of osgp is a whole number of at least 0"):
            gx.osgp(GRAPHS["one peer"], overlap)

    def test_exchange_without_messages(self):
        tx = gx.sgp(GRAPHS["one peer"])
        with pytest.raises(ValueError, match=r"exchange needs the state of gx.osgp"):
            gx.spmd(lambda z: gx.exchange(tx.init(z), 0), nodes=N)(jnp.ones(N))

    def test_received_that_is_not_from_exchange(self):
        tx = gx.osgp(GRAPHS["one peer"])
        with pytest.raises(ValueError, match=r"received is what gx.exchange returns; given"):
            gx.spmd(lambda z: tx.update(z, tx.init(z), z, received=z), nodes=N)(jnp.ones(N))

    def test_a_state_of_another_overlap_or_schedule(self):
        state = gx.osgp(GRAPHS["one peer"], 2).init(jnp.ones(()))
        for graph, said in (("one peer", "overlap of 1"), ("two peers", "another schedule")):
            tx = gx.osgp(GRAPHS[graph], 1 if graph == "one peer" else 2)
            with pytest.raises(ValueError, match=said):
                gx.spmd(lambda z, tx=tx: tx.update(z, state, z), nodes=N)(jnp.ones(N))

    def test_a_mask_without_its_part(self):
        tx = optax.masked(gx.osgp(GRAPHS["one peer"], 2), {"a": True, "b": False})
        z = {"a": jnp.ones((N, 3)), "b": jnp.ones((N, 2))}
        state = gx.spmd(tx.init, nodes=N)(z)
        with pytest.raises(ValueError, match="where the transform is masked, pass the part"):
            gx.spmd(gx.average_model, nodes=N)(z, state)
        average = gx.spmd(lambda z, s: gx.average_model({"a": z["a"]}, s), nodes=N)(z, state)
        np.testing.assert_allclose(average["a"], 1)

    def test_steps(self):
        tx = gx.osgp(GRAPHS["one peer"])
        with pytest.raises(ValueError, match=r"step is a whole number .*; given 0.5"):
            gx.spmd(lambda z: tx.update(z, tx.init(z), z, step=0.5), nodes=N)(jnp.ones(N))
