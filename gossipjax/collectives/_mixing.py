"""A round of a schedule applied to a pytree: push-sum on anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gossipjax.collectives._buffers import (
    Layout,
    accumulation_dtype,
    cast_like,
    dtype_of,
    require_floats,
    upcast,
)
from gossipjax.collectives._exchange import (
    StepLike,
    as_varying,
    axis_size,
    buffer_mean,
    deliver_leaves,
    fold_in_node,
    permute_slot,
    require_step,
    sharded_over_local,
    split,
    travels_by_leaf,
)
from gossipjax.collectives._rounds import NodeRound, choose_round
from gossipjax.sharding import Specs, inner_axes, on_shards
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import (
    Wire,
    WireLike,
    as_key,
    decode,
    encode,
    fold_in,
    is_narrower,
    make_wire,
    require_key,
)

REALS = (jnp.floating, jnp.integer)


def require_schedule(schedule: Any, name: str) -> None:
    """Raises `ValueError` if `schedule` is not a `Schedule`; `name` is who needs it."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"the schedule of {name} must be a gx.Schedule, got {type(schedule).__name__}: "
            "gx.topology builds them; from_matrices takes mixing matrices and from_graph a "
            "networkx graph."
        )


def require_doubly_stochastic(schedule: Any, name: str) -> None:
    """Raises `ValueError` unless `schedule` is a `Schedule` whose rows all sum to 1 as well."""
    require_schedule(schedule, name)
    for number, round_ in enumerate(schedule.rounds):
        if not round_.is_doubly_stochastic:
            sums = np.bincount(round_.receivers, round_.weights, round_.size)
            row = int(abs(sums - 1).argmax())
            raise ValueError(
                f"the schedule of {name} must be doubly stochastic, got a round {number} whose row "
                f"{row} sums to {sums[row]:.6g}. Use sgp, whose push-sum weights correct for that, "
                "or from_graph(..., weights='metropolis')."
            )


def mix(
    tree: Any,
    weight: ArrayLike | None,
    schedule: Schedule,
    step: StepLike,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    key: Any = None,
    specs: Any = None,
) -> tuple[Any, Any]:
    """One push-sum exchange of any pytree: `x <- P x`, `w <- P w`.

    Numerators go in and numerators come out: the estimate of the average is `x / w`. With a
    doubly stochastic schedule and weights of 1, `x` is that estimate. A de-biased statistic `s` is
    mixed by `x, w = mix(w * s, w, ...)` and read as `x / w`.

    The sender keeps the rounding error of its messages (in full precision, if it keeps 1/128 or
    more), so rounded weights or a narrow wire lose no mass: sums over the nodes change by the
    float32 rounding of additions only.

    Args:
      tree: this node's values: floating-point leaves `[...]`. They are mixed in float32 at least.
      weight: this node's push-sum weight, a scalar, 1 at the start, float32 at least; or None to
        mix without a weight.
      schedule: a schedule for as many nodes as the axis has.
      step: picks the round: an integer (fixed when traced), or a traced scalar which is the same
        on every node (a `lax.switch` over the distinct rounds).
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node, over which `tree` is replicated: each
        of its L devices then exchanges 1/L of the message.
      wire: the form of messages: a narrower type, such as `jnp.bfloat16`, or a dense codec, such as
        `gx.wire.int8()`. Sums are taken in float32 at least, and the weight travels in full
        precision. Rounding limits how near the nodes get to one another, to a consensus distance of
        about 1.3e-3 of the model's norm in bfloat16. What is not finite arrives as such.
        Derivatives are those of the exchange in full precision.
      key: a PRNG key for codecs that round at random, another one for every exchange; nodes fold
        their index in.
      specs: on a mesh with axes inside the nodes, how `tree` is sharded over them, as in
        `gx.sharded`; without them every device has it whole, as statistics, and sends all of it.

    Returns:
      `(tree, weight)` after the exchange; the leaves keep their types.

    Raises:
      ValueError: if the axis is missing or of another size than the schedule's, a leaf is not
        floating-point, the weight is not a scalar, the step is not an integer, `wire` is no
        type or codec, or sparse, or it needs a key and has none.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      arXiv:1811.10792, algorithm 1.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(4)
    >>> def average(x):
    ...     weight = jnp.ones(())
    ...     for step in range(schedule.period):
    ...         x, weight = gx.mix(x, weight, schedule, step)
    ...     return x / weight
    >>> jax.vmap(average, axis_name="nodes")(jnp.array([0.0, 1.0, 2.0, 5.0])).tolist()
    [2.0, 2.0, 2.0, 2.0]
    """
    require_schedule(schedule, "mix")
    route = make_wire(axis_name, local_axis_name, wire)
    if route.codec is not None and route.codec.needs_key:
        key = as_key(require_key(route.codec, key))
    require_floats(tree, "tree")
    if weight is not None:
        dtype = dtype_of(weight)
        if dtype is None or not any(map(functools.partial(jnp.issubdtype, dtype), REALS)):
            raise ValueError(
                f"a push-sum weight must be a real number, 1 at the start, got {weight!r}."
            )
        if jnp.shape(weight) != ():
            raise ValueError(
                f"a push-sum weight must be a scalar, got shape {list(jnp.shape(weight))}: inside "
                "a per-node function every node has one."
            )
        weight = jnp.asarray(weight, accumulation_dtype(getattr(weight, "dtype", np.float32)))

    # The weight travels inside the buffer of its type: one message per peer and round.
    def mix_at(step: StepLike, x: Any, key: Any) -> Any:
        return at_round(lambda round_, x: _mix(x, round_, route, key), schedule, step, axis_name, x)

    x = (weight, upcast(tree))
    if specs is None:
        weight, mixed = mix_at(step, x, key)
    else:
        weight, mixed = _mix_parts(mix_at, step, x, key, specs, axis_name)
    return cast_like(mixed, tree), weight


def _mix_parts(
    mix_at: Callable[..., Any], step: StepLike, x: Any, key: Any, specs: Any, axis_name: str
) -> Any:
    """`mix_at(step, x, key)` by each device of a node, on its own parts."""
    layout = Specs.make(specs, axis_name)
    layout.require(x[1], inner_axes(axis_name))
    args = (step, x, key)
    in_specs = layout.of(args, x[1])
    return on_shards(mix_at, layout, axis_name, in_specs, in_specs[1])(*args)


def _mix(x: Any, round_: NodeRound, wire: Wire, key: jax.Array | None) -> Any:
    if round_.is_identity:
        return x
    layout = Layout(x)
    if round_.is_uniform and not any(is_narrower(wire.codec, dtype) for dtype in layout.dtypes):
        if travels_by_leaf(wire):
            return jax.tree.map(lambda leaf: buffer_mean(leaf, wire), x)
        return layout.unpack([buffer_mean(buffer, wire) for buffer in layout.pack(x)])
    # Leaves keep their shapes up to the message: with flat ones XLA for GPUs fuses less.
    kept, sent = split(x, round_)
    return jax.tree.map(jnp.add, kept, _deliver(sent, round_, wire, key))


def deliver(
    sent: Any, schedule: Schedule, step: StepLike, wire: Wire, key: jax.Array | None
) -> Any:
    """What arrives of the trees that all nodes have `split` off in the round of `step`."""

    def at(round_: NodeRound, sent: Any) -> Any:
        return _deliver(sent, round_, wire, key)

    return at_round(at, schedule, step, wire.axis_name, sent)


def _deliver(sent: Any, round_: NodeRound, wire: Wire, key: jax.Array | None) -> Any:
    layout = Layout(sent)
    return layout.unravel(
        [
            deliver_leaves(leaves, round_, wire, fold_in(key, i))
            for i, leaves in enumerate(layout.ravel(sent))
        ]
    )


def at_round(
    apply: Callable[[NodeRound, Any], Any],
    schedule: Schedule,
    step: StepLike,
    axis_name: str,
    x: Any,
) -> Any:
    """Returns `apply(round, x)` with the round of `step`.

    An integer fixes the round when traced; a traced step chooses it, on a mesh by a `lax.switch`
    over the distinct rounds.

    Raises:
      ValueError: if the axis is of another size than the schedule's, or `step` is neither an
        integer nor a traced one that is the same on every node.
    """
    nodes = axis_size(axis_name)
    if nodes != schedule.size:
        raise ValueError(
            f"the axis {axis_name!r} must have as many nodes as the schedule, {schedule.size}, got "
            f"{nodes}: build the schedule for {nodes} nodes, or map over {schedule.size}."
        )
    x = jax.tree.map(lambda leaf: as_varying(leaf, axis_name), x)
    require_step(step, axis_name)
    if isinstance(step, int | np.integer):
        return apply(NodeRound((schedule.round_at(int(step)),), 0, axis_name), x)
    return choose_round(apply, schedule, round_index(schedule, step), axis_name, x)


def cond(
    predicate: bool | np.bool_ | jax.Array,
    if_true: Callable[..., Any],
    if_false: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`lax.cond`, decided when traced where `predicate` is known then."""
    if isinstance(predicate, bool | np.bool_):
        return (if_true if predicate else if_false)(*operands)
    return jax.lax.cond(predicate, if_true, if_false, *operands)


def round_index(schedule: Schedule, step: StepLike) -> int | jax.Array:
    """`schedule.index_at(step)`, of a traced step, too."""
    if isinstance(step, int | np.integer):
        return schedule.index_at(int(step))
    starts = np.array([s.start for s in schedule.segments], np.int32)
    lengths = np.array([len(s.cycle) for s in schedule.segments], np.int32)
    numbers = jnp.asarray(np.concatenate([s.cycle for s in schedule.segments]), jnp.int32)
    step = jnp.asarray(step, jnp.int32)
    if len(starts) == 1:
        return numbers[step % lengths[0]]
    segment = jnp.sum(step >= jnp.asarray(starts[1:]))
    first = jnp.asarray(np.cumsum(lengths, dtype=np.int32) - lengths)[segment]
    within = (step - jnp.asarray(starts)[segment]) % jnp.asarray(lengths)[segment]
    return numbers[first + within]


def mix_encoded(tree: Any, round_: NodeRound, wire: Wire, key: jax.Array | None) -> tuple[Any, Any]:
    """Sends `q = C(x)` to the neighbours; returns `q` and `sum_j P_ij q_j`, own part included.

    One message per type and slot, whatever the codec, and however many leaves.

    Args:
      tree: `x`, float32 at least.
      round_: the weights `P`.
      wire: with the codec `C`; None sends `x`.
      key: for codecs that need one; nodes fold their index in.
    """
    layout = Layout(tree)
    key = fold_in_node(key, wire)
    results = [
        sharded_over_local(partial(_mix_encoded, round_=round_, key=fold_in(key, i)), buffer, wire)
        for i, buffer in enumerate(layout.pack(tree))
    ]
    sent, mixed = zip(*results, strict=True) if results else ((), ())
    return layout.unpack(sent), layout.unpack(mixed)


def _mix_encoded(
    part: jax.Array, wire: Wire, round_: NodeRound, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    words = encode([part], wire.codec, key)
    sent = decode(words, wire.codec, [part])[0]
    mixed = [round_.select(round_.self_weights, part.dtype) * sent]
    for slot in round_.slots:
        message = permute_slot(words, round_, slot, wire.axis_name)
        received = decode(message, wire.codec, [part])[0]
        by_receiver = np.take_along_axis(slot.weights, slot.senders, axis=1)
        weighted = round_.select(by_receiver, part.dtype) * received
        if (by_receiver == 0).any():  # a filler, whose 0 * NaN would spread along edges of no graph
            is_edge = round_.select(by_receiver > 0, bool)
            weighted = jnp.where(is_edge, weighted, jnp.zeros_like(weighted))
        mixed.append(weighted)
    return sent, reduce(jnp.add, mixed)
