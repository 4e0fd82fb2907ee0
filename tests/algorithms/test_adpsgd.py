"""Simulated AD-PSGD and D1D-PSGD against an event-by-event reference, gradients at older models."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import run

import gossipjax as gx

N = 8
STEPS = 12
LEARNING_RATE = 0.2
SCALES = np.arange(1.0, 4.0)  # of a quadratic per coordinate


def make_problem():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 3)), rng.normal(size=(N, 3))


def simulate_events(schedule, delays, starts, targets, steps=STEPS):
    """Workers read, compute, meet a partner and write: yields what each reads next, and all models.

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
    model = starts.copy()
    gradient = {}
    reads = {}
    while events:
        time, kind, worker, step = heapq.heappop(events)
        if kind == READ:
            reads[step, worker] = model[worker].copy()
            gradient[step, worker] = SCALES * (model[worker] - targets[worker])
        elif kind == MEET:
            weights = schedule.round_at(step).matrix
            before = model.copy()
            for i in range(N):
                model[i] = sum(weights[i, j] * before[j] for j in range(N))
        elif step < steps:
            model[worker] = model[worker] - LEARNING_RATE * gradient[step, worker]
            if worker == N - 1:
                # What a worker computes with at the next step may only be read by then.
                pending = [e for e in events if e[1] == READ and e[3] == step + 1 and e[0] > time]
                upcoming = {w: model[w] for _, _, w, _ in pending}
                next_reads = [
                    upcoming[w] if w in upcoming else reads[step + 1, w] for w in range(N)
                ]
                yield np.stack(next_reads), model


def train(tx, starts, targets):
    """Yields what the user holds, the latest models and their average, after every step."""
    tx = optax.chain(optax.sgd(LEARNING_RATE), tx)

    def train_node(x, target):
        def step(carry, k):
            x, state = carry
            grads = jnp.asarray(SCALES, x.dtype) * (x - target)
            updates, state = tx.update(grads, state, x, step=k)
            x = x + updates
            return (x, state), (x, gx.latest_model(x, state), gx.average_model(x, state))

        return jax.lax.scan(step, (x, tx.init(x)), jnp.arange(STEPS))[1]

    history = run("vmap", train_node, N)(*(jnp.asarray(x, jnp.float32) for x in (starts, targets)))
    yield from zip(*(np.asarray(x).swapaxes(0, 1) for x in history), strict=True)


DELAYS = {
    "none": [[0] * N],
    "one": [[1] * N],
    "three": [[3] * N],
    "a table": np.random.default_rng(1).integers(0, 5, (4, N)).tolist(),
    "one slow worker": [[0] * (N - 1) + [4]],
}


@pytest.mark.parametrize("name", DELAYS)
def test_equals_the_events(name):
    schedule = gx.topology.bipartite_exponential(N)
    starts, targets = make_problem()
    results = train(gx.adpsgd(schedule, DELAYS[name]), starts, targets)
    expected = simulate_events(schedule, DELAYS[name], starts, targets)
    for k, ((x, latest, average), (reads, model)) in enumerate(zip(results, expected, strict=True)):
        where = f"step {k}"
        np.testing.assert_allclose(x, reads, rtol=1e-4, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(latest, model, rtol=1e-4, atol=1e-5, err_msg=where)
        np.testing.assert_allclose(average[3], model.mean(axis=0), rtol=1e-4, atol=1e-5)


def test_d1d_is_adpsgd_on_the_complete_graph_with_delay_one():
    starts, targets = make_problem()
    results = list(train(gx.d1d_psgd(N), starts, targets))
    expected = simulate_events(gx.topology.complete(N), [[1] * N], starts, targets)
    for (x, latest, _), (reads, model) in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, reads, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(latest, model, rtol=1e-4, atol=1e-5)


def test_a_run_can_be_replayed():
    schedule = gx.topology.bipartite_exponential(N)
    starts, targets = make_problem()
    first, again, other = (
        list(train(gx.adpsgd(schedule, gx.random_delays(N, 5, seed)), starts, targets))
        for seed in (3, 3, 4)
    )
    for (x, *_), (y, *_) in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.abs(first[-1][0] - other[-1][0]).max() > 1e-3


@pytest.mark.parametrize("max_delay", [1, 2, 4])
def test_the_history_is_as_long_as_it_must_be(max_delay):
    state = gx.adpsgd(gx.topology.ring(2), max_delay).init({"a": jnp.ones(3, jnp.bfloat16)})
    extra = gx.gossip_state(state).extra  # pyright: ignore[reportOptionalMemberAccess]
    shapes = [] if extra is None else [x.shape for x in jax.tree.leaves(extra["history"].value)]
    assert shapes == ([(max_delay - 1, 3)] if max_delay > 1 else [])


def test_random_delays_have_the_requested_mean():
    delays = gx.random_delays(50, 200, seed=0, mean_delay=1.5, max_delay=100)
    assert delays.shape == (200, 50)
    assert abs(delays.mean() - 1.5) < 0.05
    assert gx.random_delays(50, 200, seed=0, mean_delay=3.0, max_delay=2).max() == 2
    assert not gx.random_delays(2, 3, seed=0, mean_delay=0).any()
