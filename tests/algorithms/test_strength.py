"""Mixing of a strength below 1: what it is at its ends, and where the nodes end."""

import jax
import jax.numpy as jnp
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


def test_the_strength_follows_the_rate_from_the_end_of_its_warm_up():
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.4, 3, 11)
    strength = gx.contrib.adaptive_consensus(rate, start=3, power=2.0, minimum=0.25)
    k = np.arange(12)
    share = (1 + np.cos(np.pi * (k - 3) / 8)) / 2
    expected = np.where(k < 3, 1.0, 0.75 * share**2 + 0.25)
    np.testing.assert_allclose(jax.vmap(strength)(k), expected, rtol=1e-5)
    early = gx.contrib.adaptive_consensus(rate, start=1)  # the rate goes on rising
    assert jnp.asarray(early(3)) == 1.0


def test_nodes_end_apart_around_an_exact_average():
    """Quadratics of other minima: at rate 0 and strength 0 nothing brings the nodes together."""
    steps = 400
    rate = optax.cosine_decay_schedule(0.2, steps)
    target = jnp.asarray([0.0, 1.0, 2.0, 5.0])

    def distance_and_mean(strength):
        def solve(x, target):
            tx = optax.chain(optax.sgd(rate), gx.dpsgd(RING, strength=strength))

            def body(carry, step):
                x, state = carry
                updates, state = tx.update(x - target, state, x, step=step)
                return (x + updates, state), None

            (x, state), _ = jax.lax.scan(body, (x, tx.init(x)), jnp.arange(steps))
            return gx.diagnostics.consensus_distance(x), gx.average_model(x, state)

        distance, mean = jax.jit(jax.vmap(solve, axis_name="nodes"))(jnp.zeros(4), target)
        return float(distance.max()), float(mean[0])

    apart, mean = distance_and_mean(gx.contrib.adaptive_consensus(rate))
    together, _ = distance_and_mean(1.0)
    assert mean == pytest.approx(2.0, abs=1e-4)
    assert together < 0.01
    assert apart > 0.1
