"""The average model, a node's own models, and the total mass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import (
    axis_size,
    cast_like,
    node_mean,
    node_spread,
    node_sum,
    require_floats,
    upcast,
)
from gossipjax.exchanges.chain import find_exchange, gossip_state
from gossipjax.exchanges.mask import gossiped, merge_gossiped
from gossipjax.exchanges.model import add, debias, models, numerators, push_sum_weight
from gossipjax.exchanges.state import GossipState, PushSum, mass_in_flight
from gossipjax.exchanges.transform import require_like
from gossipjax.nodes import Nodes
from gossipjax.sharding import constrain, shard_specs
from gossipjax.wire import Wire


def latest_model(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Returns this node's newest model.

    The newest model is `params`, except with `adpsgd` and `d1d_psgd`, whose `params` are a stale
    model. The result has the types of `params`. `opt_state` may be the state of a whole chain.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.d1d_psgd(2)
    >>> def update(x):
    ...     updates, state = tx.update(jnp.ones(()), tx.init(x), x, step=0)
    ...     return x + updates, gx.latest_model(x + updates, state)
    >>> [v.tolist() for v in jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]))]
    [[0.0, 2.0], [2.0, 2.0]]
    """
    state = _gossip_state(params, opt_state)
    gossiped_params = gossiped(params, state)
    newest = cast_like(models(gossiped_params, state), gossiped_params)
    return merge_gossiped(params, newest, state)


def local_model(
    params: optax.Params, opt_state: optax.OptState, updates: optax.Updates
) -> optax.Params:
    """Returns this node's model after the local half of a step, before any exchange: `(x + u) / w`.

    Assran et al. plot the `consensus_distance` of this model, "after the gradient step and before
    the gossip".

    Args:
      params: the parameters in your loop.
      opt_state: the state of the chain before the step.
      updates: `u`, the update that the chain before the gossip makes.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, figure 2.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> state = gx.sgp(gx.topology.ring(3)).init(jnp.zeros(()))._replace(weight=jnp.float32(2.0))
    >>> float(gx.local_model(jnp.float32(1.0), state, jnp.float32(-1.0)))
    0.5
    """
    state = _gossip_state(params, opt_state)
    exchange = find_exchange(opt_state)
    require_like(params, updates, "the updates")
    moved = add(upcast(params), updates)
    if exchange is None:
        return moved
    gossiped_part = exchange.take_local_step(gossiped(params, state), gossiped(updates, state))
    return merge_gossiped(moved, gossiped_part, state)


def total_mass(
    params: optax.Params, opt_state: optax.OptState, *, axis_name: str | None = None
) -> tuple[Any, jax.Array]:
    """Returns `(sum_i x_i, sum_i w_i)` over all nodes and the messages in flight.

    Mixing changes neither sum. The sum of the `x_i`, a tree like the parameters in float32 at
    least, moves only by the updates. The sum of the `w_i` stays N; without weights each node counts
    1. If `params` is a stale model (`adpsgd`), the latest models are summed. Further mass in the
    state (`Extra.is_mass`, such as a center) is added to the sum of the `x_i`. In a masked
    transform, an `optax.MaskedNode` replaces each parameter that does not gossip.

    Args:
      params: the parameters in your loop, `[...]` per node.
      opt_state: the state of the transform, or of a whole chain.
      axis_name: the mapped axis of the nodes; by default the axis of the transform.

    Raises (when traced):
      ValueError: if the axis is missing, a leaf is not floating-point, or the chain contains
        several gossip transforms.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.directed_ring(3))
    >>> def mass(z):
    ...     return gx.diagnostics.total_mass(z, tx.init(z))
    >>> [m.tolist() for m in jax.vmap(mass, axis_name="nodes", out_axes=None)(jnp.arange(3.0))]
    [3.0, 3.0]
    """
    state = _gossip_state(params, opt_state)
    mass = _sum_models(gossiped(params, state), state, axis_name)
    extra = {} if state is None or state.extra is None else state.extra
    x = mass.x
    for part in extra.values():
        if part.is_mass:
            x = add(x, node_mean(part.value, _axis_name(state, axis_name)))
    return x, mass.weight


def average_model(
    params: optax.Params,
    opt_state: optax.OptState,
    *,
    axis_name: str | None = None,
    nodes: Nodes | None = None,
) -> Any:
    """Returns the average model `sum_i x_i / sum_i w_i` on every node; messages in flight count.

    The result has the types of the parameters. If weights differ, the result differs from the mean
    of the `z_i`. If `params` is a stale model (`adpsgd`), the latest models are averaged. The
    center of `easgd` is not counted. Parameters that a masked transform does not gossip stay this
    node's own. Inside a node the result is sharded as the specs of `gx.sharded` say.

    Call `average_model` only for the parameters, because it adds the messages in flight to its
    argument. For another tree, such as a moving average of the parameters, call
    `gx.average_batch_stats(ema, nodes=nodes)`.

    Args:
      params, opt_state, axis_name: as in `total_mass`.
      nodes: where the nodes run, if you call `average_model` outside of a per-node function, with
        node-stacked `params` and `opt_state`. You then get one ordinary model, `[...]`, on every
        process, to evaluate or save.

    Raises:
      ValueError: if `total_mass` would raise it, or, with `nodes`, if the arrays are not of these
        nodes, or nodes differ in parameters that the transform does not gossip.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.directed_ring(3))
    >>> def average(z):
    ...     return gx.average_model(z, tx.init(z))
    >>> jax.vmap(average, axis_name="nodes")(jnp.arange(3.0)).tolist()
    [1.0, 1.0, 1.0]
    >>> nodes = gx.Nodes(3)
    >>> params, opt_state = nodes.init(tx, jnp.ones(2))  # [3, 2]
    >>> gx.average_model(params, opt_state, nodes=nodes).tolist()
    [1.0, 1.0]
    """
    if nodes is not None:
        program = on_axis(average_model, axis_name or nodes.axis_name)
        averages = nodes.run(program, params, opt_state)
        state = gossip_state(opt_state)
        is_masked = state is not None and state.mask is not None
        try:
            return nodes.one(averages, require_equal=is_masked)
        except ValueError as error:
            if not is_masked:
                raise
            what = str(error).split(": ")[0]  # without its advice, which does not fit here
            raise ValueError(
                f"{what}, and a masked transform does not gossip them: nodes.run(gx.average_model, "
                "params, opt_state) has the model of each node, [N, ...], and "
                "gx.average_batch_stats(part, nodes=nodes) the mean of a part."
            ) from None
    structure = jax.tree.structure(params)
    params, opt_state = _without_variables((params, opt_state))
    state = _gossip_state(params, opt_state)
    require_inside(_axis_name(state, axis_name), "gx.average_model(params, opt_state")
    gossiped_params = gossiped(params, state)
    mass = _sum_models(gossiped_params, state, axis_name)
    average = cast_like(debias(mass.x, mass.weight), gossiped_params)
    model = merge_gossiped(params, average, state)
    # A program that returned the parameters may have sharded them otherwise.
    model = constrain(model, shard_specs(opt_state), _axis_name(state, axis_name), params)
    return jax.tree.unflatten(structure, jax.tree.leaves(model))


def _without_variables(tree: Any) -> Any:
    """Replaces NNX variables, whose kinds differ between parameters and states, by arrays."""

    def is_variable(part: Any) -> bool:
        return hasattr(part, "get_value")

    def value_of(part: Any) -> Any:
        return part.get_value() if is_variable(part) else part

    return jax.tree.map(value_of, tree, is_leaf=is_variable)


@functools.cache
def on_axis(fn: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Binds `axis_name` to `fn`. It is cached, because `Nodes.run` compiles each function once."""
    return functools.partial(fn, axis_name=axis_name)


def require_inside(axis_name: str, call: str) -> None:
    """Raises `ValueError` outside of a per-node function, with the advice to add `nodes=`."""
    try:
        axis_size(axis_name)
    except ValueError as error:
        raise ValueError(f"{error} For one ordinary model call {call}, nodes=nodes).") from None


def sum_mass(
    params: optax.Params, opt_state: optax.OptState, aux: Any, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """Computes the values that `gx.TrainStep` checks, the same on every node.

    The first array, `[3]`, has the sum of the weights, the sum of all values of the numerators, and
    the difference between the largest and the smallest count of updates. The second, bool `[N]`,
    says whose `aux`, such as the loss, is not finite.
    """
    params, opt_state = _without_variables((params, opt_state))
    state = gossip_state(opt_state)
    mass = _mass_of_node(gossiped(params, state), state)
    dtype = mass.weight.dtype
    # Each node sums its own values first, so on a mesh a few numbers travel and not a model.
    numerator = sum(jnp.sum(leaf, dtype=dtype) for leaf in jax.tree.leaves(mass.x))
    floats = [leaf for leaf in jax.tree.leaves(aux) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    is_finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all() for x in floats], True)
    # Each node fills in its own entry of `failed` `[N]`, so the sum over the nodes has all entries.
    is_self = jnp.arange(axis_size(axis_name), dtype=jnp.int32) == jax.lax.axis_index(axis_name)
    failed = (is_self & ~jnp.asarray(is_finite)).astype(dtype)
    sums = node_sum(jnp.stack([mass.weight, jnp.asarray(numerator), *failed]), Wire(axis_name))
    # In integers: float32 cannot represent large counts exactly.
    count = jnp.asarray(0 if state is None else state.count)
    return jnp.append(sums[:2], node_spread(count, axis_name).astype(dtype)), sums[2:] > 0


def _sum_models(params: optax.Params, state: GossipState | None, axis_name: str | None) -> PushSum:
    """Returns the sums of weights and numerators over the nodes and the messages in flight."""
    axis_size(_axis_name(state, axis_name))  # raises `ValueError` if the axis is missing
    return node_sum(_mass_of_node(params, state), Wire(_axis_name(state, axis_name)))


def _mass_of_node(params: optax.Params, state: GossipState | None) -> PushSum:
    """Returns this node's weight and numerators, with the messages in flight added to both."""
    require_floats(params, "params")
    if state is not None and state.residual is not None:
        require_like(state.residual, params, "params")
    in_flight = mass_in_flight(params, state)
    weight = push_sum_weight(state)
    if in_flight.weight is not None:
        weight = weight + in_flight.weight
    return PushSum(weight, add(numerators(params, state), in_flight.x))


def _gossip_state(params: optax.Params, opt_state: optax.OptState) -> GossipState | None:
    """Returns `gossip_state(opt_state)`; raises `ValueError` if the arguments were swapped."""
    if gossip_state(params) is not None:
        raise ValueError(
            "params must be parameters, got an optimizer state: the order is (params, opt_state)."
        )
    return gossip_state(opt_state)


def _axis_name(state: GossipState | None, axis_name: str | None) -> str:
    """Returns the given axis, else that of the transform, else the default "nodes"."""
    return axis_name or (Wire() if state is None else state.wire).axis_name
