"""Consensus distance, total mass and the average model, at weights other than 1."""

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
