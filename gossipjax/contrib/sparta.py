"""SPARTA: a random part of the parameters is averaged after every step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.gossip import Node, gossip
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import make_seed_key


def sparta(
    schedule: Schedule, fraction: float, *, seed: int = 0, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """SPARTA: nodes average a slice of the parameters with the neighbours. Put it *last*.

    If `u` is the update from the chain, and `S` is the slice of update `t`, the same on all nodes:

        x <- x + u;    x[S] <- sum_j P_ij x_j[S]

    In `T = ceil(1 / fraction)` updates every value is averaged once. A leaf of `n` values is cut
    into `ceil(n / T)` groups of T consecutive values. A slice contains one value of each group, at
    each update the next one. Every T updates a new first value is drawn for each group. Every node
    draws the places of a slice from the seed and the number of the update, so only the values
    travel: `1 / T` of the model.

    Args:
      schedule: a doubly stochastic schedule; for the exact average use `gx.topology.complete(n)`.
      fraction: the fraction of the parameters in a slice, above 0 and at most 1; published runs
        use 0.0005 to 0.005.
      seed: the seed of the slices, the same on all nodes.
      axis_name: as in `gx.sgp`.

    References:
      After `exo-explore/gym`, exogym/strategy/sparta.py, where one node draws the masks and sends
      them to all, or masks are parts of a shuffled leaf, as here. There was no paper to read.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.contrib.sparta(gx.topology.complete(2), 0.5)
    >>> def two_steps(x):
    ...     state = tx.init(x)
    ...     for step in range(2):
    ...         updates, state = tx.update(jnp.zeros(2), state, x, step=step)
    ...         x = x + updates
    ...     return x
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([[0.0, 4.0], [2.0, 6.0]])).tolist()
    [[1.0, 5.0], [1.0, 5.0]]
    """
    require_doubly_stochastic(schedule, "sparta")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction of sparta must be above 0 and at most 1, got {fraction}.")
    period = math.ceil(1 / fraction - 1e-9)  # 1 / 0.1 may be rounded up, and should give 10

    def combine(x: Any, u: Any, node: Node) -> Any:
        """Adds the update, and mixes the slice of this update, the same on all nodes."""
        leaves, structure = jax.tree.flatten(optax.tree.add(x, u))
        slices = [
            draw_slice(leaf.size, period, seed, number, node.count)
            for number, leaf in enumerate(leaves)
        ]
        values = node.mix(list(map(_take_slice, leaves, slices)))
        return jax.tree.unflatten(structure, list(map(_put_slice, leaves, slices, values)))

    return gossip(schedule, combine, axis_name=axis_name, models=1 / period)


def draw_slice(size: int, period: int, seed: int, leaf: int, count: jax.Array) -> jax.Array:
    """Returns the indices in a flat leaf that update `count` averages: one per group of `period`.

    `leaf` is the number of the leaf. If the last group is short, its index can be `size` or larger,
    where the leaf has no value.
    """
    groups = -(-size // period)  # rounded up
    key = jax.random.fold_in(jax.random.fold_in(make_seed_key(seed), leaf), count // period)
    # Each group starts at a random value, and goes on to its next value at each update.
    starts = jax.random.bits(key, (groups,), np.uint32) % np.uint32(period)
    in_group = (starts + (count % period).astype(np.uint32)) % np.uint32(period)
    return period * jax.lax.iota(jnp.int32, groups) + in_group.astype(jnp.int32)


def _take_slice(leaf: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns the values of a leaf at flat indices; 0 at an index beyond its end."""
    return leaf.ravel().at[indices].get(mode="fill", fill_value=0, unique_indices=True)


def _put_slice(leaf: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the leaf with new values at flat indices; an index beyond its end is left out."""
    flat = leaf.ravel().at[indices].set(values, mode="drop", unique_indices=True)
    return flat.reshape(leaf.shape)
