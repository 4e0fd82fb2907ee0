"""PowerSGD beside the shared matrix: its shapes, its state, its bytes, and its outer steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import draw_basis
from modes import SERVERS, run

import gossipjax as gx
from gossipjax import cost_model
from gossipjax.checkpoint import Checkpoints, change_nodes

N = 4
SHAPE = (6, 5)
LOW_RANK = gx.wire.low_rank(2)
SGD = optax.sgd(0.5)
TX = optax.chain(gx.allreduce(wire=LOW_RANK), SGD)
RNG = np.random.default_rng(0)


def find_means(gradients):
    """What each node takes for the averages of its gradients `[N, S, ...]`."""
    tx = gx.allreduce(wire=LOW_RANK)

    def steps(gradients):
        state = tx.init(gradients[0])
        for g in gradients:
            mean: Any
            mean, state = tx.update(g, state)
            yield mean

    return run("vmap", lambda g: jnp.stack([*steps(g)]), N)(jnp.asarray(gradients, jnp.float32))


@pytest.mark.parametrize(("shape", "rank"), [((2, 3, 4, 7), 2), ((4, 4), 4)])
def test_matrices_of_the_rank_and_small_ones_are_exact_at_once(shape, rank):
    """The columns are the last axis. The factors of the second would have as many values."""
    mean = RNG.normal(size=(*shape[:-1], rank)) @ RNG.normal(size=(rank, shape[-1]))
    deviations = RNG.normal(size=(N, *shape))
    means = find_means((mean + deviations - deviations.mean(axis=0))[:, None])
    np.testing.assert_allclose(means[:, 0], [mean] * N, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_step_without_a_direction_is_forgotten(value):
    """The first rows are 0 forever, as of pixels at an edge; so nothing is along unit vectors."""
    gradient = RNG.normal(size=(6, 2)) @ RNG.normal(size=(2, 5))
    gradient[:2] = 0
    gradients = np.tile(gradient, (N, 3, 1, 1))
    gradients[:, 0] = value
    means = find_means(gradients)
    np.testing.assert_array_equal(means[:, 0], gradients[:, 0])
    np.testing.assert_allclose(means[:, 1:], gradients[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["vmap", SERVERS])
def test_outer_steps_equal_the_oracle(mode):
    start = np.tile(RNG.normal(size=SHAPE), (N, 1, 1))
    updates = RNG.normal(size=(N, 6, *SHAPE))
    local = "local" if mode == SERVERS else None
    feedback: Any = {"wire": LOW_RANK, "error_feedback": 0.9}
    tx = gx.outer(optax.identity(), SGD, 2, local_axis_name=local, **feedback)

    def steps(x, updates):
        state: Any = tx.init(x)
        for k in range(6):
            u, state = tx.update(updates[k], state, x, step=k)
            x = x + u
        return x, state.error[0]

    args = jnp.asarray(start, jnp.float32), jnp.asarray(updates, jnp.float32)
    models, errors = run(mode, steps, N)(*args)
    anchor = start[0]
    error = np.zeros_like(start)
    q = draw_basis(0, 0, (5, 2))
    for moved in updates.reshape(N, 3, 2, *SHAPE).sum(axis=2).swapaxes(0, 1):
        mean, error, q = oracle.mean_of_low_rank(0.9 * error - moved, q)
        anchor = anchor - 0.5 * mean
    np.testing.assert_allclose(models, [anchor] * N, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(errors, error, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fragments", [0, 1, 2])
def test_the_cost_model_counts_what_is_sent(fragments):
    """`test_bytes_per_step.py` asks whether compiled programs send it."""
    params = {"kernel": jnp.ones((7, 9)), "bias": jnp.ones(5), "scale": jnp.ones((3, 11))}
    options: Any = {"wire": LOW_RANK, "error_feedback": 1.0, "fragments": fragments}
    tx = gx.outer(SGD, SGD, 3, **options) if fragments else TX
    sent = gx.bytes_per_step(tx, params, N, steps=[2]).sent[0, 0]
    exchanges = cost_model.from_transform(tx, "power", params=params).exchanges
    workload = cost_model.Workload(7 * 9 + 5 + 3 * 11)
    counted = [e.count_sent_bytes(2, workload, N) for e in exchanges if e.happens_at(2)]
    assert (len(counted), sum(counted)) == (2, pytest.approx(sent))


def test_a_saved_state_and_another_number_of_nodes(tmp_path):
    """The mean of the errors stays, and all new nodes have the `Q`."""
    nodes = gx.Nodes(N)
    params, start = nodes.init(TX, jnp.zeros(SHAPE))
    gradients = jnp.asarray(RNG.normal(size=(N, *SHAPE)), jnp.float32)
    _, state = nodes.run(TX.update, gradients, start)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        restored: Any = checkpoints.restore(start)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    states: Any = state, change_nodes(params, state, TX, 3)[1]
    old, new = (chain[0] for chain in states)
    mean = np.asarray(old.error, np.float64).mean(axis=0)
    assert np.abs(mean).max() > 0.1
    np.testing.assert_allclose(new.error, [mean] * 3, rtol=1e-6)
    np.testing.assert_array_equal(new.basis, old.basis[:3])
