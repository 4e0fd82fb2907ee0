"""Diagnostics of nodes: how far they are from their average. Inside a per-node function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import clipped_node_mean, require_floats, sum_over_parts, upcast
from gossipjax.models import total_mass
from gossipjax.renamed import old_names
from gossipjax.sharding import state_specs

__all__ = ["consensus_distance", "layer_consensus_distance", "total_mass"]
__getattr__ = old_names("diagnostics")


def consensus_distance(
    params: optax.Params, *, axis_name: str = "nodes", specs: Any = None
) -> jax.Array:
    """This node's Euclidean distance to the node average: `||z_i - (1/N) sum_j z_j||_2`.

    The distance is one scalar per node, over all leaves together, in float32 at least. If all nodes
    have the same bits, the distance is exactly 0.

    Args:
      params: this node's parameters, `[...]`.
      axis_name: the mapped axis of the nodes.
      specs: needed only in a `shard_map` of your own that is manual inside the nodes too, where
        `params` are parts of the model. Give the `PartitionSpec`s of the parameters, as in
        `gx.sharded`; the squares of all parts are then added up. Under `gx.spmd` leave `specs` out.

    Raises (when traced):
      ValueError: if the axis is missing or a leaf is not floating-point.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, figure 2.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> distance = jax.vmap(gx.diagnostics.consensus_distance, axis_name="nodes")
    >>> distance(jnp.array([[0.0, 0.0], [6.0, 8.0]])).tolist()
    [5.0, 5.0]
    """
    squares = jax.tree.leaves(_squared_distances(params, axis_name, specs))
    dtype = np.result_type(np.float32, *(square.dtype for square in squares))
    return jnp.sqrt(sum((square.astype(dtype) for square in squares), start=jnp.zeros((), dtype)))


def layer_consensus_distance(
    params: optax.Params, *, axis_name: str = "nodes", specs: Any = None
) -> Any:
    """Returns the consensus distance of every leaf, as a tree of scalars like `params`.

    The squares of these distances add up to the square of `consensus_distance`.

    Raises (when traced):
      ValueError: if the axis is missing or a leaf is not floating-point.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> distance = jax.vmap(gx.diagnostics.layer_consensus_distance, axis_name="nodes")
    >>> distance({"a": jnp.array([[0.0, 0.0], [6.0, 8.0]]), "b": jnp.ones((2, 3))})["b"].tolist()
    [0.0, 0.0]
    """
    return jax.tree.map(jnp.sqrt, _squared_distances(params, axis_name, specs))


def _squared_distances(params: optax.Params, axis_name: str, specs: Any) -> Any:
    require_floats(params, "params")
    values = upcast(params)
    average = clipped_node_mean(values, axis_name)
    squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), values, average)
    if specs is None:
        return squares
    return sum_over_parts(squares, state_specs(params, params, specs))
