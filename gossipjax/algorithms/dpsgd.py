"""Decentralized parallel SGD and, on random rings, RAND-PSGD; with adaptive consensus, DSGD-AC."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import jax
import optax

from gossipjax.collectives import StepLike, require_doubly_stochastic
from gossipjax.exchanges.model import add, interpolate
from gossipjax.exchanges.plan import ExchangePlan, Order
from gossipjax.exchanges.state import GossipState, init_state, mix_once
from gossipjax.exchanges.transform import (
    Combined,
    gossip_transform,
    mix_updated,
    require_choice,
    require_number,
)
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike


def dpsgd(
    schedule: Schedule,
    *,
    order: Order = "combine-while-adapting",
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    strength: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD: nodes average with neighbours and take a local step. Put it *last* in a chain.

    If `x` are the parameters, `[...]` per node, and `u` is the update from the chain:

        x <- P x + u       order="combine-while-adapting" (algorithm 1): exchange and gradient may
                           run at the same time
        x <- P (x + u)     order="adapt-then-combine" (a remark of the paper): the order of SGP, and
                           of the D-PSGD that the SGP paper compares with

    With a random ring as the schedule, the algorithm is RAND-PSGD. With a `strength` c below 1,
    nodes mix by `(1 - c) I + c P` instead of `P`, at the same traffic. If
    `gx.contrib.adaptive_consensus` gives the strength, the algorithm is DSGD-AC.

    Args:
      schedule: a doubly stochastic schedule, symmetric (as in the paper) or not.
      order: "combine-while-adapting" or "adapt-then-combine", as above.
      axis_name, local_axis_name, wire: as in `gx.sgp`; `update` takes the same `step=`.
      strength: c, from 0 to 1, or an `optax.Schedule`, a function of the number of updates so far.
        With strength 0 nodes do not mix, but the exchange costs as much.

    Raises:
      ValueError: if the schedule is not doubly stochastic (x would drift from the average: use
        `sgp`), if `strength` is not as above, or if `gx.sgp` would raise it.

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017,
      arXiv:1705.09056, algorithm 1.
      Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training",
      ICASSP 2020, arXiv:2002.01119, section 3 (RAND-PSGD).

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.dpsgd(gx.topology.ring(2))
    >>> def update(x, u):
    ...     return x + tx.update(u, tx.init(x), x, step=0)[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    require_doubly_stochastic(schedule, "dpsgd")
    require_choice(order, "order of dpsgd", get_args(Order))
    is_number = not callable(strength) and not isinstance(strength, jax.Array)
    if is_number:
        name = "strength of dpsgd, unless it is a function of the update,"
        require_number(strength, name, "from 0 to 1", lambda c: 0 <= c <= 1)
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(schedule, wire=route, order=order)
    if is_number and strength == 1:
        return mix_updated("dpsgd", plan, push_sum=False)

    def combine(
        x: Any, updates: Any, state: GossipState, step: StepLike, received: Any = None
    ) -> Combined:
        """Mixes by `(1 - c) I + c P`, before or after the update is added."""
        c = strength(state.count) if callable(strength) else strength
        if plan.exchanges_early:  # `received.x` is `P x`
            return Combined(add(interpolate(x, received.x, 1 - c), updates), state)
        x = add(x, updates)
        mixed, _ = mix_once(x, None, state, step)  # without a push-sum weight
        return Combined(interpolate(x, mixed, 1 - c), state)

    return gossip_transform("dpsgd", plan, partial(init_state, plan=plan), combine)
