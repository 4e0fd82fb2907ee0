"""A round of a schedule applied to a pytree: push-sum on anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.buffers import Layout, cast_like, require_floats, require_wire_dtype, widened
from gossipjax.collectives import (
    Step,
    Wire,
    as_varying,
    average,
    axis_size,
    deliver_leaves,
    split,
    varying_axes,
)
from gossipjax.schedule import Round, Schedule


def require_schedule(schedule: Any, name: str) -> None:
    """Raises `ValueError` if something else than a `Schedule` was given."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{name} needs a gx.Schedule; given {type(schedule).__name__}. gx.topology builds "
            "them; from_matrices takes mixing matrices and from_graph a networkx graph."
        )


def require_doubly_stochastic(schedule: Any, name: str) -> None:
    """Raises `ValueError` unless `schedule` is one whose every row sums to 1, too."""
    require_schedule(schedule, name)
    for number, mixing in enumerate(schedule.rounds):
        if not mixing.is_doubly_stochastic:
            sums = mixing.matrix.sum(axis=1)
            row = int(abs(sums - 1).argmax())
            raise ValueError(
                f"{name} needs a doubly stochastic schedule: in round {number}, row {row} sums to "
                f"{sums[row]:.6g}. Use sgp, whose push-sum weights correct for that, or "
                "from_graph(..., weights='metropolis')."
            )


def mix(
    tree: Any,
    weight: Any,
    schedule: Schedule,
    step: Step,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> tuple[Any, Any]:
    """One push-sum exchange of any pytree: `x <- P x`, `w <- P w` (SGP-19, algorithm 1).

    Numerators go in and numerators come out: the estimate of the average is `x / w`. With a
    doubly stochastic schedule and weights of 1, `x` itself is that estimate. A statistic `s` that
    is held de-biased is mixed by `x, w = mix(w * s, w, ...)` and read as `x / w`.

    What rounding takes off a message stays at its sender (who keeps 1/128 or more), so no mass is
    lost by rounded weights or by a narrow wire.

    Args:
      tree: this node's values: floating-point leaves `[...]`. They are mixed in float32 at least.
      weight: this node's push-sum weight, a scalar, 1 at the start, float32 at least; or None to
        mix without one.
      schedule: a schedule for as many nodes as the axis has.
      step: picks the round: a whole number (fixed when traced), or a traced scalar which is the
        same on every node (a `lax.switch` over the distinct rounds).
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of a node's own devices, over which `tree` is replicated: each of
        its L devices then exchanges 1/L of the message.
      wire_dtype: a narrower type for messages, such as `jnp.bfloat16`; sums stay wide, and the
        weight travels in full.

    Returns:
      `(tree, weight)` mixed; the leaves have the types they had.

    Raises:
      ValueError: if the axis is missing or of another size than the schedule's, a leaf is not
        floating-point, the weight is no scalar, the step no whole number, or `wire_dtype` no
        floating-point type of 16 bits or more.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(4)
    >>> def average(x):
    ...     weight = jnp.ones(())
    ...     for step in range(schedule.period):
    ...         x, weight = gx.mix(x, weight, schedule, step, "nodes")
    ...     return x / weight
    >>> jax.vmap(average, axis_name="nodes")(jnp.array([0.0, 1.0, 2.0, 5.0])).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    require_schedule(schedule, "mix")
    wire = Wire(axis_name, local_axis_name, require_wire_dtype(wire_dtype))
    require_floats(tree, "the tree to mix")
    if weight is not None:
        if jnp.shape(weight) != ():
            raise ValueError(f"a push-sum weight is a scalar; given shape {jnp.shape(weight)}.")
        weight = jnp.asarray(weight, jnp.result_type(weight, jnp.float32))
    # The weight travels inside the buffer of its type: one message per peer and round.
    weight, mixed = at_round(
        lambda mixing, x: _mix(x, mixing, wire), schedule, step, axis_name, (weight, widened(tree))
    )
    return cast_like(mixed, tree), weight


def _mix(x: Any, mixing: Round, wire: Wire) -> Any:
    if mixing.is_identity:
        return x
    layout = Layout(x)
    if mixing.is_uniform and wire.dtype is None:  # all nodes get the same, to the bit
        return layout.unpack([average(buffer, wire) for buffer in layout.pack(x)])
    kept, sent = split(x, mixing, wire.axis_name)
    flat = [deliver_leaves(leaves, mixing, wire) for leaves in layout.flat(sent)]
    arrived = layout.unflat(flat)
    return jax.tree.map(jnp.add, kept, arrived)


def at_round(
    apply: Callable[[Round, Any], Any], schedule: Schedule, step: Step, axis_name: str, x: Any
) -> Any:
    """`apply(round, x)` with the round of `step`: fixed where it is a whole number, else chosen
    by a `lax.switch` over the distinct rounds.

    Raises:
      ValueError: if the axis is of another size than the schedule's, or `step` is neither a whole
        number nor a traced one that is the same on every node.
    """
    nodes = axis_size(axis_name)
    if nodes != schedule.size:
        raise ValueError(
            f"the axis {axis_name!r} has {nodes} nodes, the schedule {schedule.size}: build the "
            f"schedule for {nodes} nodes, or map over {schedule.size}."
        )
    x = jax.tree.map(lambda leaf: as_varying(leaf, axis_name), x)
    require_step(step, axis_name)
    if isinstance(step, int | np.integer):
        return apply(schedule.round_at(int(step)), x)
    branches = [lambda x, r=r: apply(r, x) for r in schedule.rounds]
    if len(branches) == 1:
        return branches[0](x)
    return jax.lax.switch(_traced_index(schedule, step), branches, x)


def require_step(step: Any, axis_name: str) -> None:
    """Raises `ValueError` unless `step` is a whole number that is the same on every node."""
    if isinstance(step, int | np.integer):
        return
    is_array = isinstance(step, jax.Array | np.ndarray) and step.shape == ()
    if not is_array or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(f"step is a whole number or a traced integer scalar; given {step!r}.")
    if axis_name in varying_axes(jnp.asarray(step)):
        raise ValueError(
            f"step varies over {axis_name!r} and would have nodes in different rounds: give all "
            "nodes the same (shared_argnums of gx.spmd)."
        )


def _traced_index(schedule: Schedule, step: jax.Array) -> jax.Array:
    """`schedule.index_at` for a traced step."""
    starts = np.array([p.start for p in schedule.pieces])
    lengths = np.array([len(p.cycle) for p in schedule.pieces])
    numbers = np.concatenate([p.cycle for p in schedule.pieces])
    if len(starts) == 1:
        return jnp.asarray(numbers)[step % lengths[0]]
    piece = jnp.sum(step >= jnp.asarray(starts[1:]))
    first = jnp.asarray(np.cumsum(lengths) - lengths)[piece]
    within = (step - jnp.asarray(starts)[piece]) % jnp.asarray(lengths)[piece]
    return jnp.asarray(numbers)[first + within]
