"""Mixed momentum: neighbours average their momentum as they average their models."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import optax

from gossipjax.algorithms import frame
from gossipjax.algorithms.quasi_global import (
    add_scaled,
    make_plan,
    rate_at,
    require_fraction,
    require_rate,
)
from gossipjax.collectives import StepLike
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
      axis_name, local_axis_name, wire: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: if the rate is not a positive number or a function, or `momentum` is not from 0 to
        below 1; else as `gx.dpsgd`.

    References:
      Yu, Jin, Yang, "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for
      Distributed Non-Convex Optimization", ICML 2019, arXiv:1905.03817, algorithm 3.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.contrib.mixed_momentum(gx.topology.ring(2), rate=0.5)
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
    plan = make_plan(
        name, schedule, frame.make_route(name, axis_name, local_axis_name, wire), models=2
    )
    init = partial(frame.init_state, plan=plan, zeros={"momentum": "average"})

    def combine(x: Any, gradients: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        m = add_scaled(gradients, momentum, state.kept("momentum"))
        direction = add_scaled(gradients, momentum, m) if nesterov else m
        local = frame.subtract(x, frame.scale(direction, rate_at(rate, state.count)))
        (x, m), _ = frame.mix_once((local, m), None, state, step)
        return frame.Combined(x, state.keep(momentum=m))

    return frame.gossip_transform(name, plan, init, combine)
