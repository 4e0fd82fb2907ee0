"""Simulated AD-PSGD and D1D-PSGD against an event-by-event reference, gradients at older models."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import MODES, run

import gossipjax as gx
from gossipjax.state import find_state

N, RATE, STEPS = 8, 0.2, 12
SCALES = np.arange(1.0, 4.0)  # of a quadratic per coordinate


def problem():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 3)), rng.normal(size=(N, 3))


def event_by_event(schedule, delays, starts, targets, steps=STEPS):
    """Workers that read, compute, meet a partner and write: yields what each reads next, and all.

    An event is (time, kind, worker, step of its write); reads of a time come before its meetings,
    and meetings before its writes.
    """
    READ, MEET, WRITE = range(3)
    events = [(step, MEET, 0, step) for step in range(steps)]
    for step in range(steps + 1):
        for worker in range(N):
            read_at = max(0, step - delays[step % len(delays)][worker])
            events += [(read_at, READ, worker, step), (step, WRITE, worker, step)]
    heapq.heapify(events)
    model, gradient, held = starts.copy(), {}, {}
    while events:
        time, kind, worker, step = heapq.heappop(events)
        if kind == READ:
            held[step, worker] = model[worker].copy()
            gradient[step, worker] = SCALES * (model[worker] - targets[worker])
        elif kind == MEET:
            weights, before = schedule.round_at(step).matrix, model.copy()
            for i in range(N):
                model[i] = sum(weights[i, j] * before[j] for j in range(N))
        elif step < steps:
            model[worker] = model[worker] - RATE * gradient[step, worker]
            if worker == N - 1:
                # What a worker computes with at the next step may only be read by then.
                reads = [e for e in events if e[1] == READ and e[3] == step + 1 and e[0] > time]
                known = {w: model[w] for _, _, w, _ in reads}
                next_reads = [known[w] if w in known else held[step + 1, w] for w in range(N)]
                yield np.stack(next_reads), model


def trained(tx, starts, targets, schedule, mode="vmap", steps=STEPS):
    """What the user holds, and the latest models, after every step."""
    tx = optax.chain(optax.sgd(RATE), tx)
    x = jnp.asarray(starts, jnp.float32)

    def step(x, state, target, k):
        updates, state = tx.update(jnp.asarray(SCALES, x.dtype) * (x - target), state, x, step=k)
        x = x + updates
        return x, state, gx.latest_model(x, state), gx.average_model(x, state)

    program, state = run(mode, step, N, shared=(3,)), run(mode, tx.init, N)(x)
    for k in range(steps):
        x, state, latest, average = program(x, state, jnp.asarray(targets, "f4"), jnp.int32(k))
        yield np.asarray(x), np.asarray(latest), np.asarray(average)


DELAYS = {
    "none": [[0] * N],
    "one": [[1] * N],
    "three": [[3] * N],
    "a table": np.random.default_rng(1).integers(0, 5, (4, N)).tolist(),
    "one slow worker": [[0] * (N - 1) + [4]],
}


@pytest.mark.parametrize("name", DELAYS)
def test_equals_the_events(name):
    schedule, (starts, targets) = gx.topology.bipartite_exponential(N), problem()
    found = trained(gx.adpsgd(schedule, DELAYS[name]), starts, targets, schedule)
    expected = event_by_event(schedule, DELAYS[name], starts, targets)
    for k, ((held, latest, average), (reads, model)) in enumerate(
        zip(found, expected, strict=True)
    ):
        where = f"step {k}"
        np.testing.assert_allclose(held, reads, rtol=1e-4, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(latest, model, rtol=1e-4, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(average[3], model.mean(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_d1d_is_adpsgd_on_the_complete_graph_with_delay_one(mode):
    schedule, (starts, targets) = gx.topology.complete(N), problem()
    d1d = list(trained(gx.d1d_psgd(N), starts, targets, schedule, mode))
    expected = event_by_event(schedule, [[1] * N], starts, targets)
    for (held, latest, _), (reads, model) in zip(d1d, expected, strict=True):
        np.testing.assert_allclose(held, reads, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(latest, model, rtol=1e-4, atol=1e-5)


def test_rand_psgd_is_dpsgd_on_random_rings():
    """RAND-20, section 3, with the rings drawn as the topology's test has them."""
    schedule, (starts, targets) = gx.topology.random_ring(N, 5, seed=0), problem()
    x = starts
    for k, (held, *_) in enumerate(trained(gx.dpsgd(schedule), starts, targets, schedule)):
        x = schedule.matrices()[k % 5] @ x - RATE * SCALES * (x - targets)
        np.testing.assert_allclose(held, x, rtol=1e-4, atol=1e-5)


def test_a_run_can_be_replayed():
    schedule, (starts, targets) = gx.topology.bipartite_exponential(N), problem()
    runs = [
        list(trained(gx.adpsgd(schedule, gx.random_delays(N, 5, 3)), starts, targets, schedule))
        for _ in range(2)
    ]
    for (one, *_), (other, *_) in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
    other = trained(gx.adpsgd(schedule, gx.random_delays(N, 5, 4)), starts, targets, schedule)
    assert np.abs(runs[0][-1][0] - list(other)[-1][0]).max() > 1e-3


@pytest.mark.parametrize("largest", [1, 2, 4])
def test_the_ring_buffer_is_as_long_as_it_must_be(largest):
    state = gx.adpsgd(gx.topology.ring(2), largest).init({"a": jnp.ones(3, jnp.bfloat16)})
    shapes = [x.shape for x in jax.tree.leaves(find_state(state).older)]  # pyright: ignore
    assert shapes == ([(largest - 1, 3)] if largest > 1 else [])


def test_random_delays_have_the_mean_asked_for():
    delays = gx.random_delays(50, 200, seed=0, mean=1.5, largest=100)
    assert delays.shape == (200, 50)
    assert abs(delays.mean() - 1.5) < 0.05
    assert gx.random_delays(50, 200, seed=0, mean=3.0, largest=2).max() == 2
    assert not gx.random_delays(2, 3, seed=0, mean=0).any()


class TestBadInput:
    ring = gx.topology.ring(4)

    @pytest.mark.parametrize(
        ("delays", "said"),
        [
            (-1, r"not negative; delays\[0, 0\] = -1"),
            ([[0, 1, -2, 0]], r"delays\[0, 2\] = -2"),
            ([[0, 1, 1]], r"\[T, N\] with N = 4.* given shape \[1, 3\]"),
            ([0, 1, 1, 0], r"given shape \[4\]"),
            (np.zeros((0, 4), int), r"given shape \[0, 4\]"),
            (1.5, r"whole numbers of steps; given 1.5"),
            ([[True] * 4], r"whole numbers of steps"),
        ],
    )
    def test_delays(self, delays, said):
        with pytest.raises(ValueError, match=said):
            gx.adpsgd(self.ring, delays)

    def test_a_schedule_that_is_not_doubly_stochastic(self):
        with pytest.raises(ValueError, match="adpsgd needs a doubly stochastic schedule"):
            gx.adpsgd(gx.topology.star(4))

    def test_no_schedule(self):
        with pytest.raises(ValueError, match=r"adpsgd needs a gx.Schedule; given ndarray"):
            gx.adpsgd(np.eye(3))  # pyright: ignore[reportArgumentType]

    def test_random_delays(self):
        with pytest.raises(ValueError, match="mean delay is at least 0"):
            gx.random_delays(4, 2, 0, mean=-1)
        with pytest.raises(ValueError, match="rounds of random_delays is a whole number"):
            gx.random_delays(4, 0, 0)

    def test_d1d_of_no_nodes(self):
        with pytest.raises(ValueError, match="whole number of at least 1; given 0"):
            gx.d1d_psgd(0)
