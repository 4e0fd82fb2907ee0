"""The exchange of a round between neighbours, over a named axis.

These functions run inside `shard_map`, `pmap` or `vmap(axis_name=...)`, on the values of one node.
A round has two halves: `split` divides a node's values into a part to keep and a part to send, and
`exchange_slots` exchanges the parts to send. Under overlap a step lies between the two halves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.collectives._buffers import Layout, pack_u16_pairs, pad_to_rows, unpack_u16_pairs
from gossipjax.topology.schedule import Round
from gossipjax.wire import (
    Wire,
    concatenate_in_place,
    decode_each,
    encode_each,
    fold_in,
    is_cpu_over_processes,
    is_narrower,
    split_by_size,
)

StepLike = int | np.integer | jax.Array

MAX_BUCKET = 2**22  # bytes of a message of several arrays
MAX_UNROLLED = 32  # slots or rows; for more, a program of one operation for each compiles too long
# The sender keeps rounding errors if it keeps at least this share. Of a smaller share, the
# subtraction in float32 leaves mostly noise.
MIN_SELF_WEIGHT = 1 / 128
LANES = 128  # XLA on TPUs gathers rows of another length by an all-reduce of the whole buffer
MIN_ALIGNED = 64 * LANES  # values of a row from which padding to `LANES` costs almost nothing


class NodeSlot(NamedTuple):
    """One slot of `R` rounds: in each, a permutation says to whom each node sends a message."""

    receivers: np.ndarray  # `[R, N]`, by sender
    weights: np.ndarray  # float64 `[R, N]`: `P_ij` for each sender j; 0 if j sends nothing

    @property
    def senders(self) -> np.ndarray:
        """The sender of each receiver, `[R, N]`."""
        return np.argsort(self.receivers, axis=1)  # the inverse permutation

    @property
    def received_weights(self) -> np.ndarray:
        """The weights by receiver, `[R, N]`."""
        return np.take_along_axis(self.weights, self.senders, axis=1)


class NodeRound:
    """A round of a schedule, in the program of one node; which of `R` rounds it is may be traced.

    The `R` rounds are alike: none exchanges, all take the exact mean, or all send messages to
    peers. `index` is the number of the round among them: 0 for a single round, else, for simulated
    nodes, a traced integer. From a table `[R, N]` of values of each round and node, `select` takes
    the value of this round and node.
    """

    def __init__(self, rounds: tuple[Round, ...], index: int | jax.Array, axis_name: str):
        self._rounds = rounds
        self._index = index
        self.axis_name = axis_name
        self.size = rounds[0].size
        self.is_identity = rounds[0].is_identity  # the other rounds are like the first
        self.is_uniform = rounds[0].is_uniform
        self.is_single = len(rounds) == 1

    @property
    def self_weights(self) -> np.ndarray:
        """`P_ii`, the share of its values that node i keeps, `[R, N]`."""
        return _stack_slots(self._rounds)[0]

    @property
    def slots(self) -> tuple[NodeSlot, ...]:
        """The slots, each of all R rounds; rounds of fewer slots are filled up with weight 0."""
        return _stack_slots(self._rounds)[1]

    def select(self, values: np.ndarray, dtype: DTypeLike, slot: Any = None) -> Any:
        """Returns the value of this round and node in a table `[R, N]`, as a scalar.

        If you give the number of a slot, which may be traced, the table is `[K, R, N]`. If all
        values of the table are equal, the result is a constant of NumPy.
        """
        if (values == values.flat[0]).all():
            return np.asarray(values.flat[0], dtype)
        place = [self._index, jax.lax.axis_index(self.axis_name)]
        if slot is not None:
            place.insert(0, slot)
        start = [jnp.asarray(i, jnp.int32) for i in place]
        # Not `values[...]`, which takes ten times as long to trace.
        entry = jax.lax.dynamic_slice(jnp.asarray(values, dtype), start, [1] * values.ndim)
        return entry.reshape(())

    def select_round(self, values: np.ndarray) -> Any:
        """Returns the value of this round in booleans `[R]`; a constant if all are equal."""
        if (values == values[0]).all():
            return values[0]
        return jnp.asarray(values)[self._index]


@functools.lru_cache(maxsize=256)
def _stack_slots(rounds: tuple[Round, ...]) -> tuple[np.ndarray, tuple[NodeSlot, ...]]:
    """Returns the self weights `[R, N]` of R rounds, and their slots, each of all R rounds."""
    nodes = np.arange(rounds[0].size)
    filler = (nodes, np.zeros(len(nodes)))  # each node sends to itself, with weight 0
    slots = []
    for one_per_round in itertools.zip_longest(*(r.slots for r in rounds), fillvalue=filler):
        receivers, weights = zip(*one_per_round, strict=True)
        slots.append(NodeSlot(np.stack(receivers), np.stack(weights)))
    return np.stack([round_.self_weights for round_ in rounds]), tuple(slots)


def split(x: Any, round_: NodeRound) -> tuple[Any, Any]:
    """Splits `x` into `P_ii x`, which this node keeps, and the rest `x - P_ii x`, which it sends.

    Both are rounded once, to 2^-24 of their value in float32. If `P_ii >= 1/2`, the subtraction is
    exact, and they add up to `x` without error; otherwise they add up to `x` within 2^-24 of `x`.
    """
    if round_.is_identity:
        return x, jax.tree.map(jnp.zeros_like, x)
    self_weights = round_.self_weights
    if (self_weights == 0.5).all():  # kept and sent are one array: a pass over memory is saved
        half = jax.tree.map(lambda leaf: leaf / 2, x)
        return half, half

    axis_name = round_.axis_name
    leaves, structure = jax.tree.flatten(x)
    shares = {
        dtype: copy_for_leaves(round_.select(self_weights, dtype), leaves, axis_name)
        for dtype in {leaf.dtype for leaf in leaves}
    }
    kept = [shares[leaf.dtype][i] * leaf for i, leaf in enumerate(leaves)]
    # By subtraction, and not as (1 - P_ii) x, so that the two parts add up to x.
    sent = list(map(jnp.subtract, leaves, kept))
    if self_weights.max() == 1:
        # A node that keeps everything sends true zeros: inf - inf would be a NaN.
        sends = copy_for_leaves(round_.select(self_weights < 1, bool), leaves, axis_name)
        sent = list(map(_or_zeros, sends, sent))
    return jax.tree.unflatten(structure, kept), jax.tree.unflatten(structure, sent)


def exchange_slots(
    sent: list[jax.Array], key: jax.Array | None, round_: NodeRound, wire: Wire
) -> list[jax.Array]:
    """Exchanges the flat leaves that `split` took from each node, in one message per slot.

    Sender `j` gives the share `P_ij / (1 - P_jj)` of its leaves to receiver `i`. It keeps what is
    left, the rounding error, so mass is conserved to float32 rounding. In full precision it drops
    the rest in rounds with a self weight below 1/128, where it is mostly noise, and where shares
    are exact, as nothing is left. `key` is for codecs that round at random.
    """
    dtype = sent[0].dtype
    is_narrow = is_narrower(wire.codec, dtype)
    # Tables `[K, R, N]` of all K slots, R rounds and N nodes.
    weights = np.stack([slot.weights for slot in round_.slots])
    shares = np.divide(
        weights, 1 - round_.self_weights, out=np.zeros_like(weights), where=weights > 0
    )
    senders = np.stack([slot.senders for slot in round_.slots])
    is_reached = np.take_along_axis(shares > 0, senders, axis=2)

    def exchange_slot(remainder: list[jax.Array], number: Any, slot: NodeSlot | None) -> Any:
        """Sends the message of a slot; returns what is left of the leaves, and what arrives.

        In a loop over the slots `number` is traced, and `slot` is None.
        """
        is_known = slot is not None
        # Tables `[R, N]` of this slot; in a loop `[K, R, N]` of all, from which `select` takes it.
        share = shares[number] if is_known else shares
        reached = is_reached[number] if is_known else is_reached
        select = round_.select if is_known else partial(round_.select, slot=number)
        factors = copy_for_leaves(select(share, dtype), sent, wire.axis_name)
        messages = [factor * part for factor, part in zip(factors, sent, strict=True)]
        if (share == 0).any():
            # A filler, which is no edge of the graph, must carry a true zero: 0 * NaN is NaN.
            sends = copy_for_leaves(select(share > 0, bool), sent, wire.axis_name)
            messages = list(map(_or_zeros, sends, messages))
        words = encode_each(messages, wire.codec, fold_in(key, number))
        if slot is not None and round_.is_single:
            received = permute(words, slot.receivers[0], wire.axis_name, slot.weights[0] > 0)
        else:  # nodes are simulated, so the sender may be traced
            table = senders[number] if is_known else senders
            received = gather_rows(words, select(table, np.int32), wire.axis_name)
        # Subtract what the receiver decodes, so that the sender keeps what rounding takes off.
        rounded = decode_each(words, wire.codec, messages)
        remainder = jax.tree.map(jnp.subtract, remainder, rounded)
        arrived = decode_each(received, wire.codec, messages)
        if is_narrow and not reached.all():
            # A node without a message gets zero words, which need not decode to zeros.
            gets = copy_for_leaves(select(reached, bool), sent, wire.axis_name)
            arrived = list(map(_or_zeros, gets, arrived))
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
    # A node adds what is left of its leaves to what arrives. In full precision some rounds drop it:
    # shares such as 1/2 + 1/2 leave nothing, and a tiny self weight leaves mostly noise.
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


def _or_zeros(is_wanted: Any, x: jax.Array) -> jax.Array:
    """Returns `x` where `is_wanted`, else zeros, even if `x` is NaN or infinite there."""
    return jnp.where(is_wanted, x, jnp.zeros_like(x))


def _divides_exactly(shares: np.ndarray) -> bool:
    """Says whether leaves divide into shares `[K, N]` without rounding: into halves, quarters, ...

    The K shares of a node must add up to 1, or to 0 if the node sends nothing.
    """
    mantissas, _ = np.frexp(shares)  # 0.5 for a power of 2
    totals = shares.sum(axis=0)
    return bool(np.isin(mantissas, (0, 0.5)).all() and np.isin(totals, (0, 1)).all())


def permute(
    words: Sequence[jax.Array], receivers: np.ndarray, axis_name: str, is_message: np.ndarray
) -> list[jax.Array]:
    """Sends each node's arrays to its receiver; returns the arrays of its sender.

    Several arrays must be flat, and travel as one message. `receivers` `[N]` has the receiver of
    each sender, and is a full permutation. If `is_message` `[N]` is False for a sender, its
    receiver gets zeros or arbitrary values, which the caller discards.
    """
    nodes = np.arange(len(receivers))
    in_pairs = (receivers[receivers] == nodes).all() and (receivers != nodes).all()
    # Only messages travel, and nothing that is discarded: XLA on GPUs runs one collective over all
    # nodes that a permutation connects, which is slow for many. Under vmap a permutation must be
    # full, and nothing travels.
    is_edge = is_message | is_simulated(axis_name)
    edges = np.stack([nodes, receivers], axis=1)[is_edge].tolist()

    def send(message: jax.Array) -> jax.Array:
        """Sends one array as one message."""
        if in_pairs and pairs_add_up():
            pairs = [[int(i), int(j)] for i, j in enumerate(receivers) if i < j]
            try:
                # Sums of integers wrap around, so they arrive exactly; float32 may lose a last bit.
                packed = pack_u16_pairs(message)
                total = jax.lax.psum(packed, axis_name, axis_index_groups=pairs)
                return unpack_u16_pairs(total - packed, message)
            except NotImplementedError:  # under vmap, and if types say what varies
                pass
        return jax.lax.ppermute(message, axis_name, edges)

    def send_together(buckets: list[list[int]], words: list[jax.Array]) -> list[jax.Array]:
        """Sends the arrays of each bucket of numbers as one message; returns what arrives."""
        received: dict[int, jax.Array] = {}
        for bucket in buckets:
            parts = [words[i] for i in bucket]
            message = send(concatenate_in_place(parts))
            sizes = [part.size for part in parts]
            received.update(zip(bucket, split_by_size(message, sizes), strict=True))
        return [received[i] for i in range(len(words))]

    # For simulated nodes nothing travels: to make one message would only copy, and block fusions.
    if len(words) == 1 or is_simulated(axis_name):
        return list(map(send, words))
    in_one = partial(send_together, [list(range(len(words)))])
    buckets = cut_into_buckets(words)
    if len(buckets) == 1 or is_cpu_over_processes():
        return in_one(list(words))
    # Over a network every message costs a wait of all nodes. The devices of one process on CPU
    # exchange through memory: there a large array needs no copy if it is a message by itself.
    in_buckets = partial(send_together, buckets)
    return jax.lax.platform_dependent(list(words), cpu=in_buckets, default=in_one)


def pairs_add_up() -> bool:
    """Says whether two nodes exchange by summing their values; each then subtracts its own.

    Gloo, through which CPUs exchange over processes, runs the two permutes of a pair one after the
    other over one connection. A sum over the pair uses both directions at once, in half the time.
    """
    return is_cpu_over_processes()


def cut_into_buckets(words: Sequence[jax.Array]) -> list[list[int]]:
    """Groups the numbers of arrays into messages: large ones alone, small ones together.

    A message of several arrays has at most `MAX_BUCKET` bytes.
    """
    sizes = [part.nbytes for part in words]
    if sum(sizes) <= MAX_BUCKET:
        return [list(range(len(words)))]
    buckets: list[list[int]] = []
    room = -1  # bytes that fit into the last bucket; at first there is none, even for 0 bytes
    for i, size in enumerate(sizes):
        if size >= MAX_BUCKET:
            buckets.insert(0, [i])  # in front: the last bucket is the one with room
            continue
        if size > room:
            buckets.append([])
            room = MAX_BUCKET
        buckets[-1].append(i)
        room -= size
    return buckets


def gather_rows(words: Sequence[jax.Array], sender: Any, axis_name: str) -> list[jax.Array]:
    """Returns the arrays of the simulated node whose number is `sender`, which may be traced.

    Under `vmap` all nodes' rows together are the array itself, so the gather from all nodes copies
    nothing.
    """

    def gather(part: jax.Array, sender: jax.Array) -> jax.Array:
        """Returns the array that the node `sender` has as its `part`."""
        index = jnp.reshape(sender, (1,))
        rows = jax.lax.all_gather(part, axis_name)
        dimensions = jax.lax.GatherDimensionNumbers(tuple(range(part.ndim)), (0,), (0,))
        sizes = (1, *part.shape)
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.gather(rows, index, dimensions, sizes, mode=mode)

    return list(map(gather, words, copy_for_leaves(jnp.asarray(sender), list(words), axis_name)))


def exchange_along(tree: Any, receivers: np.ndarray, is_message: np.ndarray, wire: Wire) -> Any:
    """Sends a tree along a permutation in full precision; returns the tree of this node's sender.

    `receivers` `[N]` has the receiver of each sender. A node gets zeros if `is_message` `[N]` is
    False for its sender.
    """
    is_received = is_message[np.argsort(receivers)]

    def exchange(part: jax.Array, wire: Wire) -> jax.Array:
        (received,) = permute([part], receivers, wire.axis_name, is_message)
        arrives = select_for_node(is_received, bool, wire.axis_name)
        return jnp.where(arrives, received, jnp.zeros_like(received))

    if travels_by_leaf(wire):
        return jax.tree.map(lambda leaf: exchange(leaf, wire), tree)
    layout = Layout(tree)
    return layout.unpack([sharded_over_local(exchange, b, wire) for b in layout.pack(tree)])


def axis_size(axis_name: str) -> int:
    """Returns the number of nodes on `axis_name`; raises `ValueError` if no such axis is bound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mapped axis, got {axis_name!r}, and no axis has this name here: "
            f"run it inside shard_map, pmap or vmap with axis_name={axis_name!r} (gx.spmd does, "
            "nodes.run(fn, params) does it once), or pass the name of your axis as axis_name."
        ) from None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the axes over which `x` may differ; JAX records them only with check_vma=True."""
    return jax.typeof(x).manual_axis_type.varying


def varies(x: jax.Array, axis_name: str) -> bool:
    """Says whether `x` may differ over the axis; without check_vma any array may."""
    return not _types_say_what_varies(axis_name) or axis_name in varying_axes(x)


def _types_say_what_varies(axis_name: str) -> bool:
    """Says whether types record what varies over an axis; the type of its index then says so."""
    return axis_name in varying_axes(jax.lax.axis_index(axis_name))


def as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns `x`, typed as differing between nodes, so that all rounds have the same types."""
    return x if varies(x, axis_name) else jax.lax.pcast(x, axis_name, to="varying")


def vary(tree: Any, axis_name: str) -> Any:
    """Returns the leaves, typed as values that differ between nodes."""
    return jax.tree.map(lambda leaf: as_varying(jnp.asarray(leaf), axis_name), tree)


def vary_where_mapped(tree: Any, axis_name: str) -> Any:
    """Calls `vary` if the axis is bound; else, as outside of `gx.spmd`, returns `tree`."""
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


def default_step(step: StepLike | None, count: jax.Array, axis_name: str) -> StepLike:
    """Returns `step` or, if it is None, the maximum of `count` over the nodes.

    Raises:
      ValueError: if the axis is missing, or `step` is not an integer that is the same on every
        node.
    """
    axis_size(axis_name)  # raises if the axis is missing
    if step is None:
        return jax.lax.pmax(count, axis_name)
    require_step(step, axis_name)
    return step


def select_for_node(values: np.ndarray, dtype: DTypeLike, axis_name: str) -> Any:
    """Returns this node's entry of `values` `[N, ...]`; a constant if all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]


def is_simulated(axis_name: str) -> bool:
    """Says whether `vmap` maps the axis, so that nothing travels and permutations must be full.

    The current mesh tells: its manual axes are those of `shard_map` and `pmap`. Trying a collective
    and catching its error fails in a branch of a switch or a nested jit, which JAX maps later.
    """
    return axis_name not in jax.sharding.get_abstract_mesh().manual_axes


def copy_for_leaves(scalar: jax.Array | np.ndarray, tree: Any, axis_name: str) -> Any:
    """Returns copies of a scalar, one for each leaf of `tree`, which XLA cannot join again.

    A simulated node multiplies each leaf by such a scalar, so over all nodes it is a small array.
    XLA for GPUs joins the fusions that read one small array. From 40 leaves it made two fusions, of
    10 and 30 results, at a fifth of the speed of memory (H100: the time of 18.5 passes, not 4).
    """
    leaves, structure = jax.tree.flatten(tree)
    # A constant and, on a mesh, the scalar of a node are single numbers: they need no copies.
    if isinstance(scalar, np.ndarray) or not is_simulated(axis_name):
        return jax.tree.unflatten(structure, [scalar] * len(leaves))
    # Different numbers keep XLA from joining equal barriers.
    copies = [jax.lax.optimization_barrier((scalar, i))[0] for i in range(len(leaves))]
    return jax.tree.unflatten(structure, copies)


def travels_by_leaf(wire: Wire) -> bool:
    """Says whether leaves are exchanged one by one, as for simulated nodes, where nothing travels.

    For them, one message for all leaves would be two copies of the model, and would block fusions.
    """
    return is_simulated(wire.axis_name) and wire.local_axis_name is None


def fold_in_node(key: jax.Array | None, wire: Wire) -> jax.Array | None:
    """Folds the numbers of this node, and of this device if a node has several, into a key."""
    if key is None:
        return None
    for axis_name in filter(None, (wire.axis_name, wire.local_axis_name)):
        key = fold_in(key, jax.lax.axis_index(axis_name))
    return key


def gather_words(words: jax.Array, axis_name: str, **options: Any) -> jax.Array:
    """Gathers the words of all nodes, `[N, length]`; their type says that they are equal on all."""
    to = "invarying" if _types_say_what_varies(axis_name) else "varying"
    return jax.lax.all_gather(words, axis_name, to=to, **options)


def sharded_over_local(apply: Callable[..., Any], buffer: jax.Array, wire: Wire) -> Any:
    """Divides an exchange of a buffer among the L devices of a node, which all have the buffer.

    Each device calls `apply(part, wire=wire)` for 1/L of the buffer, and then the devices gather
    the results. So a node sends its model once per peer, and not L times. `apply` returns an array
    like the part, or several, which are gathered each.
    """
    local = wire.local_axis_name
    if local is None:
        return apply(buffer, wire=wire)
    devices = axis_size(local)
    if _types_say_what_varies(local) and local in varying_axes(buffer):
        raise ValueError(
            f"the model must be the same on all devices of {local!r}, got one that varies over it: "
            f"put gx.allreduce({local!r}) first in the chain."
        )
    is_long = buffer.size >= devices * MIN_ALIGNED
    shards = pad_to_rows(buffer, devices, LANES if is_long else 1)
    shard = jax.lax.dynamic_index_in_dim(shards, jax.lax.axis_index(local), keepdims=False)
    return jax.tree.map(
        lambda made: gather_words(made, local, tiled=True)[: buffer.size], apply(shard, wire=wire)
    )


def exchange_packed(
    exchange: Callable[..., Any], tree: Any, wire: Wire, key: jax.Array | None, results: int = 1
) -> list[Any]:
    """Exchanges a tree in one message per type; returns the trees that `exchange` makes of it.

    `exchange(part, wire, key)` gets a flat message, or a part of it if the node has several
    devices. It returns `results` arrays like its part, each of which becomes one tree.
    """
    layout = Layout(tree)
    key = fold_in_node(key, wire)
    by_buffer = [
        sharded_over_local(partial(exchange, key=fold_in(key, number)), buffer, wire)
        for number, buffer in enumerate(layout.pack(tree))
    ]
    by_result = zip(*by_buffer, strict=True) if by_buffer else [()] * results
    return [layout.unpack(buffers) for buffers in by_result]
