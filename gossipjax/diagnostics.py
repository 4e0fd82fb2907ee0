"""How far apart the nodes are, and whether any mass was lost. Inside a per-node function.

The measures of a schedule (`spectral_gap`, `second_singular_value`, `rounds_to_exact_average`) are
NumPy and need no axis.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gossipjax import collectives
from gossipjax.buffers import cast_like, require_floats, widened
from gossipjax.spectra import rounds_to_exact_average as rounds_to_exact_average
from gossipjax.spectra import second_singular_value as second_singular_value
from gossipjax.spectra import spectral_gap as spectral_gap
from gossipjax.state import add, debias, find_state, in_flight, numerators, push_sum_weight


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
    squares = _squared_distances(params, axis_name)
    return jnp.sqrt(sum(jax.tree.leaves(squares), start=jnp.zeros(())))


def layer_consensus_distance(params: Any, axis_name: str = "nodes") -> Any:
    """`consensus_distance` of every leaf by itself: a tree like `params`, of scalars.

    The squares of all leaves add up to that of `consensus_distance`.

    Raises (when traced):
      ValueError: as `consensus_distance`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> distance = jax.vmap(gx.diagnostics.layer_consensus_distance, axis_name="nodes")
    >>> distance({"a": jnp.array([[0.0, 0.0], [6.0, 8.0]]), "b": jnp.ones((2, 3))})["b"].tolist()
    [0.0, 0.0]
    """
    return jax.tree.map(jnp.sqrt, _squared_distances(params, axis_name))


def _squared_distances(params: Any, axis_name: str) -> Any:
    require_floats(params, "params")
    values = widened(params)
    average = collectives.bounded_mean(values, axis_name)
    return jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), values, average)


def latest_model(params: Any, opt_state: Any) -> Any:
    """This node's newest model: `params`, except where the user holds an older one (`adpsgd`).

    Like the parameters, with their types; `opt_state` may be the state of a whole chain.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.d1d_psgd(2)
    >>> def update(x):
    ...     updates, state = tx.update(jnp.ones(()), tx.init(x), x, step=0)
    ...     return x + updates, gx.latest_model(x + updates, state)
    >>> [v.tolist() for v in jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]))]
    [[0.0, 2.0], [2.0, 2.0]]
    """
    state = find_state(opt_state)
    return cast_like(debias(numerators(params, state), push_sum_weight(state)), params)


def total_mass(params: Any, opt_state: Any, axis_name: str = "nodes") -> tuple[Any, jax.Array]:
    """`(sum_i x_i, sum_i w_i)` over all nodes and the messages in flight.

    Mixing never changes either: the first (a tree like the parameters, float32 at least) moves
    only by the updates, the second stays N. `opt_state` may be the state of a whole chain; an
    algorithm without a weight counts 1 per node. For `adpsgd` the `x_i` are the latest models, for
    `easgd` the center is added to their sum. All of `params` are taken to be gossiped: where the
    transform is masked, pass the part that is.

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
    x, w = _mass_of_models(params, opt_state, axis_name)
    state = find_state(opt_state)
    if state is not None and jax.tree.leaves(state.center):
        x = add(x, collectives.mean(state.center, axis_name))
    return x, w


def _mass_of_models(params: Any, opt_state: Any, axis_name: str) -> tuple[Any, jax.Array]:
    require_floats(params, "params")
    state = find_state(opt_state)
    sent, sent_weight = in_flight(params, state)
    x, w = add(numerators(params, state), sent), push_sum_weight(state)
    return collectives.total((x, w if sent_weight is None else w + sent_weight), axis_name)


def average_model(params: Any, opt_state: Any, axis_name: str = "nodes") -> Any:
    """The average model `sum_i x_i / sum_i w_i`, messages in flight included, on every node.

    Like the parameters, with their types. It is not the average of the `z_i` where weights differ.
    For `adpsgd` it is that of the latest models, for `easgd` that of the nodes, without the center.

    Raises (when traced):
      ValueError: as `total_mass`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.directed_ring(3))
    >>> def average(z):
    ...     return gx.average_model(z, tx.init(z))
    >>> jax.vmap(average, axis_name="nodes")(jnp.arange(3.0)).tolist()
    [1.0, 1.0, 1.0]
    """
    x, w = _mass_of_models(params, opt_state, axis_name)
    return cast_like(debias(x, w), params)
