"""Applies a round of a schedule to a pytree, such as a model: one push-sum exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gossipjax.collectives._averages import (
    buffer_mean,
    deliver_uniform,
    mean_of_others,
    straight_through,
)
from gossipjax.collectives._buffers import (
    Layout,
    accumulation_dtype,
    cast_like,
    require_floats,
    upcast,
)
from gossipjax.collectives._exchange import (
    NodeRound,
    StepLike,
    as_varying,
    axis_size,
    exchange_slots,
    fold_in_node,
    is_simulated,
    require_step,
    sharded_over_local,
    split,
    travels_by_leaf,
)
from gossipjax.sharding import Specs, inner_axes, on_shards
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import (
    Wire,
    WireLike,
    as_key,
    concatenate_in_place,
    fold_in,
    is_narrower,
    require_key,
    split_by_size,
)


def require_schedule(schedule: Any, name: str) -> None:
    """Raises `ValueError` unless `schedule` is a `Schedule`; `name` says what it is for."""
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
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    key: Any = None,
    specs: Any = None,
) -> tuple[Any, Any]:
    """Makes one push-sum exchange of any pytree: `x <- P x`, `w <- P w`.

    You give numerators and get numerators; the estimate of the average is `x / w`. To mix a
    de-biased statistic `s`, call `x, w = mix(w * s, w, ...)`. The sender keeps the rounding error
    of its messages (in full precision if its self weight is 1/128 or more), so no mass is lost.

    Args:
      tree: this node's values: floating-point leaves `[...]`, which are mixed in float32 at least.
      weight: this node's push-sum weight, a scalar, 1 at the start, float32 at least; or None to
        mix without a weight.
      schedule: a schedule for as many nodes as the axis has.
      step: picks the round: an integer (fixed when traced), or a traced scalar that is the same on
        every node (a `lax.switch` over the distinct rounds).
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node, over which `tree` is replicated. Each of
        the L devices of a node then exchanges 1/L of the message.
      wire: the form of messages, as in `gx.sgp`. Sums are taken in float32 at least, and the weight
        travels in full precision. Values that are not finite do not arrive finite. Derivatives
        equal the derivatives of the exchange in full precision.
      key: a PRNG key for codecs that round at random; give a new key to every exchange. Nodes fold
        their index in.
      specs: on a mesh with axes inside the nodes, how `tree` is sharded over them, as in
        `gx.sharded`. Without specs, every device has the whole tree, such as statistics, and sends
        all of it.

    Returns:
      `(tree, weight)` after the exchange; the leaves keep their types.

    Raises:
      ValueError: if an argument is not as above, or the axis is missing or has another size than
        the schedule.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, algorithm 1.

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
    route = Wire.make(axis_name, local_axis_name, wire)
    if route.codec is not None and route.codec.needs_key:
        key = as_key(require_key(route.codec, key))
    require_floats(tree, "tree")
    if weight is not None:
        if jnp.shape(weight) != ():
            raise ValueError(
                f"a push-sum weight must be a scalar, got shape {list(jnp.shape(weight))}: inside "
                "a per-node function every node has one."
            )
        weight = jnp.asarray(weight, accumulation_dtype(getattr(weight, "dtype", np.float32)))

    def mix_at(step: StepLike, x: Any, key: Any) -> Any:
        """Returns the pair of weight and tree after the round of `step`."""
        return at_round(lambda round_, x: _mix(x, round_, route, key), schedule, step, axis_name, x)

    # The weight travels inside the message of its type: one message per peer and round.
    x = (weight, upcast(tree))
    if specs is not None:  # each device of a node mixes its own parts
        layout = Specs.make(specs)
        layout.require(x[1], inner_axes(axis_name))
        in_specs = layout.of((step, x, key), x[1])
        mix_at = on_shards(mix_at, layout, axis_name, in_specs, in_specs[1])
    weight, mixed = mix_at(step, x, key)
    return cast_like(mixed, tree), weight


def _mix(x: Any, round_: NodeRound, wire: Wire, key: jax.Array | None) -> Any:
    """Applies a round to the tree of this node: `P x`."""
    if round_.is_identity:
        return x
    layout = Layout(x)
    is_in_full = not any(is_narrower(wire.codec, dtype) for dtype in layout.dtypes)
    if round_.is_uniform and is_in_full:  # all nodes average, in full precision
        if travels_by_leaf(wire):
            return jax.tree.map(lambda leaf: buffer_mean(leaf, wire), x)
        return layout.unpack([buffer_mean(buffer, wire) for buffer in layout.pack(x)])
    # Leaves become flat only in the message, because XLA for GPUs fuses less with flat leaves.
    kept, sent = split(x, round_)
    return jax.tree.map(jnp.add, kept, _deliver(round_, sent, wire, key))


def deliver(
    sent: Any, schedule: Schedule, step: StepLike, wire: Wire, key: jax.Array | None
) -> Any:
    """Exchanges the trees that all nodes have `split` off in the round of `step`.

    Returns what arrives at this node, summed over its senders. A node adds it to what it kept.
    """

    return at_round(partial(_deliver, wire=wire, key=key), schedule, step, wire.axis_name, sent)


def _deliver(round_: NodeRound, sent: Any, wire: Wire, key: jax.Array | None) -> Any:
    """Runs `deliver` for one round, one type at a time: by leaves, or in one buffer.

    With any codec the derivative is the derivative of the exchange in full precision.
    """
    if round_.is_identity:
        return sent
    layout = Layout(sent)
    arrived = []
    for number, leaves in enumerate(layout.ravel(sent)):
        dtype = leaves[0].dtype
        key_of_type = fold_in(key, number)
        is_narrow = is_narrower(wire.codec, dtype)
        sizes = [leaf.size for leaf in leaves]
        if not sum(sizes):
            arrived.append(leaves)
        elif wire.local_axis_name is None and not _is_average(round_, is_narrow):
            # Leaves are encoded one by one, so that codecs give the same words wherever nodes run.
            exchange = partial(exchange_slots, round_=round_, wire=wire)
            if is_narrow:
                in_full = partial(exchange, key=None, wire=wire._replace(codec=None))
                exchange = straight_through(exchange, in_full)
            arrived.append(exchange(leaves, fold_in_node(key_of_type, wire)))
        elif travels_by_leaf(wire) and not is_narrow:  # simulated nodes average without a buffer
            arrived.append([_deliver_buffer(leaf, round_, wire, None) for leaf in leaves])
        else:
            # In an average each node sums a part of one buffer. If a node has several devices, each
            # sends a part of it.
            buffer = _deliver_buffer(concatenate_in_place(leaves), round_, wire, key_of_type)
            arrived.append(split_by_size(buffer, sizes))
    return layout.unravel(arrived)


def _is_average(round_: NodeRound, is_narrow: bool) -> bool:
    """Says whether a round is computed as an average over all nodes, and not by a message per peer.

    In such a round all nodes average. An average takes less traffic than a message per peer, unless
    two nodes exchange rounded messages.
    """
    return round_.is_uniform and (round_.size > 2 or not is_narrow)


def _deliver_buffer(
    sent: jax.Array, round_: NodeRound, wire: Wire, key: jax.Array | None
) -> jax.Array:
    """Delivers a flat buffer; each device of a node delivers its part of it."""
    if not sent.size:
        return sent
    key = fold_in_node(key, wire)

    def exchange(part: jax.Array, wire: Wire) -> jax.Array:
        """Delivers a part; if messages are rounded, with the derivative for full precision."""
        deliver_in_full = partial(_deliver_in_full, round_=round_, wire=wire)
        if not is_narrower(wire.codec, part.dtype):
            return deliver_in_full(part)
        deliver_rounded = partial(_deliver_rounded, round_=round_, wire=wire)
        return straight_through(deliver_rounded, deliver_in_full)(part, key)

    return sharded_over_local(exchange, sent, wire)


def _deliver_in_full(sent: jax.Array, round_: NodeRound, wire: Wire) -> jax.Array:
    """Delivers a flat buffer in full precision."""
    if round_.is_uniform:
        return mean_of_others(sent, wire.axis_name)
    return exchange_slots([sent], None, round_, wire._replace(codec=None))[0]


def _deliver_rounded(
    sent: jax.Array, key: jax.Array | None, round_: NodeRound, wire: Wire
) -> jax.Array:
    """Delivers a flat buffer as the codec rounds it, but its first value in full precision.

    The first value may be the push-sum weight, whose rounding would move the whole model. In an
    average all values travel in full precision if there are no more of them than nodes.
    """
    is_first = jax.lax.iota(jnp.int32, sent.size) == 0
    # A weight among small values would give their block of the codec too large a scale.
    others = jnp.where(is_first, jnp.zeros_like(sent), sent)
    if _is_average(round_, is_narrow=True):
        if sent.size <= round_.size:
            return _deliver_in_full(sent, round_, wire)
        first = _deliver_in_full(sent[:1], round_, wire)
        arrived = deliver_uniform(others, key, wire)
    else:
        first, arrived = exchange_slots([sent[:1], others], key, round_, wire)
    return jnp.where(is_first, first, arrived)


def at_round(
    apply: Callable[[NodeRound, Any], Any],
    schedule: Schedule,
    step: StepLike,
    axis_name: str,
    x: Any,
) -> Any:
    """Returns `apply(round, x)` with the round of `step`.

    An integer step fixes the round when traced. A traced step chooses the round at run time; on a
    mesh this is a `lax.switch` over the distinct rounds.
    """
    nodes = axis_size(axis_name)
    if nodes != schedule.size:
        raise ValueError(
            f"the axis {axis_name!r} must have as many nodes as the schedule, {schedule.size}, got "
            f"{nodes}: build the schedule for {nodes} nodes, or map over {schedule.size}."
        )
    # All branches of a switch must return one type. So values that are equal on all nodes, and may
    # differ after a round, are typed as values that differ before the round, too.
    x = jax.tree.map(lambda leaf: as_varying(leaf, axis_name), x)
    require_step(step, axis_name)
    if isinstance(step, int | np.integer):
        # Without a switch, inside of which XLA would run nothing else during the exchange.
        return apply(NodeRound((schedule.round_at(int(step)),), 0, axis_name), x)
    return _choose_round(apply, schedule, round_index(schedule, step), axis_name, x)


def _choose_round(
    apply: Callable[[NodeRound, Any], Any],
    schedule: Schedule,
    index: int | jax.Array,
    axis_name: str,
    x: Any,
) -> Any:
    """Returns `apply(round, x)` for round `index` of the schedule's distinct rounds."""
    rounds = schedule.rounds
    # On a mesh a permutation is part of the program, so each round needs a branch. For simulated
    # nodes it is a gather of rows whose numbers are data: one branch serves all rounds that are
    # alike, and XLA fuses the gather.
    groups = [[number] for number in range(len(rounds))]
    if is_simulated(axis_name):
        groups = group_rounds(schedule)
    group_of, index_in_group = np.zeros((2, len(rounds)), np.int32)
    for group, numbers in enumerate(groups):
        group_of[numbers] = group
        index_in_group[numbers] = np.arange(len(numbers))
    branches = []
    for numbers in groups:
        in_group = jnp.asarray(index_in_group)[index] if len(numbers) > 1 else 0
        round_ = NodeRound(tuple(rounds[number] for number in numbers), in_group, axis_name)
        branches.append(functools.partial(apply, round_))
    if len(branches) == 1:
        return branches[0](x)
    return jax.lax.switch(jnp.asarray(group_of)[index], branches, x)


def group_rounds(schedule: Schedule) -> list[list[int]]:
    """Groups the numbers of rounds that one program can run for simulated nodes.

    In a group no round exchanges, or all take the mean of all nodes, or all send messages to peers.
    """
    groups: dict[Any, list[int]] = {}
    for number, round_ in enumerate(schedule.rounds):
        groups.setdefault((round_.is_identity, round_.is_uniform), []).append(number)
    return list(groups.values())


def cond(
    predicate: bool | np.bool_ | jax.Array,
    if_true: Callable[..., Any],
    if_false: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Calls `lax.cond`, but traces only one branch if `predicate` is a known bool."""
    if isinstance(predicate, bool | np.bool_):
        return (if_true if predicate else if_false)(*operands)
    return jax.lax.cond(predicate, if_true, if_false, *operands)


def change_if(
    predicate: bool | np.bool_ | jax.Array, change: Callable[..., Any], *operands: Any
) -> Any:
    """Returns `change(*operands)` if `predicate` holds, else `operands`.

    Unlike `cond`, it takes no extra memory for operands that `change` leaves or changes in part.
    """
    if isinstance(predicate, bool | np.bool_):
        return change(*operands) if predicate else operands
    # A loop of one step, or none: XLA changes in place what a loop carries, but copies it for a
    # conditional.
    once = jnp.asarray(predicate, jnp.int32)
    return jax.lax.fori_loop(0, once, lambda _, carry: change(*carry), operands)


def round_index(schedule: Schedule, step: StepLike) -> int | jax.Array:
    """Returns the number of the round of `step`: `schedule.index_at`, also of a traced step."""
    if isinstance(step, int | np.integer):
        return schedule.index_at(int(step))
    starts = np.array([s.start for s in schedule.segments], np.int32)
    lengths = np.array([len(s.cycle) for s in schedule.segments], np.int32)
    numbers = jnp.asarray(np.concatenate([s.cycle for s in schedule.segments]), jnp.int32)
    step = jnp.asarray(step, jnp.int32)
    if len(starts) == 1:  # one cycle, from step 0
        return numbers[step % lengths[0]]
    # The cycle of the segment of `step` begins at `first` in `numbers`.
    segment = jnp.sum(step >= jnp.asarray(starts[1:]))
    first = jnp.asarray(np.cumsum(lengths, dtype=np.int32) - lengths)[segment]
    place_in_cycle = (step - jnp.asarray(starts)[segment]) % jnp.asarray(lengths)[segment]
    return numbers[first + place_in_cycle]
