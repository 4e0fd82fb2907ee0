"""Mixed momentum: neighbours average their momentum as they average their models."""

from __future__ import annotations

from typing import Any

import jax
import optax

from gossipjax.algorithms.frame.rounding import zeros_like_model
from gossipjax.algorithms.frame.state import Extra, GossipState, init_state, subtract
from gossipjax.algorithms.frame.transform import Combined, gossip_transform
from gossipjax.algorithms.uneven_data._optimizers import (
    add_scaled,
    make_plan,
    rate_at,
    require_fraction,
    require_nesterov,
    require_rate,
    scale,
)
from gossipjax.collectives import StepLike, mix
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike


def mixed_momentum(
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    momentum: float | jax.Array = 0.9,
    nesterov: bool = False,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD whose momentum is mixed, too. Goes *last*, in the place of the chain's SGD.

    What arrives are gradients `g`, after clipping or weight decay, say. With `x` the parameters,
    `[...]` per node, and `m` their momentum, 0 at the start:

        m <- momentum m + g;    d = m, or g + momentum m (nesterov)
        x <- P (x - rate d);    m <- P m

    Without the last, it is D-PSGD after `optax.sgd` with momentum. Both travel as one message,
    twice as long as that of `dpsgd`. On the complete graph, from equal models, it is AllReduce. The
    state is a `GossipState` with `extra["momentum"]`, like the parameters and float32 at least; on
    a change of nodes it is averaged.

    Args:
      schedule: a doubly stochastic schedule.
      rate: the learning rate: a number, a function of the number of updates before, or a traced
        scalar, as `optax.inject_hyperparams` makes of either.
      momentum: the factor of `m` in a step.
      nesterov: whether the step is that of Nesterov's momentum.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node, if it has several.
      wire: a narrower type or a dense codec for messages, as in `sgp`.

    The transform's `update` takes `step=`, as that of `sgp`.

    Raises:
      ValueError: if the rate is not a positive number or a function, `momentum` is not from 0 to
        below 1, or the schedule is not doubly stochastic; when traced, as `sgp`.

    References:
      Yu, Jin, Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for
      Distributed Non-Convex Optimization", ICML 2019, arXiv:1905.03817, algorithm 3.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.mixed_momentum(gx.topology.ring(2), rate=0.5)
    >>> def update(x, g):
    ...     updates, state = tx.update(g, tx.init(x), x, step=0)
    ...     return x + updates, state.extra["momentum"].value
    >>> x, m = jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([1.0, 3.0]))
    >>> x.tolist(), m.tolist()
    ([0.0, 0.0], [2.0, 2.0])
    """
    name = "mixed_momentum"
    require_rate(rate, name)
    require_fraction(momentum, f"momentum of {name}")
    require_nesterov(nesterov, name)
    plan = make_plan(name, schedule, axis_name, local_axis_name, wire, models=2)

    def init(params: optax.Params) -> GossipState:
        state = init_state(params, plan, push_sum=False)
        return state._replace(extra={"momentum": Extra(zeros_like_model(params))})

    def combine(
        x: Any, gradients: optax.Updates, state: GossipState, step: StepLike, received: Any
    ) -> Combined:
        del received
        assert state.extra is not None
        m = add_scaled(gradients, momentum, state.extra["momentum"].value)
        direction = add_scaled(gradients, momentum, m) if nesterov else m
        local = subtract(x, scale(direction, rate_at(rate, state.count)))
        (x, m), _ = mix(
            (local, m),
            None,
            schedule,
            step,
            **plan.wire.arguments(),
            key=plan.wire.make_key(state.count),
        )
        return Combined(x, state._replace(extra={"momentum": Extra(m)}))

    return gossip_transform(name, plan, init, combine)
