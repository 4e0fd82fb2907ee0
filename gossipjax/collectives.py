"""Applies a round to a pytree over a named axis: the only module that calls lax collectives.

Everything here runs inside `shard_map`, `pmap` or `vmap(axis_name=...)`, on one node's values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.schedule import Round, Schedule

Step = int | np.integer | jax.Array
LEAST_REMAINDER = 1 / 128  # below it, a subtraction in float32 would cancel too many digits


def wide(dtype: Any) -> np.dtype:
    """The type in which values of `dtype` are mixed: float32 at least."""
    return np.promote_types(dtype, np.float32)


def require_floats(tree: Any, what: str) -> None:
    """Raises `ValueError` if a leaf of `tree` is not of a real floating-point type."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {dtype}; gossip averages floating-point "
                "leaves of 16 bits or more. Keep others out of the tree, or mask them."
            )


def require_schedule(schedule: Any, name: str) -> None:
    """Raises `ValueError` if something else than a `Schedule` was given."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{name} needs a gx.Schedule; given {type(schedule).__name__}. gx.topology builds "
            "them; from_matrices takes mixing matrices and from_graph a networkx graph."
        )


def axis_size(axis_name: str) -> int:
    """The number of nodes on `axis_name`; `ValueError` where no such axis is bound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"no axis named {axis_name!r} here: run it inside shard_map, pmap or vmap with "
            f"axis_name={axis_name!r} (gx.spmd does), or pass the name of your axis as axis_name."
        ) from None


def _varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes over which `x` varies by its type; none unless under shard_map's check_vma=True."""
    return jax.typeof(x).manual_axis_type.varying


def varies(x: jax.Array, axis_name: str) -> bool:
    """False if `x` is known, by its type, to be the same all over the axis."""
    types_known = axis_name in _varying_axes(jax.lax.axis_index(axis_name))
    return not types_known or axis_name in _varying_axes(x)


def _as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """`x` with the type of a value that differs between nodes, so that all rounds agree in type."""
    return x if varies(x, axis_name) else jax.lax.pcast(x, axis_name, to="varying")


def _pack(leaves: Sequence[jax.Array]) -> tuple[list[jax.Array], Callable]:
    """One flat buffer per dtype (float32 at least), and the function that takes them apart."""
    dtypes = [wide(leaf.dtype) for leaf in leaves]
    groups = {dtype: [i for i, d in enumerate(dtypes) if d == dtype] for dtype in set(dtypes)}
    order = sorted(groups, key=str)
    buffers = [
        jnp.concatenate([leaves[i].astype(dtype).ravel() for i in groups[dtype]]) for dtype in order
    ]

    def unpack(buffers: Sequence[jax.Array]) -> list[jax.Array]:
        out = list(leaves)
        for dtype, buffer in zip(order, buffers, strict=True):
            ends = np.cumsum([leaves[i].size for i in groups[dtype]])[:-1]
            for i, piece in zip(groups[dtype], jnp.split(buffer, ends), strict=True):
                out[i] = piece.reshape(leaves[i].shape)
        return out

    return buffers, unpack


def _over_buffers(apply: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies `apply` to the leaves of `tree`, packed into buffers; they come back wide."""
    leaves, structure = jax.tree.flatten(tree)
    buffers, unpack = _pack([jnp.asarray(leaf) for leaf in leaves])
    return jax.tree.unflatten(structure, unpack([apply(buffer) for buffer in buffers]))


def _in_shares(
    apply: Callable[[jax.Array], jax.Array], buffer: jax.Array, local_axis_name: str
) -> jax.Array:
    """Each of a node's L devices applies `apply` to 1/L of the buffer; all gather the whole.

    So a server sends its model once per peer, and not L times.
    """
    devices = axis_size(local_axis_name)
    types_known = local_axis_name in _varying_axes(jax.lax.axis_index(local_axis_name))
    if types_known and local_axis_name in _varying_axes(buffer):
        raise ValueError(
            f"the model varies over {local_axis_name!r}, where its replicas must be equal: put "
            f"gx.allreduce({local_axis_name!r}) first in the chain."
        )
    length = -(-buffer.size // devices)
    padded = jnp.pad(buffer, (0, devices * length - buffer.size))
    start = jax.lax.axis_index(local_axis_name) * length
    share = apply(jax.lax.dynamic_slice_in_dim(padded, start, length))
    to = "invarying" if types_known else "varying"
    whole = jax.lax.all_gather(share, local_axis_name, tiled=True, to=to)
    return whole[: buffer.size]


def mean(tree: Any, axis_name: str) -> Any:
    """The node average of every leaf, summed in float32 at least and returned in its own type."""
    axis_size(axis_name)
    averaged = _over_buffers(lambda buffer: jax.lax.pmean(buffer, axis_name), tree)
    return _cast_like(averaged, tree)


def bounded_mean(tree: Any, axis_name: str) -> Any:
    """The node average, held between the smallest and the largest value: exact where all agree."""
    axis_size(axis_name)

    def average(buffer: jax.Array) -> jax.Array:
        low, high = jax.lax.pmin(buffer, axis_name), jax.lax.pmax(buffer, axis_name)
        return jnp.clip(jax.lax.pmean(buffer, axis_name), low, high)

    return _over_buffers(average, tree)


def total(tree: Any, axis_name: str) -> Any:
    """The sum of every leaf over the nodes, float32 at least."""
    axis_size(axis_name)
    return _over_buffers(lambda buffer: jax.lax.psum(buffer, axis_name), tree)


def default_step(step: Step | None, count: jax.Array, axis_name: str) -> Step:
    """`step`; where it is None the count, made one value for all nodes by its maximum."""
    axis_size(axis_name)
    return jax.lax.pmax(count, axis_name) if step is None else step


def mix(
    tree: Any,
    weight: Any,
    schedule: Schedule,
    step: Step,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> tuple[Any, Any]:
    """One push-sum exchange of any pytree: `x <- P x`, `w <- P w` (SGP-19, algorithm 1).

    Numerators go in and numerators come out: the estimate of the average is `x / w`. With a
    doubly stochastic schedule and weights of 1, `x` itself is that estimate. A statistic `s` that
    is held de-biased is mixed by `x, w = mix(w * s, w, ...)` and read as `x / w`.

    What node `j` keeps is `x_j` less what it sends (where that is 1/128 of it or more), so that no
    mass is lost by the rounding of weights.

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

    Returns:
      `(tree, weight)` mixed; the leaves have the types they had.

    Raises:
      ValueError: if the axis is missing or of another size than the schedule's, a leaf is not
        floating-point, or the weight is no scalar or the step no whole number.

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
    nodes = axis_size(axis_name)
    if nodes != schedule.size:
        raise ValueError(
            f"the axis {axis_name!r} has {nodes} nodes, the schedule {schedule.size}: build the "
            f"schedule for {nodes} nodes, or map over {schedule.size}."
        )
    require_floats(tree, "the tree to mix")
    if weight is not None:
        if jnp.shape(weight) != ():
            raise ValueError(f"a push-sum weight is a scalar; given shape {jnp.shape(weight)}.")
        kept = jnp.result_type(weight, jnp.float32)
        weight = jnp.asarray(weight, kept)
    # The weight travels inside the buffer of its type: one message per peer and round.
    mixed, weight = _over_buffers(
        lambda buffer: _apply_at(buffer, schedule, step, axis_name, local_axis_name), (tree, weight)
    )
    return _cast_like(mixed, tree), weight


def _cast_like(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)


def _apply_at(
    buffer: jax.Array, schedule: Schedule, step: Step, axis_name: str, local_axis_name: str | None
) -> jax.Array:
    if isinstance(step, int | np.integer):
        return _apply(buffer, schedule.round_at(int(step)), axis_name, local_axis_name)
    is_array = isinstance(step, jax.Array | np.ndarray) and step.shape == ()
    if not is_array or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ValueError(f"step is a whole number or a traced integer scalar; given {step!r}.")
    if axis_name in _varying_axes(step):
        raise ValueError(
            f"step varies over {axis_name!r} and would have nodes in different rounds: give all "
            "nodes the same (shared_argnums of gx.spmd)."
        )
    branches = [lambda x, r=r: _apply(x, r, axis_name, local_axis_name) for r in schedule.rounds]
    if len(branches) == 1:
        return branches[0](buffer)
    return jax.lax.switch(_traced_index(schedule, step), branches, buffer)


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


def _apply(x: jax.Array, mixing: Round, axis_name: str, local_axis_name: str | None) -> jax.Array:
    """One round on one buffer."""
    x = _as_varying(x, axis_name)
    if mixing.is_identity:
        return x
    if local_axis_name is None:
        return _exchange(x, mixing, axis_name)
    return _in_shares(lambda part: _exchange(part, mixing, axis_name), x, local_axis_name)


def _exchange(x: jax.Array, mixing: Round, axis_name: str) -> jax.Array:
    """What is kept, plus what arrives through each slot."""
    if mixing.is_uniform:
        return _as_varying(jax.lax.pmean(x, axis_name), axis_name)
    own = np.diag(mixing.matrix)
    sent, arrived = [], []
    for receivers, weights in mixing.slots:
        message = _per_node(weights, x.dtype, axis_name) * x
        if (weights == 0).any():
            # A filler must carry a true zero: 0 * NaN would spread a NaN along edges of no graph.
            message = jnp.where(_per_node(weights > 0, bool, axis_name), message, 0)
        sent.append(message)
        arrived.append(jax.lax.ppermute(message, axis_name, list(enumerate(receivers.tolist()))))
    if own.min() < LEAST_REMAINDER:
        kept = _per_node(own, x.dtype, axis_name) * x
    else:  # the rest, to the bit, so that rounded weights lose no mass
        kept = functools.reduce(jnp.subtract, sent, x)
    return sum(arrived, start=kept)


def _per_node(values: np.ndarray, dtype: Any, axis_name: str) -> Any:
    """This node's entry of `values` `[N]`; a constant where all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]
