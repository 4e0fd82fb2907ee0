"""Mixing of a strength below 1: what it is at its ends, and where the nodes end."""

import jax
import numpy as np
import optax
import pytest
from algorithms.problems import momentum_sgd, train

import gossipjax as gx

RING = gx.topology.ring(4)


@pytest.fixture(autouse=True)
def promotion():
    """Schedules of optax promote types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def train_after_sgd(gossip):
    return train(optax.chain(momentum_sgd(), gossip), 4, "vmap", equal_starts=False)


@pytest.mark.parametrize("order", ["combine-while-adapting", "adapt-then-combine"])
def test_at_1_it_is_dpsgd_bit_for_bit_and_at_0_the_optimizer_alone(order):
    whole = train_after_sgd(gx.dpsgd(RING, order, strength=lambda count: 1.0))
    np.testing.assert_array_equal(whole, train_after_sgd(gx.dpsgd(RING, order)))
    alone = train_after_sgd(gx.dpsgd(RING, order, strength=0.0))
    np.testing.assert_allclose(alone, train(momentum_sgd(), 4, "vmap", equal_starts=False), 1e-5)


def test_a_constant_strength_is_a_lazy_matrix():
    lazy = gx.topology.from_matrices(0.7 * np.eye(4) + 0.3 * RING.matrices()[0])
    by_strength, by_matrix = (
        train_after_sgd(tx) for tx in (gx.dpsgd(RING, strength=0.3), gx.dpsgd(lazy))
    )
    np.testing.assert_allclose(by_strength, by_matrix, rtol=1e-5, atol=1e-6)
