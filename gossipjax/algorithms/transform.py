"""The wrapper of all gossip transforms, and the exchange that can run before the rest of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.state import (
    ExchangePlan,
    GossipState,
    InFlight,
    PushSum,
    as_update,
    gossip_state,
    numerators,
)
from gossipjax.collectives import (
    StepLike,
    as_varying,
    at_round,
    default_step,
    deliver,
    mix,
    require_step,
)

Received = InFlight | PushSum
Combine = Callable[[Any, optax.Updates, GossipState, StepLike, Any], tuple[Any, GossipState]]


def gossip_transform(
    name: str, plan: ExchangePlan, init: optax.TransformInitFn, combine: Combine
) -> optax.GradientTransformationExtraArgs:
    """Wraps `combine` as an optax transform that goes last in a chain.

    `combine(x, updates, state, step, received)` gets the numerators and returns the new parameters,
    float32 at least, and the state with its new weight and numerators. `received` is the result of
    `exchange` where the plan exchanges early, else None. The wrapper returns the update that
    reaches these parameters, counts, and keeps numerators only if `init` made some.

    Raises (when traced):
      ValueError: if the axis is missing, `params` are not passed to `update`, the state was made
        by a transform with another schedule, overlap or wire, or `received` is not what `exchange`
        returns.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        received: Received | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        if params is None:
            raise ValueError(
                f"the params of {name} must be given, as it mixes them, got None: call "
                "tx.update(updates, state, params)."
            )
        own_state = require_own_state(name, plan, state)
        step = default_step(step, own_state.count, plan.wire.axis_name)
        if plan.exchanges_early and received is None:
            received = exchange(own_state, step, params=params)
        require_received(name, plan, received)
        x = numerators(params, own_state)
        target, new_state = combine(x, updates, own_state, step, received)
        return as_update(params, target), new_state._replace(
            count=optax.safe_increment(own_state.count),
            numerator=None if own_state.numerator is None else new_state.numerator,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def require_own_state(name: str, plan: ExchangePlan, state: Any) -> GossipState:
    """Returns `state`; raises `ValueError` unless it is a `GossipState` made for this plan."""
    if not isinstance(state, GossipState):
        raise ValueError(
            f"the state of {name} must be a gx.GossipState, got {type(state).__name__}, the state "
            "of another transform: make it by tx.init(params) of the same chain."
        )
    for field in dataclasses.fields(plan):
        expected, actual = getattr(plan, field.name), getattr(state.plan, field.name)
        if expected != actual:
            raise ValueError(
                f"the state of {name} must have been made with its {field.name}, {expected}, got "
                f"one of {actual}: messages and rounds would not match. Switch schedules by "
                "gx.topology.piecewise, or go on from the average model by "
                "gossipjax.checkpoint.change_nodes."
            )
    return state


def require_received(name: str, plan: ExchangePlan, received: Any) -> None:
    """Raises `ValueError` unless `received` is what `exchange` returns for this plan."""
    if not plan.exchanges_early:
        if received is not None:
            raise ValueError(
                f"received must be left out for {name}, whose exchange needs the update of its "
                "step, got one."
            )
        return
    expected = InFlight if plan.overlap else PushSum
    if not isinstance(received, expected):
        raise ValueError(
            f"received must be what gx.exchange returns, got {received!r}: call "
            "gx.exchange(opt_state, step, params=params)."
        )


def exchange(
    opt_state: optax.OptState,
    step: StepLike,
    axis_name: str | None = None,
    params: optax.Params | None = None,
) -> Received:
    """The first half of an update: the exchange, where it needs nothing that the step computes.

    - Under overlap (`osgp`) it exchanges what was sent before this step.
    - Of an algorithm that combines while it adapts (`dpsgd`, `adpsgd`, `sgp` in that order) it
      mixes the models, `x, w <- P x, P w`, which the gradient then moves.

    It can run at the same time as the gradients, as a separate program; `tx.update(..., step=step,
    received=received)` is the other half. Both together equal `tx.update(..., step=step)`.

    Args:
      opt_state: the state of the transform, or of a whole chain that holds it.
      step: the step of the update that follows.
      axis_name: the mapped axis of the nodes; that of the transform if not given.
      params: the parameters that the user holds; under overlap they are not needed.

    Raises:
      ValueError: if the exchange of this algorithm needs the update of its step (`sgp`: use
        `order="combine-while-adapting"`), if `params` are missing, or as `sgp` when traced.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.osgp(gx.topology.one_peer_exponential(2))
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         received = gx.exchange(state, step)
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step, received=received)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 3.0])).tolist()
    [2.0, 1.0]
    """
    state = gossip_state(opt_state)
    if state is None or not state.plan.exchanges_early:
        raise ValueError(
            "the exchange must need nothing of its step, as that of gx.osgp, gx.dpsgd or gx.sgp("
            'order="combine-while-adapting"), got the state of another algorithm, which exchanges '
            "inside tx.update."
        )
    wire = state.wire if axis_name is None else state.wire._replace(axis_name=axis_name)
    require_step(step, wire.axis_name)
    if not state.plan.overlap:
        if params is None:
            raise ValueError(
                "params must be given to the exchange of an algorithm that mixes them, got None: "
                "call gx.exchange(opt_state, step, params=params)."
            )
        x, weight = mix(
            numerators(params, state), state.weight, state.schedule, step, **wire.arguments()
        )
        return PushSum(weight, x)
    last_round, chunk = (step - 1) // state.overlap, (step - 1) % state.overlap
    buffers = state.in_flight.buffers
    received = at_round(
        lambda round_, rows: [deliver(row, round_, wire) for row in rows],
        state.schedule,
        last_round,
        wire.axis_name,
        [jax.lax.dynamic_index_in_dim(buffer, chunk, keepdims=False) for buffer in buffers],
    )
    return InFlight(
        tuple(
            _replace_row(as_varying(buffer, wire.axis_name), row, chunk)
            for buffer, row in zip(buffers, received, strict=True)
        )
    )


def _replace_row(buffer: jax.Array, row: jax.Array, index: StepLike) -> jax.Array:
    """`buffer` `[rows, length]` with another row; on accelerators in place.

    On CPU a selection: there XLA may fuse an update in place with the permutation of a row, which
    under vmap reads the same buffer, so that nodes read what others have just written.
    """
    if len(buffer) == 1:
        return row[None]

    def select(buffer: jax.Array, row: jax.Array) -> jax.Array:
        is_row = jax.lax.broadcasted_iota(jnp.int32, buffer.shape, 0) == index
        return jnp.where(is_row, jnp.broadcast_to(row, buffer.shape), buffer)

    def update(buffer: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(buffer, row, index, 0)

    return jax.lax.platform_dependent(buffer, row, cpu=select, default=update)
