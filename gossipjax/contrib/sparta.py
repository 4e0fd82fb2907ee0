"""SPARTA: a random part of the parameters is averaged after every step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import StepLike, exact_average, require_doubly_stochastic
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import make_seed_key, require_seed


def sparta(
    fraction: float,
    seed: int = 0,
    schedule: Schedule | None = None,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SPARTA: a slice of the parameters is averaged over all nodes. Goes *last* in a chain.

    With `u` the update from the chain before it and `S` the slice of update `t`, the same on all
    nodes:

        x <- x + u;    x[S] <- (1 / N) sum_j x_j[S]

    Slices are those of a permutation of each leaf: in `T = ceil(1 / fraction)` updates every value
    comes once. A leaf of `n` values is cut into `ceil(n / T)` groups of T neighbours; a slice has
    one value of each group, the next one in every update, and every T updates the groups start
    elsewhere. These places are drawn from the seed and the number of the update, by every node for
    itself: only the values travel, `1 / T` of the model.

    Nothing else is averaged, no moments. The nodes stay as far apart as T updates drive them; a run
    ends with `gx.average_model`, and `gx.outer` may stand around the chain. The sum of `x` changes
    only by the updates. The parameters that the user holds are `x`, `[...]` per node. The state is
    a `GossipState`, as in `gx.dpsgd`.

    Args:
      fraction: of the parameters, above 0 and at most 1; published runs have 0.0005 to 0.005.
      seed: of the slices, the same on all nodes.
      schedule: None for the exact average; a doubly stochastic schedule averages the slice with the
        neighbours, `x[S] <- sum_j P_ij x_j[S]`.
      axis_name, local_axis_name: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: if an argument is not as above; else as `gx.sgp`.

    References:
      After `exo-explore/gym`, exogym/strategy/sparta.py, whose masks are drawn by one node and sent
      to all, or of a shuffled leaf, as here. No text of a paper was available. With its masks this
      equals commit 9fa323c to 4e-15 in 40 steps of recorded gradients, float64.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.contrib.sparta(0.5)
    >>> def two_steps(x):
    ...     state = tx.init(x)
    ...     for step in range(2):
    ...         updates, state = tx.update(jnp.zeros(2), state, x, step=step)
    ...         x = x + updates
    ...     return x
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([[0.0, 4.0], [2.0, 6.0]])).tolist()
    [[1.0, 5.0], [1.0, 5.0]]
    """
    name = "sparta"
    period = _find_period(fraction)
    seed = require_seed(seed, name)
    if schedule is not None:
        require_doubly_stochastic(schedule, name)
    route = frame.make_route(name, axis_name, local_axis_name)
    plan = frame.ExchangePlan(schedule, wire=route, models=1 / period)

    def combine(x: Any, updates: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        leaves, structure = jax.tree.flatten(frame.add(x, updates))
        slices = [
            draw_slice(leaf.size, period, seed, number, state.count)
            for number, leaf in enumerate(leaves)
        ]
        values = list(map(_take, leaves, slices))
        if schedule is None:
            values = exact_average(values, route, None)
        else:
            values, _ = frame.mix_once(values, None, state, step)
        leaves = list(map(_put, leaves, slices, values))
        return frame.Combined(jax.tree.unflatten(structure, leaves), state)

    return frame.gossip_transform(name, plan, partial(frame.init_state, plan=plan), combine)


def draw_slice(size: int, period: int, seed: int, leaf: int, count: jax.Array) -> jax.Array:
    """The places in a flat leaf that update `count` averages, one of each `period` neighbours.

    Those from `size` on, of the last neighbours, are places of nothing.
    """
    groups = -(-size // period)
    key = jax.random.fold_in(jax.random.fold_in(make_seed_key(seed), leaf), count // period)
    starts = jax.random.bits(key, (groups,), np.uint32) % np.uint32(period)
    places = (starts + (count % period).astype(np.uint32)) % np.uint32(period)
    return period * jax.lax.iota(jnp.int32, groups) + places.astype(jnp.int32)


def _take(leaf: jax.Array, places: jax.Array) -> jax.Array:
    return leaf.ravel().at[places].get(mode="fill", fill_value=0, unique_indices=True)


def _put(leaf: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    flat = leaf.ravel().at[places].set(values, mode="drop", unique_indices=True)
    return flat.reshape(leaf.shape)


def _find_period(fraction: Any) -> int:
    """`ceil(1 / fraction)`, up to rounding: of 0.1 it is 10."""
    allowed = "above 0 and at most 1"
    frame.require_number(fraction, "fraction of sparta", allowed, lambda p: 1e-9 < p <= 1)
    return math.ceil(1 / float(fraction) - 1e-9)
