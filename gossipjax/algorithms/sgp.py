"""Stochastic Gradient Push."""

from __future__ import annotations

from typing import get_args

import optax

from gossipjax.collectives import require_schedule
from gossipjax.exchanges.plan import ExchangePlan, Order
from gossipjax.exchanges.transform import mix_updated, require_choice
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike


def sgp(
    schedule: Schedule,
    *,
    order: Order = "adapt-then-combine",
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    damped: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic Gradient Push: each node updates its model, then push-sum mixes. Put it *last*.

    If `u` is the update from the chain, one step of every node is

        y = w z + u;    x, w <- P y, P w;    z <- x / w        order="adapt-then-combine"
        x, w <- P (w z), P w;    x <- x + u;    z <- x / w     order="combine-while-adapting"

    Adapt-then-combine is algorithm 1; use it if the exchange is cheap. Combine-while-adapting is
    the authors' overlap SGP: the exchange hides behind the gradients, and no message is stale.

    Your parameters are the de-biased `z`, `[...]` per node, and gradients are taken at `z`. Nodes
    do not mix momentum. The state is a `GossipState`, which contains the weight `w`, a scalar.

    Args:
      schedule: any column-stochastic schedule; it may be directed and irregular.
      order: `"adapt-then-combine"` or `"combine-while-adapting"`, as above.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of a node, if a node has several. Put
        `gx.allreduce` over this axis first in the chain, so that these devices average their
        gradients. Each device then exchanges its share of the node's message.
      wire: the form of messages: a narrower type, such as `jnp.bfloat16`, or a dense codec, such as
        `gx.wire.int8()`. No mass is lost, but nodes agree only up to the rounding: with bfloat16
        the consensus distance ends at about 1.5e-3 of the model's norm.
      damped: if true, an update moves the model by at most `u`, even if the weight is near 0, as it
        may be with `random_peer`: `v = min(1, w) (e + u)` takes the place of `u`, and the state
        keeps the rest, `e <- e + u - v`, as `extra["held_back"]`.

    The transform's `update` takes `step=`, which picks the round and nothing else. The step is an
    integer (one compiled program per round, see `gx.canonical_step`) or a traced scalar that is the
    same on every node (`shared_argnums` of `gx.spmd`). Without a step the transform uses the count
    in its state, and a small all-reduce makes this count the same on all nodes.

    Raises:
      ValueError: if an argument is not as above (for sparse codecs use `gx.choco`). When traced: if
        the axis is missing or has another size than the schedule, `params` are not passed to
        `update`, a leaf is not floating-point, or the state has another schedule or wire.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      arXiv:1811.10792, algorithm 1; algorithm 2 of its ICLR 2019 submission, arXiv:1811.10792v1.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(4)))
    >>> def train_step(z, state, target, step):
    ...     updates, state = tx.update(z - target, state, z, step=step)
    ...     return optax.apply_updates(z, updates), state
    >>> nodes = gx.Nodes(4)
    >>> train_step = nodes.spmd(train_step, static_argnums=3)
    >>> z, state = nodes.init(tx, jnp.zeros(()))
    >>> target = jnp.array([0.0, 1.0, 2.0, 5.0])
    >>> for step in range(300):
    ...     z, state = train_step(z, state, target, gx.canonical_step(state, step))
    >>> bool(abs(z.mean() - 2.0) < 1e-2)
    True
    """
    require_schedule(schedule, "sgp")
    require_choice(order, "order of sgp", get_args(Order))
    damped = damped and not schedule.is_doubly_stochastic
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(
        schedule, wire=route, order=order, moves_by_zeros=damped, mixes_any_update=True
    )
    return mix_updated("sgp", plan, push_sum=True, damped=damped)
