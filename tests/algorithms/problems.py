"""Small problems for the algorithms, and the programs that solve them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from modes import run
from promotion import apply_updates

import gossipjax as gx
from gossipjax.exchanges.chain import find_exchange

SHAPES = {"kernel": (3, 2), "bias": (5,)}


def unflatten(flat, dtype=jnp.float32):
    """`[..., D]` -> the tree, with leading axes kept."""
    tree = {}
    start = 0
    for name, shape in SHAPES.items():
        stop = start + int(np.prod(shape))
        tree[name] = jnp.asarray(flat[..., start:stop].reshape(*flat.shape[:-1], *shape), dtype)
        start = stop
    return tree


def flatten(tree: Any, leading=1):
    """The tree -> `[..., D]` in float64, with the leading axes kept."""
    leaves = [np.asarray(tree[name], np.float64) for name in SHAPES]
    return np.concatenate([x.reshape(*x.shape[:leading], -1) for x in leaves], axis=-1)


def make_problem(n, dtype, steps=5):
    """Starts that `dtype` holds exactly, `[N, D]`, and updates `[S, N, D]`, in float64."""
    rng = np.random.default_rng(n)
    d = sum(int(np.prod(shape)) for shape in SHAPES.values())
    starts = flatten(unflatten(rng.normal(size=(n, d)), dtype))
    return rng, starts, rng.normal(size=(steps, n, d)).astype(np.float32).astype(np.float64)


def take_step(tx, carry, u, step):
    """`(params, state)` after one update; `value` is an argument that the transform ignores."""
    params, state = carry
    updates, state = tx.update(u, state, params, step=step, value=jnp.zeros(()))
    return apply_updates(params, updates), state


def run_history(mode, tx, style, params, updates):
    """Runs `init` and all steps in one program.

    Returns the first state, `[N, ...]`, and `(params, state, *total_mass)`, each `[N, S, ...]`.

    Args:
      style: how the transform is given its step: "static" (the canonical one, as by a training
        loop), "traced" or "counted" (not given).
      params: node-stacked, `[N, ...]`.
      updates: `[N, S, ...]`.
    """
    nodes, steps = jax.tree.leaves(updates)[0].shape[:2]

    def history(params, updates):
        start = tx.init(params)
        cycle = find_cycle(start, steps) if style == "static" else [None]

        def body(carry, inputs):
            us, k = inputs
            results = []
            for place, step in enumerate(cycle):
                u = jax.tree.map(lambda u, place=place: u[place], us)
                carry = take_step(tx, carry, u, k if style == "traced" else step)
                results.append(carry)
            return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)

        count = -(-steps // len(cycle))
        numbers = np.resize(np.arange(steps), (count, len(cycle)))  # what is too much is cut below
        cycles = jax.tree.map(lambda u: u[numbers], updates)
        results = jax.lax.scan(body, (params, start), (cycles, jnp.arange(count)))[1]
        results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:steps], results)
        return start, *results, *jax.vmap(gx.diagnostics.total_mass)(*results)

    return run(mode, history, nodes)(params, updates)


def weigh_nodes(tx, weights):
    """The transform, told the weight of each node at each update, `[S, N]`."""

    def update(updates, state, params=None, **told):
        own = jnp.asarray(weights)[find_exchange(state).count, jax.lax.axis_index("nodes")]
        return tx.update(updates, state, params, node_weight=own, **told)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def find_cycle(state, steps):
    """The canonical steps of the first steps, up to where they begin again."""
    canonical = [gx.canonical_step(state, k) for k in range(steps)]
    assert set(canonical) <= set(gx.canonical_steps(state))
    return next(
        canonical[:length]
        for length in range(1, steps + 1)
        if canonical == [canonical[k % length] for k in range(steps)]
    )
