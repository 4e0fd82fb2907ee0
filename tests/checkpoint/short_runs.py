"""Short runs of every algorithm of the shared matrix, for the tests of this folder."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from algorithms.rows import NO_VARIANTS, ROWS
from modes import run
from promotion import apply_updates, promoting

import gossipjax as gx

D = 6
NAMES = [*NO_VARIANTS, "osgp 3"]
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: promoting(optax.adamw(optax.linear_schedule(0.1, 0.0, 50))),
}


def make_schedule(name, nodes):
    """Sparse rounds, with weights that differ where the algorithm takes such graphs."""
    matrices = ROWS[name].matrices(np.random.default_rng(0), nodes)
    if gx.topology.from_matrices(matrices).is_doubly_stochastic:
        return gx.topology.ring(nodes)
    return gx.topology.random_peer(nodes, 3, seed=1)


def make_chain(name, nodes, optimizer="momentum"):
    return ROWS[name].chain(OPTIMIZERS[optimizer](), make_schedule(name, nodes))


def train(tx, nodes, params, state, steps):
    """A quadratic per node, in one program."""
    targets = jnp.asarray(np.random.default_rng(0).normal(size=(nodes, D)), jnp.float32)

    def step(z, state, target, k):
        grads = jax.tree.map(lambda x: x - target.astype(x.dtype), z)
        updates, state = tx.update(grads, state, z, step=k)
        return apply_updates(z, updates), state

    program = run("vmap", step, nodes, shared=(3,))
    for k in steps:
        params, state = program(params, state, targets, jnp.int32(k))
    return params, state


def train_from_start(name, nodes, steps, dtype=jnp.float32, optimizer="momentum"):
    """A state in mid-cycle and in mid-flight, of one array `[N, D]`."""
    tx = make_chain(name, nodes, optimizer)
    z = jnp.asarray(np.random.default_rng(1).normal(size=(nodes, D)) + 1, dtype)
    state = gx.spmd(tx.init, nodes=nodes)(z)
    return train(tx, nodes, z, state, range(steps))


def average_densely(z, state, name=None):
    """In float64, from the arrays themselves: a message is the weight, if any, and the model.

    If other leaves are not gossiped, `name` is that of `z` in the state.
    """

    def take(tree):
        return np.asarray(tree if name is None else tree[name], np.float64)

    z = np.asarray(z, np.float64)
    gossip = gx.gossip_state(state)
    if gossip is None:
        return z.mean(axis=0)
    w = np.ones(len(z)) if gossip.weight is None else np.asarray(gossip.weight, np.float64)
    residual = 0.0 if gossip.residual is None else take(gossip.residual)
    x = (w[:, None] * (z + residual)).sum(axis=0)
    w = w.sum()
    if gossip.in_flight is not None:
        sent = take(gossip.in_flight.x).sum(axis=0)
        assert np.abs(sent).max() > 0.1  # in mid-flight
        if gossip.weight is not None:
            w += np.asarray(gossip.in_flight.weight, np.float64).sum()
        x = x + sent
    return x / w


def relative_error(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


def assert_like(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)


def assert_equal_bits(actual, expected):
    assert_like(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def names_in(folder):
    """All names but the lock's, which stays."""
    return sorted({path.name for path in folder.iterdir()} - {".lock"})


def snapshot(folder):
    """All names, and when and where each was written."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in paths}
