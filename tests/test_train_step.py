"""The training step: one program per round, and the exchange of OSGP beside the gradients."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import mesh

import gossipjax as gx

N = 8
SCHEDULE = gx.topology.one_peer_exponential(N)


def gradients(z, target):
    return z - target, jnp.sum(jnp.square(z - target))


def trained(gossip, schedule, lookback=0, steps=9, dtype=jnp.float32, **where):
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gossip)
    step = gx.TrainStep(gradients, tx, schedule, lookback, **where)
    keywords = {k: v for k, v in where.items() if k != "threads"}
    targets = jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), dtype)
    z = jnp.zeros((N, 5), dtype)
    state, losses = gx.spmd(tx.init, **keywords)(z), []
    for k in range(steps):
        z, state, loss = step(k, z, state, targets)
        losses.append(loss)
    return step, np.asarray(z, np.float32), np.asarray(losses, np.float32)


@pytest.mark.parametrize("where", [{"mesh": mesh(N)}, {"nodes": N}], ids=["mesh", "vmap"])
@pytest.mark.parametrize("overlap", [1, 2])
def test_threads_change_nothing(overlap, where):
    spread = SCHEDULE.every(overlap)
    results = [
        trained(gx.osgp(SCHEDULE, overlap), spread, overlap, threads=threads, **where)[1:]
        for threads in (False, True)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


RANDOM = gx.topology.random_peer(N, rounds=40, seed=0)  # more rounds than programs


@pytest.mark.parametrize(
    ("schedule", "overlap", "options", "dtype", "near"),
    [
        (SCHEDULE, 1, {"biased": True}, jnp.float32, 1e-6),
        (SCHEDULE, 3, {"biased": True}, jnp.float32, 1e-6),
        (SCHEDULE, 2, {"wire_dtype": jnp.bfloat16}, jnp.float32, 1e-6),
        (SCHEDULE, 1, {}, jnp.bfloat16, 2**-8),
        (RANDOM, 1, {}, jnp.float32, 1e-6),
        (RANDOM, 3, {}, jnp.float32, 1e-6),
    ],
)
def test_threads_change_no_variant(schedule, overlap, options, dtype, near):
    tx = gx.osgp(schedule, overlap, **options)
    spread = schedule.every(overlap)
    results = [
        trained(tx, spread, overlap, steps=11, dtype=dtype, threads=threads, nodes=N)[1:]
        for threads in (False, True)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=near, atol=near)


def test_the_exchange_runs_in_a_thread_of_its_own(monkeypatch):
    seen = []
    exchange = gx.exchange

    def watched(*args):
        seen.append(threading.current_thread().name)
        return exchange(*args)

    monkeypatch.setattr("gossipjax.loop.exchange", watched)
    trained(gx.osgp(SCHEDULE), SCHEDULE, 1, threads=True, nodes=N)
    assert seen  # once per program, when it is traced
    assert all(name.startswith("exchange") for name in seen)


def test_one_process_has_no_wire_to_hide():
    tx = gx.osgp(SCHEDULE)
    state = gx.spmd(tx.init, nodes=N)(jnp.ones(N))
    step = gx.TrainStep(gradients, tx, SCHEDULE, 1, nodes=N)
    assert not step.overlaps(state)
    assert gx.TrainStep(gradients, tx, SCHEDULE, 1, nodes=N, threads=True).overlaps(state)
    plain = gx.spmd(gx.sgp(SCHEDULE).init, nodes=N)(jnp.ones(N))
    assert not gx.TrainStep(gradients, tx, SCHEDULE, nodes=N, threads=True).overlaps(plain)


@pytest.mark.parametrize("rounds", [5, 40])
def test_a_program_per_round_unless_they_are_too_many(rounds):
    schedule = gx.topology.random_ring(N, rounds, seed=0)
    step, z, _ = trained(gx.dpsgd(schedule), schedule, nodes=N)
    assert step.steps == (list(range(5)) if rounds == 5 else None)
    x, momentum = np.zeros((N, 5)), 0
    targets = np.random.default_rng(0).normal(size=(N, 5))
    for k in range(9):
        momentum = 0.9 * momentum + x - targets
        x = schedule.round_at(k).matrix @ x - 0.1 * momentum
    np.testing.assert_allclose(z, x, rtol=1e-4, atol=1e-5)


def test_an_error_in_the_thread_is_raised():
    tx = gx.osgp(gx.topology.ring(4))
    step = gx.TrainStep(gradients, tx, gx.topology.ring(4), 1, nodes=4, threads=True)
    state = gx.spmd(tx.init, nodes=4)(jnp.ones(4))
    with pytest.raises(ValueError, match="leading axis of 4 nodes"):
        step(0, jnp.ones(4), jax.tree.map(lambda x: x[:3], state), jnp.ones(4))
