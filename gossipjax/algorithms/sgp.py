"""Stochastic Gradient Push (SGP-19, algorithm 1)."""

from __future__ import annotations

from functools import partial
from typing import Any

import optax

from gossipjax.buffers import require_wire_dtype
from gossipjax.collectives import Step
from gossipjax.mixing import mix, require_schedule
from gossipjax.schedule import Schedule
from gossipjax.state import GossipState, add, debias, gossip_transform, init_state


def sgp(
    schedule: Schedule,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic Gradient Push: local updates, mixed by push-sum. Goes *last* in a chain.

    With `u` the update that arrives from the chain before it, one update of every node is

        y = w z + u;    x, w <- P y, P w;    z <- x / w

    The parameters that the user holds are the de-biased `z`, `[...]` per node, so gradients, weight
    decay and clipping all see `z`; momentum is local. Note that `u` is added to the numerator: at
    weight `w` the model moves by `u / w`. The state is a `GossipState` with the weight `w`, a
    scalar, and, if any parameter is narrower than float32, all numerators in float32: these are
    then what counts, and parameters changed from outside are not seen.

    With SGD with Nesterov momentum before it this is algorithm 2 of SGP-18, with Adam Adam-SGP.

    Args:
      schedule: any column-stochastic schedule, directed and irregular ones included.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of a node's own devices, if it has several (`allreduce` over it
        goes first in the chain): each then exchanges its share of the message.
      wire_dtype: a narrower type for messages, such as `jnp.bfloat16`: half the bytes. What is
        rounded off stays at the sender, so no mass is lost; weights travel in full, sums are wide.

    The transform's `update` takes `step=`, which picks the round and nothing else: a whole number
    (one compiled program per round, see `Schedule.canonical_step`), a traced scalar that is the
    same on every node (`shared_argnums` of `gx.spmd`), or nothing: then the state's count, made
    common by a small all-reduce.

    Raises:
      ValueError: for a `wire_dtype` that is no floating-point type of 16 bits or more; when traced,
        if the axis is missing or of another size than the schedule's, `params` are not
        passed to `update`, or a leaf is not floating-point.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(4)
    >>> tx = optax.chain(optax.sgd(0.1, momentum=0.9, nesterov=True), gx.sgp(schedule))
    >>> def train_step(z, state, target, step):
    ...     grads = z - target
    ...     updates, state = tx.update(grads, state, z, step=step)
    ...     return optax.apply_updates(z, updates), state
    >>> train_step = gx.spmd(train_step, nodes=4, static_argnums=3)
    >>> z, target = jnp.zeros(4), jnp.array([0.0, 1.0, 2.0, 5.0])
    >>> state = gx.spmd(tx.init, nodes=4)(z)
    >>> for step in range(300):
    ...     z, state = train_step(z, state, target, schedule.canonical_step(step))
    >>> bool(abs(z.mean() - 2.0) < 1e-3)
    True
    """
    require_schedule(schedule, "sgp")
    wire_dtype = require_wire_dtype(wire_dtype)

    def combine(x: Any, updates: Any, state: GossipState, step: Step) -> tuple[Any, GossipState]:
        y = add(x, updates)
        x, w = mix(y, state.weight, schedule, step, axis_name, local_axis_name, wire_dtype)
        return debias(x, w), state._replace(numerator=x, weight=w)

    return gossip_transform("sgp", axis_name, partial(init_state, push_sum=True), combine)
