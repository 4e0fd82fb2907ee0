"""Algorithms that are one another on some schedule, or differ where one might confuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms.problems import make_problem, momentum_sgd, take_step, train, unflatten
from algorithms.rows import ROWS
from modes import run

import gossipjax as gx


def train_after_sgd(gossip, n, mode="shard_map"):
    return train(optax.chain(momentum_sgd(), gossip), n, mode, equal_starts=False)


@pytest.mark.parametrize(("mode", "n"), [("vmap", 2), ("vmap", 8), ("shard_map_check_vma", 3)])
def test_on_a_static_symmetric_graph_sgp_is_dpsgd(mode, n):
    ring = gx.topology.ring(n)
    by_sgp, by_dpsgd = (
        train_after_sgd(gossip, n, mode)
        for gossip in (gx.sgp(ring), gx.dpsgd(ring, "adapt-then-combine"))
    )
    np.testing.assert_allclose(by_sgp, by_dpsgd, rtol=1e-5, atol=1e-6)


def train_promptly(schedule, order, steps=6):
    """The models of `train_after_sgd`, by NumPy, where every message is used at once."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(schedule.size, 4))
    z = rng.normal(size=(schedule.size, 4))
    momentum = np.zeros_like(z)
    matrices = schedule.matrices()
    for k in range(steps):
        P = matrices[k % len(matrices)]
        momentum = 0.9 * momentum + (z - targets) * np.arange(1.0, 5.0)
        u = -0.05 * momentum
        z = P @ (z + u) if order == "adapt-then-combine" else P @ z + u
        yield z


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda s: gx.osgp(s, overlap=0), "adapt-then-combine"),
        (lambda s: gx.osgp(s, overlap=0, biased=True), "adapt-then-combine"),
        (lambda s: gx.adpsgd(s, delays=0), "combine-while-adapting"),
    ],
    ids=["overlap 0", "overlap 0, biased", "delay 0"],
)
def test_without_lateness_every_message_is_used_at_once(mode, make, order):
    """Not compared with `sgp` and `dpsgd`, whose code it runs."""
    schedule = gx.topology.bipartite_exponential(4)
    trained = train_after_sgd(make(schedule), 4, mode)
    expected = np.stack(list(train_promptly(schedule, order)))
    np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=1e-5)


def test_the_two_orders_of_dpsgd_differ():
    ring = gx.topology.ring(4)
    combine_first = train_after_sgd(gx.dpsgd(ring), 4)
    adapt_first = train_after_sgd(gx.dpsgd(ring, "adapt-then-combine"), 4)
    assert np.abs(combine_first - adapt_first).max() > 1e-2


def test_jit_equals_eager_under_shard_map():
    """One algorithm: op by op, each takes ten seconds."""
    n = 3
    rng, starts, updates = make_problem(n, jnp.float32)
    row = ROWS["osgp 1"]
    tx = row.transform(gx.topology.from_matrices(row.matrices(rng, n)))
    params = unflatten(starts)["bias"]

    def step(params, u):
        params, state = take_step(tx, (params, tx.init(params)), u, 0)
        return params, state, gx.diagnostics.total_mass(params, state)

    jitted, eager = (
        run("shard_map", step, n, jit=jit)(params, unflatten(updates[0])["bias"])
        for jit in (True, False)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), jitted, eager)
