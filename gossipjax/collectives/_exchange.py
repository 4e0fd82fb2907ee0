"""Exchanges over a named axis: the only module that calls lax collectives on parameters.

Everything here runs inside `shard_map`, `pmap` or `vmap(axis_name=...)`, on one node's values. A
round has two halves: `split` divides a node's values into what it keeps and what it sends, and
`deliver_leaves` exchanges the sent parts. Under overlap a step lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.collectives._buffers import (
    Layout,
    cut_into_rows,
    pack_u16_pairs,
    pad_to_rows,
    unpack_u16_pairs,
)
from gossipjax.collectives._rounds import NodeRound, NodeSlot, is_simulated
from gossipjax.wire import (
    Codec,
    Wire,
    concatenate_in_place,
    decode,
    decode_each,
    encode,
    encode_each,
    encode_pieces,
    fold_in,
    is_cpu_over_processes,
    is_narrower,
    leaf_keys,
    split_by_size,
)

StepLike = int | np.integer | jax.Array


def axis_size(axis_name: str) -> int:
    """The number of nodes on `axis_name`; raises `ValueError` where no such axis is bound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mapped axis, got {axis_name!r}, and no axis has this name here: "
            f"run it inside shard_map, pmap or vmap with axis_name={axis_name!r} (gx.spmd does), "
            "or pass the name of your axis as axis_name."
        ) from None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes over which the type of `x` says that it varies; only check_vma=True has such."""
    return jax.typeof(x).manual_axis_type.varying


def varies(x: jax.Array, axis_name: str) -> bool:
    """False if the type of `x` says that it is the same all over the axis."""
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    return not types_known or axis_name in varying_axes(x)


def as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """`x` with the type of a value that differs between nodes, so that all rounds agree in type."""
    return x if varies(x, axis_name) else jax.lax.pcast(x, axis_name, to="varying")


def vary(tree: Any, axis_name: str) -> Any:
    """The leaves with the types of values that differ between nodes."""
    return jax.tree.map(lambda leaf: as_varying(jnp.asarray(leaf), axis_name), tree)


def vary_where_mapped(tree: Any, axis_name: str) -> Any:
    """`vary`, or `tree` where there is no such axis: types get it where the state enters one."""
    try:
        axis_size(axis_name)
    except ValueError:
        return tree
    return vary(tree, axis_name)


def require_step(step: Any, axis_name: str) -> None:
    """Raises `ValueError` unless `step` is an integer that is the same on every node."""
    if isinstance(step, int | np.integer) and not isinstance(step, bool):
        return
    is_scalar = isinstance(step, jax.Array | np.ndarray) and step.shape == ()
    if not is_scalar or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
        raise ValueError(
            f"step must be an integer or a traced integer scalar, got {step!r}: give the number "
            "of the update, from 0."
        )
    if axis_name in varying_axes(jnp.asarray(step)):
        raise ValueError(
            f"step must be the same on all nodes, got one that varies over {axis_name!r}, which "
            "would have nodes in different rounds: list it in shared_argnums of gx.spmd."
        )


def select_for_node(values: np.ndarray, dtype: DTypeLike, axis_name: str) -> Any:
    """This node's entry of `values` `[N, ...]`; a constant where all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]


MAX_UNROLLED = 32  # rows; for more, a program of one operation per row compiles too long


def encode_rows(
    arrays: Sequence[jax.Array], rows: int, codec: Codec, key: jax.Array | None
) -> jax.Array:
    """Returns the words `[rows, length]` of flat arrays of more than `rows` values."""
    if rows > MAX_UNROLLED:
        buffer = pad_to_rows(concatenate_in_place(arrays), rows)
        numbers = jnp.arange(rows)
        return jax.vmap(lambda row, i: encode([row], codec, fold_in(key, i)))(buffer, numbers)
    # One pass over memory each. Rows of one rounded buffer would be copied once more.
    pieces = cut_into_rows(arrays, rows)
    return jnp.stack([encode_pieces(row, codec, fold_in(key, i)) for i, row in enumerate(pieces)])


def decode_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the rows `[rows, length]`, each like `row`."""
    return jax.vmap(lambda message: decode(message, codec, [row])[0])(words)


def sum_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the sum `[length]` of the rows in the type of `row`."""
    if len(words) > MAX_UNROLLED:
        return decode_rows(words, codec, row).sum(axis=0)
    # Not `sum(axis=0)`: XLA on CPU takes 75 ms for that of 10 MB of bfloat16, and 1 ms for this.
    return reduce(jnp.add, [decode(message, codec, [row])[0] for message in words])


LANES = 128  # XLA on TPUs gathers rows of no multiple by an all-reduce, of the whole buffer
MIN_ALIGNED = 64 * LANES  # values of a row, from which on the padding does not count
MAX_BUCKET = 2**22  # bytes of values in a message of several leaves
MIN_SELF_WEIGHT = 1 / 128  # below it, a subtraction in float32 would cancel too many digits


def straight_through(rounded: Callable[..., Any], linear: Callable[..., Any]) -> Any:
    """Returns `rounded` with the derivative of `linear`, of which it is a rounded form.

    Words of integers have no derivative, so that without it the received part would have none.
    `rounded` may take more, such as a key, of which the result has no derivative.
    """
    apply = jax.custom_jvp(rounded)
    apply.defjvp(lambda primals, tangents: (apply(*primals), linear(tangents[0])))
    return apply


def gather_words(words: jax.Array, axis_name: str, **options: Any) -> jax.Array:
    """The words of all nodes, `[N, length]`, by their type the same on all of them."""
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    to = "invarying" if types_known else "varying"
    return jax.lax.all_gather(words, axis_name, to=to, **options)


def exchange_rows(rows: jax.Array, axis_name: str) -> jax.Array:
    """Sends row `i` to node `i`; returns the rows `[N, length]` for this node, by their sender."""
    nodes = len(rows)
    if groups_are_faster() and nodes <= MAX_UNROLLED:
        node = jax.lax.axis_index(axis_name)
        received = [jax.lax.dynamic_index_in_dim(rows, node, keepdims=False)]
        for hop in range(1, nodes):
            row = jax.lax.dynamic_index_in_dim(rows, (node + hop) % nodes, keepdims=False)
            receivers = (np.arange(nodes) + hop) % nodes
            received.append(permute(row, receivers, axis_name, receivers >= 0))
        return jnp.stack(received)[(node - jnp.arange(nodes)) % nodes]
    # The condition depends on the node and is always true: under vmap, JAX (0.10) makes another
    # shape of an array that is the same on all nodes. XLA removes it.
    is_node = jax.lax.axis_index(axis_name) >= 0
    return jax.lax.all_to_all(jnp.where(is_node, rows, rows), axis_name, 0, 0)


def default_step(step: StepLike | None, count: jax.Array, axis_name: str) -> StepLike:
    """`step`, or, where it is None, the maximum of `count` over the nodes.

    Raises:
      ValueError: if the axis is missing, or `step` is not an integer that is the same on every
        node.
    """
    axis_size(axis_name)
    if step is None:
        return jax.lax.pmax(count, axis_name)
    require_step(step, axis_name)
    return step


def split(x: Any, round_: NodeRound) -> tuple[Any, Any]:
    """The part `P_ii x` of `x` that this node keeps, and the rest `x - P_ii x`, which it sends.

    Both are rounded once, to 2^-24 of their value in float32. They add up to `x` without error for
    `P_ii >= 1/2`, where the subtraction is exact, and else to 2^-24 of `x`.
    """
    if round_.is_identity:
        return x, jax.tree.map(jnp.zeros_like, x)
    self_weights = round_.self_weights
    if (self_weights == 0.5).all():  # both halves are one array
        half = jax.tree.map(lambda leaf: leaf / 2, x)
        return half, half

    def rest(leaf: jax.Array, kept: jax.Array) -> jax.Array:
        if self_weights.max() < 1:
            return leaf - kept
        sends = round_.select(self_weights < 1, bool)
        return jnp.where(sends, leaf - kept, jnp.zeros_like(leaf))

    types = {leaf.dtype for leaf in jax.tree.leaves(x)}
    share = {dtype: round_.select(self_weights, dtype) for dtype in types}
    kept = jax.tree.map(lambda leaf: share[leaf.dtype] * leaf, x)
    return kept, jax.tree.map(rest, x, kept)


def deliver_buffer(
    sent: jax.Array, round_: NodeRound, wire: Wire, key: jax.Array | None = None
) -> jax.Array:
    """Returns what arrives of the buffers that all nodes `split` off in this round.

    Sender `j` divides its buffer by `P_ij / (1 - P_jj)` over its receivers. The sender keeps the
    rounding error of every message, so mass is conserved to float32 rounding. Exceptions, in full
    precision only: rounds with a self weight below 1/128, and exact averages. A round of no
    exchange sends nothing. The derivative is that of full precision on every wire. `key` is for
    codecs that need one; nodes fold their index in.
    """
    if round_.is_identity or not sent.size:
        return sent
    key = fold_in_node(key, wire)

    def exchange(part: jax.Array, wire: Wire) -> jax.Array:
        deliver_in_full = partial(_deliver_in_full, round_=round_, wire=wire)
        if not is_narrower(wire.codec, part.dtype):
            return deliver_in_full(part)
        deliver_rounded = partial(_deliver_rounded, round_=round_, wire=wire)
        return straight_through(deliver_rounded, deliver_in_full)(part, key)

    return sharded_over_local(exchange, sent, wire)


def fold_in_node(key: jax.Array | None, wire: Wire) -> jax.Array | None:
    """A key of this node, and of this device where a node has several."""
    if key is None:
        return None
    for axis_name in filter(None, (wire.axis_name, wire.local_axis_name)):
        key = fold_in(key, jax.lax.axis_index(axis_name))
    return key


def _deliver_in_full(sent: jax.Array, round_: NodeRound, wire: Wire) -> jax.Array:
    if not round_.is_uniform:
        return _exchange_slots([sent], None, round_, wire._replace(codec=None))[0]
    total = as_varying(jax.lax.psum(sent, wire.axis_name), wire.axis_name)
    return (total - sent) / (round_.size - 1)


def _deliver_rounded(
    sent: jax.Array, key: jax.Array | None, round_: NodeRound, wire: Wire
) -> jax.Array:
    """Delivers as the codec rounds; the first value, a weight if there is one, in full."""
    is_first = jax.lax.iota(jnp.int32, sent.size) == 0
    # Without the weight, so that no block of small values gets its scale.
    others = jnp.where(is_first, jnp.zeros_like(sent), sent)
    if _is_many_to_many(round_):
        if sent.size <= round_.size:
            return _deliver_in_full(sent, round_, wire)
        first = _deliver_in_full(sent[:1], round_, wire)
        rest = _deliver_uniform(others, key, wire)
    else:
        keys = leaf_keys(key, 2)
        first, rest = _exchange_slots([sent[:1], others], keys, round_, wire)
    return jnp.where(is_first, first, rest)


def _is_many_to_many(round_: NodeRound) -> bool:
    """Whether sums of parts of the buffers are less to send than a message for every peer."""
    return round_.is_uniform and round_.size > 2


def _deliver_uniform(sent: jax.Array, key: jax.Array | None, wire: Wire) -> jax.Array:
    """Delivers `(sum_j sent_j - sent_i) / (N - 1)` by the traffic of one all-reduce.

    Every node sums 1/N of the buffer and replies to each. Rounding errors of what is sent stay at
    the sender; that of a reply goes into the reply to the next node, and that of the last one stays
    at the node that replies: mass is conserved, and no node is off by more than two roundings.
    """
    assert wire.codec is not None
    nodes = axis_size(wire.axis_name)
    row = jax.ShapeDtypeStruct((-(-sent.size // nodes),), sent.dtype)
    words = encode_rows([sent], nodes, wire.codec, fold_in(key, 0))
    kept = sent - decode_rows(words, wire.codec, row).ravel()[: sent.size]
    received = exchange_rows(words, wire.axis_name)
    total = sum_rows(received, wire.codec, row)

    def reply(error: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        words, number = inputs
        exact = (total - decode(words, wire.codec, [total])[0]) / (nodes - 1) + error
        words = encode([exact], wire.codec, fold_in(key, number))
        return exact - decode(words, wire.codec, [exact])[0], words

    no_error = jnp.zeros_like(total)
    for name in sorted(varying_axes(total)):
        no_error = as_varying(no_error, name)
    error, replies = jax.lax.scan(reply, no_error, (received, 1 + jnp.arange(nodes)))
    arrived = decode_rows(exchange_rows(replies, wire.axis_name), wire.codec, row)
    is_own_row = jnp.arange(nodes)[:, None] == jax.lax.axis_index(wire.axis_name)
    arrived += jnp.where(is_own_row, error[None], jnp.zeros_like(arrived))
    return arrived.ravel()[: sent.size] + kept


def deliver_leaves(
    sent: list[jax.Array], round_: NodeRound, wire: Wire, key: jax.Array | None = None
) -> list[jax.Array]:
    """Delivers flat leaves of one type, as `deliver_buffer` delivers a buffer.

    Their words are made leaf by leaf, and so are the same wherever the nodes are. On a mesh they
    travel as one message per slot; nodes that are simulated exchange every leaf by itself, with
    which XLA fuses what is around it. Averages of all nodes, and what L devices of a node exchange,
    are parts of one buffer, in which a leaf has no words of its own.
    """
    sizes = [leaf.size for leaf in sent]
    if round_.is_identity or not sum(sizes):
        return sent
    is_narrow = is_narrower(wire.codec, sent[0].dtype)
    is_average = _is_many_to_many(round_) if is_narrow else round_.is_uniform
    if is_average or wire.local_axis_name is not None:
        if travels_by_leaf(wire) and not is_narrow:
            return [deliver_buffer(leaf, round_, wire) for leaf in sent]
        return split_by_size(deliver_buffer(concatenate_in_place(sent), round_, wire, key), sizes)
    keys = leaf_keys(fold_in_node(key, wire), len(sent)) if is_narrow else None
    exchange = partial(_exchange_slots, round_=round_, wire=wire)
    if is_narrow:
        full_wire = wire._replace(codec=None)
        in_full = partial(_exchange_slots, keys=None, round_=round_, wire=full_wire)
        exchange = straight_through(exchange, in_full)

    def exchange_parts(
        buckets: list[list[int]], sent: list[jax.Array], keys: jax.Array | None
    ) -> list[jax.Array]:
        arrived: dict[int, jax.Array] = {}
        for bucket in buckets:
            parts = [sent[i] for i in bucket]
            results = exchange(parts, None if keys is None else keys[np.array(bucket)])
            arrived.update(zip(bucket, results, strict=True))
        return [arrived[i] for i in range(len(sent))]

    in_one = partial(exchange_parts, [list(range(len(sent)))])
    buckets = cut_into_buckets(sent)
    # Gloo takes one message after another, and all nodes wait for each: two of 20 MB to neighbours
    # on a ring at 200 Mbit/s take 1.1 times the wire's limit, and parts of 8 MB 1.6 times.
    if len(buckets) == 1 or travels_by_leaf(wire) or is_cpu_over_processes():
        return in_one(sent, keys)
    # XLA for GPUs hides 95 % of one message behind the computation, and less than half of several.
    in_buckets = partial(exchange_parts, buckets)
    return jax.lax.platform_dependent(sent, keys, cpu=in_buckets, default=in_one)


def cut_into_buckets(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """The leaves of each message: large ones alone, the others in turn up to `MAX_BUCKET` bytes.

    A message that is one leaf needs no copy, and is gone when it has arrived. Where there are
    several messages, single values travel apart: a push-sum weight needs no gradient, and is there
    when the first leaf comes to be divided by it.
    """
    sizes = [leaf.nbytes for leaf in leaves]
    if sum(sizes) <= MAX_BUCKET:
        return [list(range(len(leaves)))]
    single = [i for i, leaf in enumerate(leaves) if leaf.size == 1]
    buckets = [single] if single else []
    room = 0
    for i, size in enumerate(sizes):
        if i in single:
            continue
        if size >= MAX_BUCKET:
            buckets.insert(0, [i])
            continue
        if size > room:
            buckets.append([])
            room = MAX_BUCKET
        buckets[-1].append(i)
        room -= size
    return buckets


def fold_in_slot(keys: jax.Array | None, number: Any) -> jax.Array | None:
    """The keys of the leaves for one slot of a round."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def travels_by_leaf(wire: Wire) -> bool:
    """Whether leaves are exchanged one by one: where nodes are simulated, nothing travels.

    One message for all leaves would be two copies of the model there, with which nothing fuses.
    """
    return is_simulated(wire.axis_name) and wire.local_axis_name is None


def _exchange_slots(
    sent: list[jax.Array],
    keys: jax.Array | None,
    round_: NodeRound,
    wire: Wire,
) -> list[jax.Array]:
    """What arrives of flat leaves, in one message per slot."""
    dtype = sent[0].dtype
    is_narrow = is_narrower(wire.codec, dtype)
    weights = np.stack([slot.weights for slot in round_.slots])  # [K, R, N], as all of these
    shares = np.divide(
        weights, 1 - round_.self_weights, out=np.zeros_like(weights), where=weights > 0
    )
    senders = np.stack([slot.senders for slot in round_.slots])
    is_reached = np.take_along_axis(shares > 0, senders, axis=2)

    def exchange_slot(remainder: list[jax.Array], number: Any, slot: NodeSlot | None) -> Any:
        """The remainder without what is sent in a slot, and what arrives in it."""
        is_known = slot is not None  # else its number is data
        share = shares[number] if is_known else shares
        reached = is_reached[number] if is_known else is_reached
        select = round_.select if is_known else partial(round_.select, slot=number)
        factor = select(share, dtype)
        messages = [factor * part for part in sent]
        if (share == 0).any():
            # A filler must carry a true zero: 0 * NaN would spread a NaN along edges of no graph.
            sends = select(share > 0, bool)
            messages = [jnp.where(sends, m, jnp.zeros_like(m)) for m in messages]
        words = encode_each(messages, wire.codec, fold_in_slot(keys, number))
        if slot is None:
            received = gather_rows(words, select(senders, np.int32), wire.axis_name)
        else:
            received = _permute_leaves(words, round_, slot, wire)
        rounded = decode_each(words, wire.codec, messages)
        remainder = jax.tree.map(jnp.subtract, remainder, rounded)
        arrived = decode_each(received, wire.codec, messages)
        if is_narrow and not reached.all():
            # Words of zeros, which came with no message, need not be values of zero.
            gets = select(reached, bool)
            arrived = [jnp.where(gets, part, jnp.zeros_like(part)) for part in arrived]
        return remainder, arrived

    remainder = sent
    arrivals = []
    if len(weights) > MAX_UNROLLED and travels_by_leaf(wire):

        def add_slot(carry: Any, number: jax.Array) -> tuple[Any, None]:
            remainder, total = carry
            remainder, arrived = exchange_slot(remainder, number, None)
            return (remainder, jax.tree.map(jnp.add, total, arrived)), None

        start = sent, [jnp.zeros_like(part) for part in sent]
        (remainder, total), _ = jax.lax.scan(add_slot, start, jnp.arange(len(weights)))
        arrivals.append(total)
    else:
        for number, slot in enumerate(round_.slots):
            remainder, arrived = exchange_slot(remainder, number, slot)
            arrivals.append(arrived)
    drops = np.array(
        [
            kept.min() < MIN_SELF_WEIGHT or _divides_exactly(given.astype(dtype))
            for kept, given in zip(round_.self_weights, shares.swapaxes(0, 1), strict=True)
        ]
    )
    if is_narrow or not drops.any():
        arrivals.insert(0, remainder)
    elif not drops.all():
        dropped = round_.select_round(drops)
        arrivals.insert(0, [jnp.where(dropped, jnp.zeros_like(p), p) for p in remainder])
    return [reduce(jnp.add, parts) for parts in zip(*arrivals, strict=True)]


def _permute_leaves(
    words: list[jax.Array],
    round_: NodeRound,
    slot: NodeSlot,
    wire: Wire,
) -> list[jax.Array]:
    """The words of the sender in a slot, leaf by leaf."""
    if not round_.is_single:
        return gather_rows(words, round_.select(slot.senders, np.int32), wire.axis_name)
    if travels_by_leaf(wire):
        return [permute_slot(part, round_, slot, wire.axis_name) for part in words]
    message = permute_slot(concatenate_in_place(words), round_, slot, wire.axis_name)
    return split_by_size(message, [part.size for part in words])


def exchange_along(tree: Any, receivers: np.ndarray, is_message: np.ndarray, wire: Wire) -> Any:
    """Returns the tree of this node's sender in a permutation, in full precision; else zeros.

    `receivers` `[N]` is a full permutation, by sender, as is `is_message`: False for a filler.
    """
    is_received = is_message[np.argsort(receivers)]

    def exchange(part: jax.Array, wire: Wire) -> jax.Array:
        received = permute(part, receivers, wire.axis_name, is_message)
        arrives = select_for_node(is_received, bool, wire.axis_name)
        return jnp.where(arrives, received, jnp.zeros_like(received))

    if travels_by_leaf(wire):
        return jax.tree.map(lambda leaf: exchange(leaf, wire), tree)
    layout = Layout(tree)
    return layout.unpack([sharded_over_local(exchange, b, wire) for b in layout.pack(tree)])


def exchange_in_pairs(tree: Any, partners: np.ndarray, wire: Wire) -> Any:
    """Returns the tree of the node that this one is paired with, in full precision.

    Nodes `i` and `partners[i]` exchange theirs; a node that is its own partner gets zeros.
    """
    return exchange_along(tree, partners, partners != np.arange(len(partners)), wire)


def permute_slot(words: jax.Array, round_: NodeRound, slot: NodeSlot, axis_name: str) -> jax.Array:
    """Sends each node's words to its receiver in a slot; returns the words of its sender."""
    if round_.is_single:
        return permute(words, slot.receivers[0], axis_name, slot.weights[0] > 0)
    (received,) = gather_rows([words], round_.select(slot.senders, np.int32), axis_name)
    return received


def gather_rows(words: list[jax.Array], sender: jax.Array, axis_name: str) -> list[jax.Array]:
    """The words that a node has whose number is data, for nodes that are simulated.

    Under `vmap` the rows of all nodes are the array as it is: no copy.
    """
    index = jnp.reshape(sender, (1,))

    def gather(part: jax.Array) -> jax.Array:
        rows = jax.lax.all_gather(part, axis_name)
        dimensions = jax.lax.GatherDimensionNumbers(tuple(range(part.ndim)), (0,), (0,))
        sizes = (1, *part.shape)
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(rows, index, dimensions, sizes, mode=mode)

    return list(map(gather, words))


def permute(
    words: jax.Array, receivers: np.ndarray, axis_name: str, is_message: np.ndarray
) -> jax.Array:
    """Sends each node's words to its receiver; returns the words of its sender.

    Where a permutation may be partial, only messages travel, and nodes that get none get zeros:
    XLA on GPUs exchanges within the nodes that a permutation joins, and is slow within many.
    Elsewhere these nodes get what is not a message, too, and the caller discards it.

    Where a sum over groups of two replaces the permutation, integers wrap around and arrive as they
    were sent; float32 arrives rounded to 2^-24 of the sum.

    Args:
      words: of this node.
      receivers: a full permutation `[N]`, by sender.
      axis_name: of the nodes.
      is_message: bool `[N]`, by sender; False for a filler and for a node that is its own receiver.
    """
    nodes = np.arange(len(receivers))
    in_pairs = (receivers[receivers] == nodes).all() and (receivers != nodes).all()
    if in_pairs and groups_are_faster():
        pairs = [[int(i), int(j)] for i, j in enumerate(receivers) if i < j]
        try:
            packed = pack_u16_pairs(words)
            total = jax.lax.psum(packed, axis_name, axis_index_groups=pairs)
            return unpack_u16_pairs(total - packed, words)
        except NotImplementedError:  # under vmap, and where types tell what varies
            pass
    is_kept = is_message | is_simulated(axis_name)
    edges = np.stack([nodes, receivers], axis=1)[is_kept]
    return jax.lax.ppermute(words, axis_name, edges.tolist())


def groups_are_faster() -> bool:
    """Whether a sum over groups of two beats a permutation between pairs of nodes.

    Gloo sends both directions of a pair over one connection, and a permutation runs one after the
    other: 1.65 s instead of 0.85 s for 20 MB at 200 Mbit/s. A sum uses both at once. An all-to-all
    has such pairs, too: 0.45 s instead of 0.35 s for 10 MB among 4 hosts.
    """
    return is_cpu_over_processes()


def _divides_exactly(shares: np.ndarray) -> bool:
    """Whether shares `[K, N]` are halves, quarters, ... that add up to the whole."""
    mantissas, _ = np.frexp(shares)
    totals = shares.sum(axis=0)
    return bool(np.isin(mantissas, (0, 0.5)).all() and np.isin(totals, (0, 1)).all())


def buffer_mean(buffer: jax.Array, wire: Wire) -> jax.Array:
    """The node average of a flat buffer in full precision."""

    def pmean(part: jax.Array, wire: Wire) -> jax.Array:
        return as_varying(jax.lax.pmean(part, wire.axis_name), wire.axis_name)

    return sharded_over_local(pmean, buffer, wire)


def sharded_over_local(apply: Callable[..., Any], buffer: jax.Array, wire: Wire) -> Any:
    """Each of a node's L devices applies `apply` to 1/L of the buffer; all gather the whole.

    `apply(part, wire=wire)` returns one array like the part, or several. A server then sends its
    model once per peer, and not L times.
    """
    local = wire.local_axis_name
    if local is None:
        return apply(buffer, wire=wire)
    devices = axis_size(local)
    types_known = local in varying_axes(jax.lax.axis_index(local))
    if types_known and local in varying_axes(buffer):
        raise ValueError(
            f"the model must be the same on all devices of {local!r}, got one that varies over it: "
            f"put gx.allreduce({local!r}) first in the chain."
        )
    is_long = buffer.size >= devices * MIN_ALIGNED
    shards = pad_to_rows(buffer, devices, LANES if is_long else 1)
    shard = jax.lax.dynamic_index_in_dim(shards, jax.lax.axis_index(local), keepdims=False)
    return jax.tree.map(
        lambda part: gather_words(part, local, tiled=True)[: buffer.size], apply(shard, wire=wire)
    )
