"""Consensus distance, total mass and average model at weights other than 1; outer gradients."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import MODES, run

import gossipjax as gx

N = 4


@pytest.fixture(scope="module")
def trained():
    """SGP on an irregular schedule: parameters, state, and the oracle's z, x, w."""
    rng = np.random.default_rng(1)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, N))
    starts = rng.normal(size=(N, 5))
    updates = rng.normal(size=(4, N, 5))
    tx = optax.chain(optax.identity(), gx.sgp(schedule))
    z = jnp.asarray(starts, jnp.float32)
    nodes = gx.Nodes(N)
    state = nodes.run(tx.init, z)
    for u in updates:
        change, state = nodes.run(tx.update, jnp.asarray(u, jnp.float32), state, z)
        z = z + change
    *_, expected = oracle.sgp(schedule.matrices(), starts, updates)
    return z, state, expected


@pytest.mark.parametrize("mode", MODES)
def test_consensus_distance_of_each_layer(mode):
    rng = np.random.default_rng(0)
    tree = {
        "a": jnp.asarray(rng.normal(size=(N, 3, 2)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(N, 4)), jnp.bfloat16),
    }
    by_layer = run(mode, gx.diagnostics.layer_consensus_distance, N)(tree)
    for name, values in tree.items():
        flat = np.asarray(values, np.float64).reshape(N, -1)
        expected = np.linalg.norm(flat - flat.mean(axis=0), axis=1)
        np.testing.assert_allclose(by_layer[name], expected, rtol=1e-4)
    distance = run(mode, gx.diagnostics.consensus_distance, N)(tree)
    np.testing.assert_allclose(np.hypot(by_layer["a"], by_layer["b"]), distance, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_equal_nodes_have_distance_zero(mode):
    """The plain mean of equal float32 values is off by rounding for 3 nodes already."""
    same = jnp.tile(jnp.asarray(np.random.default_rng(0).normal(size=(1, 99)), jnp.float32), (3, 1))
    assert not np.asarray(run(mode, gx.diagnostics.consensus_distance, 3)(same)).any()


def test_low_precision_parameters_are_measured_in_float32():
    """bfloat16 does not have the root of 1028 / 256."""
    z = jnp.concatenate([jnp.zeros((1, 1028)), jnp.full((1, 1028), 0.125)]).astype(jnp.bfloat16)
    distance = gx.spmd(gx.diagnostics.consensus_distance, nodes=2)(z)
    assert distance.dtype == jnp.float32
    np.testing.assert_allclose(distance, np.sqrt(1028) / 16, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_mass_and_average_count_numerators_and_weights(mode, trained):
    z, state, (_, x, w) = trained
    assert np.abs(w - 1).max() > 0.1
    mass, weight = run(mode, gx.diagnostics.total_mass, N)(z, state)
    np.testing.assert_allclose(mass, np.tile(x.sum(axis=0), (N, 1)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weight, N, rtol=1e-6)
    average = run(mode, gx.average_model, N)(z, state)
    np.testing.assert_allclose(average, np.tile(x.sum(axis=0) / N, (N, 1)), rtol=1e-4, atol=1e-5)
    assert np.abs(average[0] - z.mean(axis=0)).max() > 1e-2, "not the plain mean of the z"


def test_without_a_gossip_transform_every_node_counts_one():
    z = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.bfloat16)
    state = gx.spmd(optax.adam(0.1).init, nodes=N)(z)
    mass, weight = gx.spmd(gx.diagnostics.total_mass, nodes=N)(z, state)
    assert mass.dtype == jnp.float32
    np.testing.assert_allclose(mass[0], z.astype(np.float32).sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(weight, np.full(N, N))
    average = gx.spmd(gx.average_model, nodes=N)(z, state)
    assert average.dtype == jnp.bfloat16


def test_outer_gradients_are_measured_and_passed_on():
    """Each fragment's norms and cosines, against the gradients that the oracle's optimizer gets."""
    rng = np.random.default_rng(0)
    starts = np.tile(rng.normal(size=(1, 7)), (N, 1))
    updates = rng.normal(size=(6, N, 7)) - 0.3
    nesterov = {"momentum": 0.9, "nesterov": True}
    gradients = []

    def record(state, k, gradient, anchor):
        gradients.append(gradient)
        return oracle.sgd(0.7, **nesterov)(state, k, gradient, anchor)

    parts = slice(0, 3), slice(3, 7)
    *_, (expected, *_) = oracle.outer([None], starts, updates, record, every=2, parts=parts)
    monitor = gx.diagnostics.monitor_outer_gradient()
    outer_tx = optax.chain(monitor, optax.sgd(0.7, **nesterov))
    tx = gx.outer(optax.identity(), outer_tx, every=2, fragments=2)

    def train(z: Any, updates: Any) -> Any:
        state: Any = tx.init(z)
        measured = []
        for step in range(6):
            u = [updates[step, part] for part in parts]
            change, state = tx.update(u, state, z, step=step)
            z = optax.apply_updates(z, change)
            measured.append(state.outer)
        return z, measured[1], measured[5]

    z: Any = [jnp.asarray(starts[:, part], jnp.float32) for part in parts]
    by_node = jnp.asarray(updates.swapaxes(0, 1), jnp.float32)
    z, first, last = run("vmap", train, N)(z, by_node)
    np.testing.assert_allclose(np.hstack(z), expected, rtol=1e-5, atol=1e-5)
    for fragment in range(2):
        of_fragment = gradients[fragment * N :: 2 * N]
        one, two, three = map(np.linalg.norm, of_fragment)
        np.testing.assert_allclose(first[fragment][0].norm, one, rtol=1e-5)
        assert np.isnan(first[fragment][0].cosine).all()
        np.testing.assert_allclose(last[fragment][0].norm, three, rtol=1e-5)
        cosine = of_fragment[1] @ of_fragment[2] / (two * three)
        np.testing.assert_allclose(last[fragment][0].cosine, cosine, rtol=1e-5)


def test_effective_rate_is_what_momentum_makes_of_correlated_gradients():
    """In expectation over gradients whose correlation at lag k is `rho^k`, along the newest one."""
    rate, momentum, cosine = 0.7, 0.9, 0.4
    lags = np.arange(400)
    optimizer = oracle.sgd(rate, momentum, nesterov=True)
    state: dict[str, Any] = {}
    steps = [optimizer(state, None, correlation, 0.0) for correlation in cosine ** lags[::-1]]
    effective = gx.diagnostics.effective_rate(rate, momentum, cosine)
    np.testing.assert_allclose(effective, -steps[-1], rtol=1e-12)
