"""Training on the default device: checkpoints, faults and convolutions."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints

N = 4
NODES = gx.Nodes(N)
FEATURES = 300


def test_a_resumed_run_ends_at_the_same_bits(tmp_path):
    """Of parameters of two types, with messages in flight."""
    rng = np.random.default_rng(0)
    schedule = gx.topology.random_peer(N, 3, seed=1)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule, wire=gx.wire.int8()))
    targets = jnp.asarray(rng.normal(size=(N, FEATURES)), jnp.float32)
    model = {"a": jnp.ones(FEATURES), "b": jnp.ones(FEATURES - 1, jnp.bfloat16)}

    def pull(params, target):
        return jax.tree.map(lambda z: z - target[: z.size].astype(z.dtype), params), ()

    train_step = gx.TrainStep(pull, tx, nodes=NODES)

    def train(current, steps):
        for k in steps:
            *current, _ = train_step(k, *current, targets)
        return tuple(current)

    half = train(NODES.init(tx, model), range(6))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, half, {"step": 6})
        checkpoints.wait()
        restored = checkpoints.restore(half)
    assert restored is not None
    whole = train(half, range(6, 12))
    resumed = train(restored.state, range(6, 12))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_nothing_is_lost_where_messages_are_dropped():
    """One program; who is not active keeps its model, and its update is not applied."""
    steps = 12
    faults = gx.faults.Faults(
        N,
        arrives=gx.faults.independent_drops(N, 7, seed=1, rate=0.3),
        active=gx.faults.markov_activity(N, 5, seed=2),
    )
    schedule = gx.faults.apply(gx.topology.exponential(N), faults)
    wires = [None, gx.wire.int8()]
    rng = np.random.default_rng(0)
    starts = rng.normal(size=(N, FEATURES)).astype(np.float32)
    updates = rng.normal(size=(N, steps, FEATURES)).astype(np.float32)

    def history(z, us):
        results = []
        for wire in wires:
            tx = gx.faults.inactive(gx.sgp(schedule, wire=wire), faults)

            def body(carry, inputs, tx=tx):
                z, state = carry
                u, k = inputs
                updates, state = tx.update(u, state, z, step=k)
                z = z + updates
                return (z, state), (z, *gx.diagnostics.total_mass(z, state))

            results.append(jax.lax.scan(body, (z, tx.init(z)), (us, jnp.arange(steps)))[1])
        return results

    active = np.array([faults.active_at(k) for k in range(steps)])
    assert not active.all()
    applied = np.where(active[..., None], updates.swapaxes(0, 1), 0).astype(np.float64)
    total = starts.sum(axis=0) + applied.sum(axis=1).cumsum(axis=0)
    expected = list(
        oracle.sgp([schedule.round_at(k).matrix for k in range(steps)], starts, applied)
    )
    results = NODES.spmd(history)(jnp.asarray(starts), jnp.asarray(updates))
    for wire, (models, mass, weight) in zip(wires, results, strict=True):
        np.testing.assert_allclose(mass[0], total, rtol=1e-5, atol=4e-5, err_msg=str(wire))
        np.testing.assert_allclose(weight, np.full((N, steps), float(N)), rtol=1e-6)
        if wire is None:
            for k, (z, _, _) in enumerate(expected):
                np.testing.assert_allclose(models[:, k], z, rtol=1e-4, atol=1e-5)


class SmallCnn(nn.Module):
    """Convolutions that are strided, of groups and transposed."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(images))
        x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=2)(x))
        x = nn.relu(nn.ConvTranspose(8, (2, 2), strides=(2, 2))(x))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def test_a_simulated_cnn_is_the_nodes_one_by_one():
    """The convolutions of simulated nodes are rewritten, with both their gradients."""
    model = SmallCnn()
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(N, 6, 12, 12, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 10, size=(N, 6)))

    def init(key, images):
        return model.init(key, images)

    def loss(params, images, labels):
        logits: Any = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    gradients = jax.value_and_grad(loss, argnums=(0, 1))
    # Flax promotes the types of its modules.
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("highest"):
        params = NODES.spmd(init)(jax.random.split(jax.random.key(0), N), images)
        simulated = NODES.spmd(gradients)(params, images, labels)
        one = jax.jit(gradients)
        rows = [one(*jax.tree.map(lambda x, i=i: x[i], (params, images, labels))) for i in range(N)]
    expected = jax.tree.map(lambda *x: np.stack(x), *rows)
    for a, b in zip(jax.tree.leaves(simulated), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max() + 1e-7
