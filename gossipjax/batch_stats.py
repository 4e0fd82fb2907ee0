"""Statistics that are no parameters, such as BatchNorm's running means: local, mixed or averaged.

Each node's layers see its own data only. Three policies are in use:

- local: every node keeps its own, and evaluates its own model with them; nothing is called.
- mix: they are mixed with the parameters at every step, `mix_statistics`.
- average: local in training, averaged before an evaluation, `average_statistics`.

The average model has no statistics of its own: it wants `average_statistics` whatever the policy.
"""

from __future__ import annotations

from typing import Any

import jax

from gossipjax import collectives
from gossipjax.buffers import cast_like, require_floats, widened
from gossipjax.collectives import Step
from gossipjax.mixing import mix
from gossipjax.schedule import Schedule
from gossipjax.state import debias, find_state, push_sum_weight


def mix_statistics(
    statistics: Any,
    opt_state: Any,
    schedule: Schedule,
    step: Step,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> Any:
    """Statistics mixed as the parameters of SGP are: by the same round, with the same weights.

        s_i <- sum_j P_ij w_j s_j / sum_j P_ij w_j

    Args:
      statistics: this node's, a tree of floating-point leaves `[...]`.
      opt_state: the optimizer's state before the step, for `w`; 1 in algorithms without a weight.
      schedule, step, axis_name, local_axis_name: those of the transform. For `osgp` give
        `schedule.every(overlap)`; the statistics do not wait.

    Raises (when traced):
      ValueError: as `mix`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> def after(s):
    ...     return gx.mix_statistics(s, (), gx.topology.ring(2), step=0)
    >>> jax.vmap(after, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    require_floats(statistics, "statistics")
    weight = push_sum_weight(find_state(opt_state))
    scaled = jax.tree.map(lambda s: weight.astype(s.dtype) * s, widened(statistics))
    mixed, weight = mix(scaled, weight, schedule, step, axis_name, local_axis_name)
    return cast_like(debias(mixed, weight), statistics)


def average_statistics(statistics: Any, axis_name: str = "nodes") -> Any:
    """The mean of every leaf over the nodes, on every node; leaves keep their types.

    Of variances it is the mean within nodes: differences between the nodes' means are not in it.

    Raises (when traced):
      ValueError: if the axis is missing or a leaf is not floating-point.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> jax.vmap(gx.average_statistics, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [2.0, 2.0]
    """
    require_floats(statistics, "statistics")
    return collectives.mean(statistics, axis_name)
