"""Decentralized parallel SGD and, on random rings, RAND-PSGD."""

from __future__ import annotations

from typing import get_args

import optax

from gossipjax.algorithms import frame
from gossipjax.algorithms.sgp import mix_updated
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike


def dpsgd(
    schedule: Schedule,
    order: frame.Order = "combine-while-adapting",
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD: average with the neighbours and take a local step. Goes *last* in a chain.

    With `x` the parameters, `[...]` per node, and `u` the update from the chain before it:

        x <- P x + u       order="combine-while-adapting" (algorithm 1): exchange and gradient may
                           run at the same time
        x <- P (x + u)     order="adapt-then-combine" (a remark of the paper): the order of SGP, and
                           of the D-PSGD that the SGP paper compares with

    On a random ring it is RAND-PSGD. The state is a `GossipState` with a count and, if any
    parameter has less precision than float32, float32 residuals of all, as in `sgp`.

    Args:
      schedule: a doubly stochastic schedule. The paper's matrices are symmetric too, which the
        mathematics does not need.
      order: which of the two.
      axis_name, local_axis_name, wire: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: if the schedule is not doubly stochastic (x would drift from the average: use
        `sgp`); else as `gx.sgp`.

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
    frame.require_choice(order, "order of dpsgd", get_args(frame.Order))
    route = frame.make_route("dpsgd", axis_name, local_axis_name, wire)
    plan = frame.ExchangePlan(schedule, wire=route, order=order)
    return mix_updated("dpsgd", plan, push_sum=False)
