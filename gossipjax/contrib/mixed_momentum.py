"""Mixed momentum: neighbours average their momentum as they average their models."""

from __future__ import annotations

from typing import Any

import optax

from gossipjax.algorithms.gossip import Node, gossip
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.exchanges.model import add_scaled
from gossipjax.topology.schedule import Schedule


def mixed_momentum(
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    axis_name: str = "nodes",
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD that mixes the momentum, too. Put it *last*, instead of SGD.

    The chain hands on gradients `g`. If `x` are the parameters and `m` is their momentum, 0 at the
    start:

        m <- momentum m + g;    d = m, or g + momentum m (nesterov)
        x <- P (x - rate d);    m <- P m

    Args:
      schedule: a doubly stochastic schedule.
      rate: the learning rate: a number, or a function of the number of updates so far.
      momentum: the factor of `m` in a step.
      nesterov: whether to use Nesterov's momentum.
      axis_name: as in `gx.sgp`.

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
    require_doubly_stochastic(schedule, "mixed_momentum")

    def combine(x: Any, g: Any, node: Node) -> tuple[Any, dict[str, Any]]:
        """Computes `m = momentum m + g`, steps, and mixes the model and `m` in one message."""
        m = add_scaled(g, momentum, node.kept["momentum"])
        d = add_scaled(g, momentum, m) if nesterov else m
        x, m = node.mix((add_scaled(x, -node.rate, d), m))
        return x, {"momentum": m}

    return gossip(
        schedule,
        combine,
        keeps={"momentum": "average"},
        axis_name=axis_name,
        takes_gradients=True,
        models=2,
        rate=rate,
    )
