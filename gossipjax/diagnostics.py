"""Diagnostics inside a per-node function: distances from the node average, and outer gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import clipped_node_mean, require_floats, sum_over_parts, upcast
from gossipjax.models import total_mass
from gossipjax.renamed import old_names
from gossipjax.sharding import state_specs

__all__ = [
    "consensus_distance",
    "effective_rate",
    "layer_consensus_distance",
    "monitor_outer_gradient",
    "total_mass",
]
__getattr__ = old_names("diagnostics")


def consensus_distance(
    params: optax.Params, *, axis_name: str = "nodes", specs: Any = None
) -> jax.Array:
    """Returns this node's Euclidean distance to the node average: `||z_i - (1/N) sum_j z_j||_2`.

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
    """Returns the squared distance of each leaf to its node average, as a tree of scalars."""
    require_floats(params, "params")
    values = upcast(params)
    average = clipped_node_mean(values, axis_name)  # exact if all nodes have the same bits
    squares = jax.tree.map(lambda a, b: jnp.sum(jnp.square(a - b)), values, average)
    if specs is None:  # each leaf is whole
        return squares
    return sum_over_parts(squares, state_specs(params, params, specs))


class OuterGradientState(NamedTuple):
    """State of `monitor_outer_gradient`, after the last outer step."""

    norm: jax.Array  # float32 scalar; NaN before the first outer step
    cosine: jax.Array  # float32 scalar; NaN before the second outer step
    previous: Any  # the last outer gradient, like the parameters, float32 at least


def monitor_outer_gradient() -> optax.GradientTransformation:
    """Measures each outer gradient, and whether it points the same way as the one before.

    Chain it before the optimizer that you give to `gx.outer`. The outer gradient D passes through
    unchanged. The state keeps two float32 scalars of the last outer step:

        norm = ||D_t||_2,    cosine = <D_t, D_{t-1}> / (||D_t||_2 ||D_{t-1}||_2)

    `norm` has the units of the parameters, and `cosine` is between -1 and 1. `norm` is NaN until
    the first outer step, and `cosine` until the second, and also if D_t or D_{t-1} is 0.
    `optax.tree.get(opt_state, "cosine")` finds the scalars `[N]` of all nodes. With several
    `fragments` each has a state, and `optax.tree.get_all_with_path` finds them all.

    A cosine near 1 says that outer steps repeat a direction, so the outer momentum adds up to a
    large rate; `effective_rate` says how large. A cosine below 0 says that they undo each other.

    The state also contains the last outer gradient, so each node keeps one more model in memory.

    References:
      Wang et al., "SlowMo", ICLR 2020, arXiv:1910.00643, and Douillard et al., "DiLoCo", 2023,
      arXiv:2311.08105: momentum of outer gradients.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    >>> outer_tx = optax.chain(gx.diagnostics.monitor_outer_gradient(), nesterov)
    >>> tx = gx.outer(optax.sgd(0.25), outer_tx, every=1)
    >>> def train(z):
    ...     state = tx.init(z)
    ...     for step in range(2):  # every gradient is 1, so each outer gradient is 0.25
    ...         updates, state = tx.update(jnp.ones_like(z), state, z, step=step)
    ...         z = z + updates
    ...     return optax.tree.get(state, "norm"), optax.tree.get(state, "cosine")
    >>> norm, cosine = jax.vmap(train, axis_name="nodes")(jnp.ones((2, 1)))
    >>> norm.tolist(), cosine.tolist()
    ([0.25, 0.25], [1.0, 1.0])
    """

    def init(params: optax.Params) -> OuterGradientState:
        unknown = jnp.full((), jnp.nan, jnp.float32)
        return OuterGradientState(unknown, unknown, jax.tree.map(jnp.zeros_like, upcast(params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OuterGradientState]:
        gradient = upcast(updates)
        norm = optax.tree.norm(gradient).astype(jnp.float32)
        product = optax.tree.sum(jax.tree.map(jnp.multiply, gradient, state.previous))
        cosine = jnp.asarray(product, jnp.float32) / (norm * state.norm)
        return updates, OuterGradientState(norm, cosine, gradient)

    return optax.GradientTransformation(init, update)


def effective_rate(learning_rate: Any, momentum: Any, cosine: Any) -> Any:
    """Returns the rate at which plain SGD goes as far along a gradient as Nesterov's momentum SGD.

        eta (1 + mu / (1 - mu rho))    with rate eta, momentum mu and cosine rho

    This holds for gradients of equal norm whose cosine with the gradient k steps before is `rho^k`.
    Give the cosine that `monitor_outer_gradient` measures, a scalar or `[N]`.

    References:
      Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
      2013: Nesterov momentum.

    >>> import gossipjax as gx
    >>> [round(gx.diagnostics.effective_rate(0.7, 0.9, cosine), 2) for cosine in (0.0, 0.5, 1.0)]
    [1.33, 1.85, 7.0]
    """
    return learning_rate * (1 + momentum / (1 - momentum * cosine))
