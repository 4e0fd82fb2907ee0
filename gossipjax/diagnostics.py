"""How far apart the nodes are, and whether any mass was lost. Inside a per-node function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gossipjax import collectives
from gossipjax.state import debias, find_state, numerators, push_sum_weight


def consensus_distance(params: Any, axis_name: str = "nodes") -> jax.Array:
    """This node's Euclidean distance to the node average: `||z_i - (1/N) sum_j z_j||_2`.

    Over all leaves together, in float32 at least; a scalar per node (SGP-19, figure 2). Exactly 0
    where all nodes agree to the bit.

    Raises (when traced):
      ValueError: if the axis is missing or a leaf is not floating-point.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> distance = jax.vmap(gx.diagnostics.consensus_distance, axis_name="nodes")
    >>> distance(jnp.array([[0.0, 0.0], [6.0, 8.0]])).tolist()
    [5.0, 5.0]
    """
    collectives.require_floats(params, "params")
    values = numerators(params, None)
    average = collectives.bounded_mean(values, axis_name)
    squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), values, average)
    return jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.zeros(())))


def total_mass(params: Any, opt_state: Any, axis_name: str = "nodes") -> tuple[Any, jax.Array]:
    """`(sum_i x_i, sum_i w_i)` over all nodes.

    Mixing never changes either: the first (a tree like the parameters, float32 at least) moves
    only by the updates, the second stays N. `opt_state` may be the state of a whole chain; an
    algorithm without a weight counts 1 per node. All of `params` are taken to be gossiped: where
    the transform is masked, pass the part that is.

    Raises (when traced):
      ValueError: if the axis is missing, a leaf is not floating-point, or the chain holds several
        gossip transforms.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.directed_ring(3))
    >>> def mass(z):
    ...     return gx.diagnostics.total_mass(z, tx.init(z))
    >>> [m.tolist() for m in jax.vmap(mass, axis_name="nodes", out_axes=None)(jnp.arange(3.0))]
    [3.0, 3.0]
    """
    collectives.require_floats(params, "params")
    state = find_state(opt_state)
    return collectives.total((numerators(params, state), push_sum_weight(state)), axis_name)


def average_model(params: Any, opt_state: Any, axis_name: str = "nodes") -> Any:
    """The average model `sum_i x_i / sum_i w_i`, on every node.

    Like the parameters, with their types. It is not the average of the `z_i` where weights differ.

    Raises (when traced):
      ValueError: as `total_mass`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.directed_ring(3))
    >>> def average(z):
    ...     return gx.average_model(z, tx.init(z))
    >>> jax.vmap(average, axis_name="nodes")(jnp.arange(3.0)).tolist()
    [1.0, 1.0, 1.0]
    """
    x, w = total_mass(params, opt_state, axis_name)
    return jax.tree.map(lambda leaf, p: leaf.astype(jnp.result_type(p)), debias(x, w), params)
