"""Statistics that are not parameters, such as the running means of BatchNorm.

The layers of a node see only the data of this node. You can treat their statistics in three ways:

- local: every node keeps its statistics and evaluates its model with them. You call nothing.
- mix: `mix_batch_stats` mixes the statistics at every step, like the parameters.
- average: nodes keep local statistics and call `average_batch_stats` before an evaluation.

To evaluate the average model, call `average_batch_stats` in all three cases.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from gossipjax.collectives import (
    StepLike,
    as_varying,
    cast_like,
    cond,
    mix,
    node_mean,
    require_floats,
    require_step,
    upcast,
)
from gossipjax.exchanges.chain import gossip_state, step_plan
from gossipjax.exchanges.model import debias, push_sum_weight
from gossipjax.models import on_axis, require_inside
from gossipjax.nodes import Nodes


def mix_batch_stats(stats: Any, opt_state: optax.OptState, step: StepLike) -> Any:
    """Mixes statistics by the round and the weights by which SGP mixes the parameters.

        s_i <- sum_j P_ij w_j s_j / sum_j P_ij w_j

    The gossip transform in `opt_state` says which round is used at `step`. Under overlap, mixed
    statistics are used at once, without a delay. If all nodes exchange at once, as with
    `allreduce`, the statistics are averaged exactly. With `outer` around a chain without gossip,
    statistics are averaged as `outer` averages models, once in `every` steps: at the step that uses
    the average of the last fragment. If the transform has a `local_axis_name`, the devices of a
    node first average their statistics, because each device has seen its part of the batch.

    Args:
      stats: the statistics of this node, a tree of floating-point leaves `[...]`.
      opt_state: the state of the chain before the step.
      step: the step of the update, as in `tx.update`.

    Raises (when traced):
      ValueError: if `gx.mix` would raise it.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.sgp(gx.topology.ring(2))
    >>> def mix(s):
    ...     return gx.mix_batch_stats(s, tx.init(s), step=0)
    >>> jax.vmap(mix, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    require_floats(stats, "stats")
    state = gossip_state(opt_state)
    plan = step_plan(opt_state)
    wire = plan.wire
    axis_name = wire.axis_name
    require_step(step, axis_name)
    if wire.local_axis_name is not None:
        stats = node_mean(stats, wire.local_axis_name)
    is_now, number, schedule = plan.when(step)  # whether models mix at `step`, and by which round

    def mix_stats(stats: Any) -> Any:
        """Mixes statistics by that round, each with the push-sum weight of its node."""
        if schedule is None:  # all nodes average at once
            average = average_batch_stats(stats, axis_name=axis_name)
            return jax.tree.map(lambda s: as_varying(s, axis_name), average)
        weight = push_sum_weight(state)
        scaled = jax.tree.map(lambda s: weight.astype(s.dtype) * s, upcast(stats))
        axes = {"axis_name": axis_name, "local_axis_name": wire.local_axis_name}
        mixed, weight = mix(scaled, weight, schedule, number, **axes)
        return cast_like(debias(mixed, weight), stats)

    if is_now is True:  # known when traced, so nothing is chosen at run time
        return mix_stats(stats)
    stats = jax.tree.map(lambda s: as_varying(s, axis_name), stats)
    return cond(is_now, mix_stats, lambda stats: stats, stats)


def average_batch_stats(
    stats: Any, *, axis_name: str | None = None, nodes: Nodes | None = None
) -> Any:
    """Returns the mean of every leaf over the nodes, on every node; leaves keep their types.

    You can also average other trees, such as a moving average of the parameters. The mean of
    variances leaves out how much the means of the nodes differ.

    Args:
      stats: the statistics of this node, `[...]`; with `nodes=` those of all nodes, `[N, ...]`.
      axis_name: the mapped axis of the nodes; by default "nodes", or the axis of `nodes`.
      nodes: where the nodes run, if you call this function outside of a per-node function. You then
        get the average once, `[...]`, and not for each node.

    Raises:
      ValueError: if the axis is missing or a leaf is not floating-point.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> jax.vmap(gx.average_batch_stats, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    if nodes is not None:
        program = on_axis(average_batch_stats, axis_name or nodes.axis_name)
        return nodes.one(nodes.run(program, stats), require_equal=False)
    axis_name = axis_name or "nodes"
    require_floats(stats, "stats")
    require_inside(axis_name, "gx.average_batch_stats(stats")
    return node_mean(stats, axis_name)
