"""Gradient tracking, with push-sum if the schedule is not doubly stochastic."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from gossipjax.collectives import StepLike, require_schedule
from gossipjax.exchanges.model import add, scale, subtract
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState, OnResize, init_state, mix_once
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike


def gradient_tracking(
    schedule: Schedule,
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    damped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Gradient tracking: every node steps along its estimate of the mean update. Put it *last*.

    If `x` are the parameters, `[...]` per node, `u` is the update from the chain, and `c` is a
    correction, 0 at the start, then `y = u + c` estimates the mean of `u` over the nodes:

        x <- P (x + u + c);    c <- P (c + u) - u

    The algorithm is DSGT, `x <- P (x - a y), y <- P y + g' - g`, with the update `u = -a g` in the
    place of the gradient `g`. After `optax.sgd` in a chain you get the paper's algorithm; after an
    optimizer with momentum, nodes track its updates. On uneven data the nodes reach the
    optimum of the mean loss, while D-PSGD at a constant rate stays away from this optimum. At every
    step the mean of `y` over the nodes equals the mean of `u`, because the mean of `c` stays 0.

    If the schedule is not doubly stochastic, the algorithm is Push-DIGing: `x` is the numerator of
    push-sum, as in `sgp`, with a weight `w` and the same `c`, and your parameters are `z`:

        w <- P w;    z <- x / w

    `x`, `c` and `w` travel as one message, twice as long as a message of `sgp`. The state keeps `c`
    as `extra["correction"]`. If the number of nodes changes, `c` restarts from 0.

    With `damped`, a node whose weight is below 1 follows its updates slowly. The algorithm then
    uses `v` instead of `u`. `v` is 0 at the start, and equals `u` if all weights are 1:

        v <- v + min(1, w) (u - v)

    If weights come near 0, as with `random_peer`, the undamped step `(u + c) / w` is far too large.

    Args:
      schedule: any column-stochastic schedule.
      axis_name, local_axis_name, wire: as in `gx.sgp`; `update` takes the same `step=`.
      damped: whether nodes of low weight follow slowly. The state then also keeps v, which restarts
        like c. With a doubly stochastic schedule `damped` has no effect.

    Raises:
      ValueError: if `gx.sgp` would raise it.

    References:
      Pu and Nedic, "Distributed Stochastic Gradient Tracking Methods", Mathematical Programming
      2021, arXiv:1805.11454.
      Nedic, Olshevsky, Shi, "Achieving Geometric Convergence for Distributed Optimization over
      Time-Varying Graphs", SIAM Journal on Optimization 2017, arXiv:1607.03218 (Push-DIGing).

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.2), gx.gradient_tracking(gx.topology.star(4)))
    >>> nodes = gx.Nodes(4)
    >>> train_step = gx.TrainStep(lambda x, target, a: (a * (x - target), ()), tx, nodes=nodes)
    >>> x, state = nodes.init(tx, jnp.zeros(()))
    >>> target, a = jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([1.0, 1.0, 1.0, 2.0])
    >>> for step in range(300):
    ...     x, state, _ = train_step(step, x, state, target, a)
    >>> bool(abs(x - 9 / 5).max() < 1e-5)  # sum(a * target) / sum(a), on every node
    True
    """
    require_schedule(schedule, "gradient_tracking")
    route = Wire.make(axis_name, local_axis_name, wire)
    damped = damped and not schedule.is_doubly_stochastic
    plan = ExchangePlan(schedule, wire=route, models=2, moves_by_zeros=True, mixes_any_update=True)
    zeros: dict[str, OnResize] = {"correction": "restart"}
    if damped:
        zeros["damped"] = "restart"
    init = partial(init_state, plan=plan, push_sum=not schedule.is_doubly_stochastic, zeros=zeros)

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Moves along the estimated mean update, and mixes `x`, this estimate and the weight."""
        if damped:  # a node of low weight follows slowly: `v <- v + min(1, w) (u - v)`
            last = state.kept("damped")
            change = scale(subtract(updates, last), jnp.minimum(1, state.weight))
            updates = add(last, change)
            state = state.keep(damped=updates)
        mean = add(state.kept("correction"), updates)  # this node's estimate of the mean update
        (x, mixed), weight = mix_once((add(x, mean), mean), state.weight, state, step)
        # Added to the updates of the next step, the correction gives the next estimate.
        state = state._replace(weight=weight).keep(correction=subtract(mixed, updates))
        return Combined(x, state)

    return gossip_transform("gradient_tracking", plan, init, combine)
