"""Statistics of normalization layers: mixed with the parameters, or averaged."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import make_mesh, run

import gossipjax as gx

N = 4


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_mixed_as_the_parameters_are(mode):
    """Statistics that start as the parameters do and change as they do stay equal to them."""
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, N))
    tx = optax.chain(optax.identity(), gx.sgp(schedule))
    start = jnp.asarray(rng.normal(size=(N, 3)), jnp.float32)

    def steps(z):
        state = tx.init(z)
        stats = {"mean": z.astype(jnp.float32)}
        history = []
        for k in range(5):
            stats = gx.mix_batch_stats(stats, state, k)
            updates, state = tx.update(jnp.zeros_like(z), state, z, step=k)
            z = z + updates
            history.append((z, stats["mean"]))
        return history

    history = run(mode, steps, N)(start)
    for z, mean in history:
        np.testing.assert_allclose(mean, z, rtol=1e-4, atol=1e-5)
    drift = np.asarray(history[-1][0]).mean(axis=0) - start.mean(axis=0)
    assert np.abs(drift).max() > 1e-3, "weights must differ from 1"


@pytest.mark.parametrize(("overlap", "static"), [(1, True), (2, False)])
def test_overlap_mixes_by_the_round_of_the_step_and_at_once(overlap, static):
    """At every sending step by its round and the weights before it; at the others, not at all."""
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, N))
    tx = optax.chain(optax.sgd(0.1), gx.osgp(schedule, overlap))

    def step(stats, state, step):
        mixed = gx.mix_batch_stats(stats, state, step)
        _, state = tx.update(jnp.zeros(()), state, jnp.zeros(()), step=step)
        return mixed, state

    argnums: Any = {"static_argnums": 2} if static else {"shared_argnums": 2}
    program = gx.spmd(step, nodes=N, **argnums)
    start = rng.normal(size=(N, 3))
    stats = jnp.asarray(start, jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(jnp.zeros(N))
    expected = start
    weights = np.ones(N)
    zeros = np.zeros((3 * overlap, N, 1))
    for k, (_, _, next_weights) in enumerate(
        oracle.osgp(schedule.matrices(), zeros[0], zeros, overlap)
    ):
        stats, state = program(stats, state, k if static else jnp.int32(k))
        if k % overlap == 0:
            P = schedule.round_at(k // overlap).matrix
            expected = P @ (weights[:, None] * expected) / (P @ weights)[:, None]
        weights = next_weights
        np.testing.assert_allclose(stats, expected, rtol=1e-5, atol=1e-6, err_msg=f"step {k}")
    assert np.abs(weights - 1).max() > 0.1, "weights must differ from 1"


SGD = optax.sgd(0.1, momentum=0.9)
AT_ONCE = {  # of six steps, those at which all nodes exchange, and so have the mean
    "allreduce": (optax.chain(gx.allreduce(), SGD), range(6)),
    "easgd": (gx.easgd(0.1, every=2), (0, 2, 4)),
    "outer": (gx.outer(SGD, optax.sgd(1.0), 3), (2, 5)),
    "outer, over a ring": (gx.outer(SGD, optax.sgd(1.0), 3, average=gx.topology.ring(2)), (2, 5)),
    "outer, without an average": (gx.outer(SGD, optax.sgd(1.0), 3, average="none"), ()),
}


def test_they_are_averaged_when_the_models_are():
    def mix(stats, steps):
        states = {name: tx.init(jnp.zeros(2)) for name, (tx, _) in AT_ONCE.items()}
        return {
            name: [gx.mix_batch_stats(stats, state, step) for step in steps]
            for name, state in states.items()
        }

    stats = jnp.array([1.0, 3.0])
    static = gx.spmd(lambda x: mix(x, range(6)), gx.Nodes(mesh=make_mesh(2)), check_vma=True)
    traced = gx.spmd(mix, nodes=2, shared_argnums=1)
    for mixed in (static(stats), traced(stats, list(np.arange(6, dtype=np.int32)))):
        for name, (_, steps) in AT_ONCE.items():
            expected = [[2.0, 2.0] if step in steps else [1.0, 3.0] for step in range(6)]
            assert np.asarray(mixed[name]).tolist() == expected, name


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_averaged(mode):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.bfloat16)
    averaged = run(mode, gx.average_batch_stats, N)({"var": values})["var"]
    assert averaged.dtype == jnp.bfloat16
    expected = np.asarray(values, np.float32).mean(axis=0)
    np.testing.assert_allclose(averaged.astype(jnp.float32)[2], expected, rtol=2**-7)


def test_statistics_of_the_devices_of_a_node_are_averaged_first():
    """Each device sends a part of the message: unequal ones would be mixed up by it."""
    nodes = gx.Nodes(mesh=make_mesh(N, 2))
    schedule = gx.topology.ring(N)
    tx = gx.sgp(schedule, local_axis_name="local")
    batches = np.random.default_rng(0).normal(size=(N, 2, 3)).astype(np.float32)

    def mix(batch):
        return gx.mix_batch_stats(batch.mean(axis=0), tx.init(jnp.zeros(3)), 0)

    expected = schedule.matrices()[0] @ batches.mean(axis=1)
    for check_vma in (False, True):
        mixed = gx.spmd(mix, nodes, local_argnums=0, check_vma=check_vma)(batches)
        np.testing.assert_allclose(mixed, expected, rtol=1e-6, atol=1e-6)
