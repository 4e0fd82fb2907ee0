"""Overlap SGP: messages are used some steps after they were sent (SGP-19, section 3)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.sgp import sgp
from gossipjax.buffers import Layout, cast_like, in_rows, require_wire_dtype
from gossipjax.collectives import Step, Wire, as_varying, default_step, deliver, split
from gossipjax.mixing import at_round, mix, require_schedule, require_step
from gossipjax.schedule import Schedule, require_whole
from gossipjax.state import (
    GossipState,
    InFlight,
    add,
    debias,
    find_state,
    gossip_transform,
    init_state,
    is_empty,
    message_layout,
    numerators,
    wide_copies,
)


def osgp(
    schedule: Schedule,
    overlap: int = 1,
    biased: bool = False,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Overlap SGP, tau-OSGP: the exchange runs while the next steps compute. Goes *last*.

    With `tau = overlap`, `s_i = P_ii`, `R = P - diag(s)` and `u` the update from the chain before:

        every step:                  y = x + u
        sending steps, k mod tau = 0:  x <- s y, w <- s w; the messages R y, R w are on their way
                                     until the end of step k + tau, and are then added to x and w
        other steps:                 x <- y
        every step:                  z <- x / w

    So tau = 1 sends at every step what the next step uses, and tau = 0 is `sgp`. It is the worst
    case that SGP-19 measures in table 4, "all messages are received with tau-iteration staleness",
    at every step, and so repeatable. The round of step `k` is number `k / tau` of the schedule, as
    in `schedule.every(overlap)`: the switches of a piecewise schedule fall on tau times their step.
    A message travels in tau pieces, one per step.

    The parameters that the user holds are the de-biased `z`. The state holds `w` and the messages
    on their way, already scaled; the rest is as in `sgp`. The sum of `x`, or `w`, over nodes and
    messages changes only by the updates.

    The exchange depends on nothing of its step. It can be a program of its own: `gx.exchange` makes
    `received`, and `update(..., received=received)` then holds no collective.

    Args:
      schedule: any column-stochastic schedule.
      overlap: tau, steps between sending a message and using it.
      biased: the ablation of SGP-19, table 4: messages carry no weight, and z = x. The mass on its
        way is missing from every model, which is the worse for it.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of a node's own devices, as in `sgp`.
      wire_dtype: a narrower type for messages, as in `sgp`.

    `update` takes `step=` as in `sgp`, and steps must follow one another: a message is delivered by
    the round before. The static ones are `schedule.every(overlap).canonical_step(k, overlap)`.
    Where steps are skipped (the whole chain inside `optax.MultiSteps`), leave `step` out: by other
    rounds than their own, messages would come back unsent.

    Raises:
      ValueError: for an overlap below 0; when traced, for a state of another overlap or schedule;
        else as `sgp`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.osgp(gx.topology.one_peer_exponential(2))
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 3.0])).tolist()
    [2.0, 1.0]
    """
    require_schedule(schedule, "osgp")
    overlap = require_whole(overlap, "overlap of osgp", 0)
    wire = Wire(axis_name, local_axis_name, require_wire_dtype(wire_dtype))
    if overlap == 0 and not biased:
        return sgp(schedule, *wire)

    def pack(layout: Layout, message: Any) -> tuple[jax.Array, ...]:
        return tuple(in_rows(buffer, overlap) for buffer in layout.pack(message))

    def init(params: Any) -> GossipState:
        state = init_state(params, push_sum=not biased)
        if overlap == 0:
            return state
        nothing = jax.tree.map(jnp.zeros_like, wide_copies(params))
        weight = None if biased else jnp.zeros_like(state.weight)
        buffers = pack(message_layout(nothing, state), (weight, nothing))
        return state._replace(in_flight=InFlight(buffers, schedule, overlap, wire))

    def combine(x: Any, updates: Any, state: GossipState, step: Step) -> tuple[Any, GossipState]:
        y = add(x, updates)
        if overlap == 0:
            x, _ = mix(y, None, schedule, step, *wire)
            return x, state._replace(numerator=x)
        layout = message_layout(y, state)

        def use_and_send(mine: Any, buffers: Any) -> tuple[Any, Any]:
            kept, sent = at_round(
                lambda mixing, m: split(m, mixing, axis_name),
                schedule,
                step // overlap,
                axis_name,
                mine,
            )
            return jax.tree.map(jnp.add, kept, layout.unpack(buffers)), pack(layout, sent)

        def wait(mine: Any, buffers: Any) -> tuple[Any, Any]:
            return mine, buffers

        mine = (None if biased else state.weight, y)
        carried = jax.tree.map(
            lambda leaf: as_varying(leaf, axis_name), (mine, state.in_flight.buffers)
        )
        if isinstance(step, int | np.integer):
            (weight, x), buffers = (wait if step % overlap else use_and_send)(*carried)
        else:
            (weight, x), buffers = jax.lax.cond(step % overlap, wait, use_and_send, *carried)
        state = state._replace(numerator=x, in_flight=InFlight(buffers, schedule, overlap, wire))
        if biased:
            return x, state
        return debias(x, weight), state._replace(weight=weight)

    frame = gossip_transform("osgp", axis_name, init, combine)

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        step: Step | None = None,
        received: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        if isinstance(state, GossipState) and overlap:
            flying = state.in_flight
            if not isinstance(flying, InFlight) or flying.overlap != overlap:
                raise ValueError(
                    f"this osgp has an overlap of {overlap}; the state is another's. Start anew "
                    "from gx.average_model, or with the overlap that made the state."
                )
            if flying.schedule != schedule:
                raise ValueError(
                    "the messages in the state travel by another schedule than this one's. Start "
                    "anew from gx.average_model, or switch by gx.topology.piecewise."
                )
            step = default_step(step, state.count, axis_name)
            if received is None:
                received = exchange(state, step, axis_name)
            if not isinstance(received, InFlight):
                raise ValueError(f"received is what gx.exchange returns; given {received!r}.")
            state = state._replace(in_flight=received)
        return frame.update(updates, state, params, step=step, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def exchange(opt_state: Any, step: Step, axis_name: str = "nodes") -> InFlight:
    """The first half of an overlapped update: exchanges what `osgp` has sent before this step.

    It reads nothing but the messages in the state, so it can run beside the computation of the
    gradients, as a program of its own; `tx.update(..., step=step, received=received)` is the other
    half. Both together equal `tx.update(..., step=step)`.

    Args:
      opt_state: the state of `osgp`, or of a whole chain that holds it.
      step: the step of the update that follows.
      axis_name: the mapped axis of the nodes.

    Raises:
      ValueError: if the state holds no messages, or as `osgp` when traced.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.osgp(gx.topology.one_peer_exponential(2))
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         received = gx.exchange(state, step, "nodes")
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step, received=received)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 3.0])).tolist()
    [2.0, 1.0]
    """
    state = find_state(opt_state)
    if state is None or not isinstance(state.in_flight, InFlight):
        raise ValueError("exchange needs the state of gx.osgp with an overlap of 1 or more.")
    flying = state.in_flight
    require_step(step, axis_name)
    wire = flying.wire._replace(axis_name=axis_name)
    sent_at, piece = (step - 1) // flying.overlap, (step - 1) % flying.overlap
    arrived = at_round(
        lambda mixing, rows: [deliver(row, mixing, wire) for row in rows],
        flying.schedule,
        sent_at,
        axis_name,
        [jax.lax.dynamic_index_in_dim(b, piece, keepdims=False) for b in flying.buffers],
    )
    buffers = tuple(
        jax.lax.dynamic_update_index_in_dim(as_varying(buffer, axis_name), row, piece, 0)
        for buffer, row in zip(flying.buffers, arrived, strict=True)
    )
    return InFlight(buffers, flying.schedule, flying.overlap, flying.wire)


def receive(params: Any, state: GossipState, arrived: InFlight) -> tuple[Any, GossipState]:
    """Uses what has arrived late: `x <- x + r, w <- w + r_w, z <- x / w`.

    Where the update of a sending step was given nothing as `received`, it equals, up to rounding,
    the update that is given `arrived`.

    Args:
      params: this node's `z`, as that update left it.
      state: of `osgp`; what it has in flight is not looked at.
      arrived: what `exchange` has returned.
    """
    x = numerators(params, state)
    weight, came = message_layout(x, state).unpack(arrived.buffers)
    x = jax.tree.map(jnp.add, x, came)
    state = state._replace(numerator=() if is_empty(state.numerator) else x)
    if weight is None:
        return cast_like(x, params), state
    weight = state.weight + weight
    return cast_like(debias(x, weight), params), state._replace(weight=weight)
