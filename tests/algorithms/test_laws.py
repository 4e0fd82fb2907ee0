"""Algorithms that are one another on some schedule, or differ where one might confuse them."""

import numpy as np
import optax
import pytest
from algorithms.problems import momentum_sgd, train

import gossipjax as gx


def train_after_sgd(gossip, n, mode="shard_map"):
    return train(optax.chain(momentum_sgd(), gossip), n, mode, equal_starts=False)


@pytest.mark.parametrize(("mode", "n"), [("vmap", 2), ("vmap", 8), ("shard_map", 3)])
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


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda s: gx.osgp(s, overlap=0), "adapt-then-combine"),
        (lambda s: gx.osgp(s, overlap=0, biased=True), "adapt-then-combine"),
        (lambda s: gx.adpsgd(s, delays=0), "combine-while-adapting"),
    ],
    ids=["overlap 0", "overlap 0, biased", "delay 0"],
)
def test_without_lateness_every_message_is_used_at_once(make, order):
    """Not compared with `sgp` and `dpsgd`, whose code it runs."""
    schedule = gx.topology.bipartite_exponential(4)
    trained = train_after_sgd(make(schedule), 4)
    expected = np.stack(list(train_promptly(schedule, order)))
    np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=1e-5)
