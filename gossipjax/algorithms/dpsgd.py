"""Decentralized parallel SGD (DPSGD-17, algorithm 1) and, on random rings, RAND-PSGD (RAND-20)."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import optax

from gossipjax.buffers import require_wire_dtype
from gossipjax.collectives import Step
from gossipjax.mixing import mix, require_doubly_stochastic
from gossipjax.schedule import Schedule
from gossipjax.state import GossipState, add, gossip_transform, init_state

Order = Literal["combine-while-adapting", "adapt-then-combine"]


def dpsgd(
    schedule: Schedule,
    order: Order = "combine-while-adapting",
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD: average with the neighbours and take a local step. Goes *last* in a chain.

    With `x` the parameters, `[...]` per node, and `u` the update from the chain before it:

        x <- P x + u       order="combine-while-adapting" (DPSGD-17, algorithm 1): exchange and
                           gradient may run side by side
        x <- P (x + u)     order="adapt-then-combine" (its remark): what SGP does

    The state is a `GossipState` with a count and, if any parameter is narrower than float32, a
    float32 copy of all, which is then what counts: parameters changed from outside are not seen.

    Args:
      schedule: a doubly stochastic schedule. The paper's matrices are symmetric too, which the
        mathematics does not need.
      order: which of the two.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of a node's own devices, if it has several.
      wire_dtype: a narrower type for messages, as in `sgp`.

    The transform's `update` takes `step=`, as that of `sgp`.

    Raises:
      ValueError: for an unknown order; for a schedule that is not doubly stochastic (x would drift
        from the average: use `sgp`); when traced, as `sgp`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.dpsgd(gx.topology.ring(2))
    >>> def update(x, u):
    ...     return x + tx.update(u, tx.init(x), x, step=0)[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    require_doubly_stochastic(schedule, "dpsgd")
    wire_dtype = require_wire_dtype(wire_dtype)
    if order not in get_args(Order):
        raise ValueError(
            f"order is one of {', '.join(map(repr, get_args(Order)))}; given {order!r}."
        )

    def combine(x: Any, updates: Any, state: GossipState, step: Step) -> tuple[Any, GossipState]:
        if order == "adapt-then-combine":
            x = add(x, updates)
        x, _ = mix(x, None, schedule, step, axis_name, local_axis_name, wire_dtype)
        if order == "combine-while-adapting":
            x = add(x, updates)
        return x, state._replace(numerator=x)

    return gossip_transform("dpsgd", axis_name, partial(init_state, push_sum=False), combine)
