"""Nodes that count by their share of the data, because all nodes count alike otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import (
    accumulation_dtype,
    axis_size,
    cast_like,
    copy_for_leaves,
    node_mean,
    select_for_node,
    upcast,
)


class WeightedState(NamedTuple):
    """State of `gx.weighted`: it keeps nothing, and shows where the transform stands."""


def weighted(
    weights: Sequence[float] | np.ndarray | None = None, *, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """Counts each node by its share `p_i` of the data: `u_i <- N p_i u_i`, with `sum_i p_i = 1`.

    Algorithms count all nodes alike: with 90 examples on one node and 10 on another, the nodes
    minimize `(f_0 + f_1) / 2`, not the mean over the 100 examples. If `p_i = n_i / sum n`, and
    `f_i` is the mean loss of node i, then the loss of the pooled data is `sum_i p_i f_i`. You can
    reach the minimum of this loss in three ways:

    - `chain(gx.weighted(n), gx.allreduce(), optimizer)`, with any optimizer, because the average is
      the gradient of the pooled data.
    - `chain(optimizer, gx.weighted(n), gx.sgp(schedule))`, or another gossip instead of
      `gx.sgp`. With SGD, with or without momentum, nodes with uneven data stay at a distance from
      the minimum if the rate is constant; with `gx.gradient_tracking` they do not. Do not use Adam,
      because its updates have one size wherever a node is, so nodes end where
      `sum_i p_i Adam(g_i) = 0`.
    - `gx.outer(inner, outer_tx, every, weights=n)`, which weighs models. With Adam inside, nodes
      that end their H steps at their own minimum are averaged by `p`.

    Push-sum weights cannot do this, because they even out within a few rounds.

    Args:
      weights: `n`, one number >= 0 for each node, in any unit. With None, each node gives a scalar
        at each step, `update(..., node_weight=n_i)`, such as the number of tokens in its batch; a
        small all-reduce adds these up. `gx.TrainStep(extra_args=)` passes them on.
      axis_name: the mapped axis of the nodes.

    Raises:
      ValueError: if weights are negative, not finite or all 0; when traced, if the axis has another
        size, or `node_weight` is missing.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(gx.weighted([90, 10]), gx.allreduce(), optax.sgd(1.0))
    >>> def update(g):
    ...     return tx.update(g, tx.init(g))[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 10.0])).tolist()
    [-1.0, -1.0]
    """
    shares = None if weights is None else make_shares(weights, "weights of weighted")

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        node_weight: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        return scale_by_share(updates, shares, node_weight, axis_name, "weighted"), state

    return optax.GradientTransformationExtraArgs(lambda params: WeightedState(), update)


def make_shares(weights: Any, name: str) -> tuple[float, ...]:
    """Returns how much each of N nodes counts, of mean 1: `N n_i / sum_j n_j` of its weight `n_i`.

    Raises `ValueError` unless these are weights; the error calls them `name`.
    """
    values = np.asarray(weights)
    is_row = values.ndim == 1 and values.size > 0 and values.dtype.kind in "iuf"
    if not is_row or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ValueError(
            f"{name} must be one number >= 0 for each node, not all 0, such as its number of "
            f"examples, got {weights!r:.80}."
        )
    return tuple((values / values.mean(dtype=np.float64)).tolist())


def scale_by_share(
    tree: Any, shares: tuple[float, ...] | None, node_weight: Any, axis_name: str, name: str
) -> Any:
    """Multiplies `tree` by this node's share, of mean 1 over the nodes; keeps the types of `tree`.

    `shares` contains one share for each node. If it is None, the share is this node's weight,
    `node_weight`, over the mean weight, which takes an all-reduce.
    """
    size = axis_size(axis_name)
    factor: Any
    if shares is None:
        weight = require_node_weight(node_weight, name)
        mean = node_mean(weight, axis_name)
        # If no node has an example, all count alike.
        factor = jnp.where(mean > 0, weight / jnp.where(mean > 0, mean, 1), 1)
    elif len(shares) != size:
        raise ValueError(
            f"weights of {name} must be one for each of {size} nodes, got {len(shares)}."
        )
    else:
        dtype = np.result_type(np.float32, *map(jnp.result_type, jax.tree.leaves(tree)))
        factor = select_for_node(np.asarray(shares), dtype, axis_name)

    def scale_leaf(leaf: jax.Array, factor: Any) -> jax.Array:
        # In float32 at least: rounded to 8 bits, the factors would not have the mean 1.
        scaled = factor.astype(leaf.dtype) * leaf
        # The loss of a node without data is often 0 / 0, and 0 times NaN is NaN.
        return jnp.where(factor == 0, jnp.zeros_like(leaf), scaled)

    wide = upcast(tree)
    return cast_like(jax.tree.map(scale_leaf, wide, copy_for_leaves(factor, wide, axis_name)), tree)


def require_node_weight(node_weight: Any, name: str) -> jax.Array:
    """Returns this node's weight, float32 at least; `ValueError` unless it is one number."""
    if node_weight is None or jnp.ndim(node_weight):
        given = "none" if node_weight is None else f"shape {list(jnp.shape(node_weight))}"
        raise ValueError(
            f"node_weight must be given to each update of {name}, one number of each node, got "
            f"{given}: tx.update(..., node_weight=tokens), or gx.TrainStep(extra_args=)."
        )
    dtype = jnp.result_type(node_weight)
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return jnp.asarray(node_weight, accumulation_dtype(dtype) if is_float else jnp.float32)
