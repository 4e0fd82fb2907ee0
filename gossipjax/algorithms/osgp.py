"""Overlap SGP: nodes use messages some steps after they were sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import StepLike, at_round, cond, require_schedule, split, vary
from gossipjax.exchanges.model import add, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState, PushSum, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform, mix_updated
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import Wire, WireLike


def osgp(
    schedule: Schedule,
    overlap: int = 1,
    *,
    biased: bool = False,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Overlap SGP, tau-OSGP: the exchange runs while the next steps compute. Put it *last*.

    If `tau = overlap`, `s_i = P_ii`, `R = P - diag(s)`, and `u` is the update from the chain, then:

        every step:                    y = x + u
        sending steps, k mod tau = 0:  x <- s y, w <- s w; the messages R y, R w are in flight until
                                       the end of step k + tau, and are then added to x and w
        other steps:                   x <- y
        every step:                    z <- x / w

    With tau = 1 nodes send at every step, and use the messages at the next step. With tau = 0 the
    algorithm is `sgp`. Every message is late by exactly tau steps, so runs can be repeated. The
    paper's table 4 calls such delays the worst case: "all messages are received with tau-iteration
    staleness". Step `k` uses round `k / tau` of the schedule, as `schedule.every(overlap)` does. A
    message travels in tau pieces of whole leaves, one per step, which are about equal in size.

    Your parameters are the de-biased `z`. The state also contains the messages in flight, already
    scaled. Only updates change the sums of `x` and `w` over nodes and messages.

    An exchange needs nothing that its step computes, so it can be a separate program: `gx.exchange`
    makes `received`, and `update(..., received=received)` then contains no collective.

    Args:
      schedule: any column-stochastic schedule.
      overlap: tau, the number of steps between sending a message and using it.
      biased: whether to make the ablation of the paper's table 4: messages carry no weight, and
        z = x. Models are worse, because each of them lacks the mass in flight.
      axis_name, local_axis_name, wire: as in `gx.sgp`.

    `update` takes `step=` as in `gx.sgp`. Do not leave out a step, because each step delivers the
    messages of the step before. If steps are skipped (the whole chain is inside
    `gx.apply_if_finite`), do not pass `step`.

    Raises:
      ValueError: if the overlap is below 0, or `gx.sgp` would raise it.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, section 3 and table 4.

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
    overlap = require_int(overlap, "overlap of osgp", 0)
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(schedule, overlap, route)
    if overlap == 0:
        return mix_updated("osgp", plan, push_sum=not biased)

    def init(params: optax.Params) -> GossipState:
        state = init_state(params, plan, push_sum=not biased)
        # Before the first step the messages in flight are empty.
        weight = jax.tree.map(jnp.zeros_like, state.weight)
        return state._replace(in_flight=PushSum(weight, zeros_like_model(params)))

    def combine(
        x: Any, updates: optax.Updates, state: GossipState, step: StepLike, received: Any
    ) -> Combined:
        """Adds the update; at a sending step also adds what was `received`, and sends messages."""
        mass = PushSum(state.weight, add(x, updates))

        def receive_and_send(mass: PushSum, received: PushSum) -> tuple[PushSum, PushSum]:
            """Returns the new mass of this node, and the messages that are now in flight."""
            round_number = step // overlap
            kept, sent = at_round(
                lambda round_, x: split(x, round_), schedule, round_number, axis_name, mass
            )
            return jax.tree.map(jnp.add, kept, received), sent

        operands = vary((mass, received), axis_name)
        is_sending = overlap == 1 or step % overlap == 0  # static with overlap 1
        # At other steps `received` has travelled in part, and stays in flight.
        mass, in_flight = cond(is_sending, receive_and_send, lambda *same: same, *operands)
        return Combined(mass.x, state._replace(weight=mass.weight, in_flight=in_flight))

    return gossip_transform("osgp", plan, init, combine)
