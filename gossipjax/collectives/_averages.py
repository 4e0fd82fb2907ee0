"""Averages and sums over all nodes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gossipjax.collectives._buffers import Layout, cast_like, cut_into_rows, pad_to_rows, upcast
from gossipjax.collectives._exchange import (
    MAX_UNROLLED,
    as_varying,
    axis_size,
    exchange_packed,
    gather_words,
    is_simulated,
    pairs_add_up,
    permute,
    sharded_over_local,
    vary,
    varying_axes,
)
from gossipjax.sharding import axes_of, inner_axes
from gossipjax.wire import (
    Codec,
    FloatCodec,
    Wire,
    concatenate_in_place,
    decode_array,
    draw_words,
    encode_array,
    encode_pieces,
    fold_in,
    is_narrower,
    make_seed_key,
    split_by_size,
)

MeanOver = Literal["nodes", "senders"]
MAX_RING = 64  # nodes of a ring, which is 2 (N - 1) permutes


def _map_buffers(apply: Callable[[jax.Array], jax.Array], tree: Any, axis_name: str) -> Any:
    """Applies `apply` to the packed leaves of `tree`; results have accumulation types.

    Leaves that are sharded inside a node are not packed, because packing would gather them. Leaves
    of simulated nodes are not packed either, because packing would copy them twice.
    """
    if inner_axes(axis_name) or is_simulated(axis_name):
        return jax.tree.map(apply, upcast(tree))
    layout = Layout(tree)
    return layout.unpack([apply(buffer) for buffer in layout.pack(tree)])


def node_mean(tree: Any, axis_name: str, codec: Codec | None = None) -> Any:
    """Returns the node average of every leaf, in the leaf's type, summed in float32 at least.

    Values travel as `codec` rounds them. The codec must not need a key.
    """
    axis_size(axis_name)  # raises if the axis is missing
    if inner_axes(axis_name) or (is_simulated(axis_name) and codec is None):
        means = _map_buffers(lambda leaf: jax.lax.pmean(leaf, axis_name), tree, axis_name)
        return cast_like(means, tree)
    layout = Layout(tree)
    average = partial(_mean_of_leaves, axis_name=axis_name, codec=codec)
    return cast_like(layout.unravel([average(leaves) for leaves in layout.ravel(tree)]), tree)


def _mean_of_leaves(
    leaves: list[jax.Array], axis_name: str, codec: Codec | None
) -> list[jax.Array]:
    """Returns the node averages of flat leaves of one type, which travel as one message.

    `codec` may round the values, but not for one node, or for no more values than nodes.
    """
    nodes = axis_size(axis_name)
    sizes = [leaf.size for leaf in leaves]

    def mean(leaves: list[jax.Array]) -> list[jax.Array]:
        return split_by_size(jax.lax.pmean(jnp.concatenate(leaves), axis_name), sizes)

    is_narrow = is_narrower(codec, leaves[0].dtype)
    if codec is None or not is_narrow or nodes == 1 or sum(sizes) <= nodes:
        return mean(leaves)
    narrow_mean = partial(_narrow_mean, axis_name=axis_name, codec=codec)
    return straight_through(narrow_mean, mean)(leaves)


def _narrow_mean(leaves: list[jax.Array], axis_name: str, codec: Codec) -> list[jax.Array]:
    """Returns the node averages of flat leaves, of values that travel as `codec` rounds them.

    Each of N nodes averages 1/N of the values, a row, in full precision, and all nodes gather these
    averages. So a value is rounded twice: before the sum, and before all nodes gather it.
    """
    nodes = axis_size(axis_name)
    sizes = [leaf.size for leaf in leaves]
    row = jax.ShapeDtypeStruct((-(-sum(sizes) // nodes),), leaves[0].dtype)
    received = exchange_rows(encode_rows(leaves, nodes, codec, None), axis_name)
    average = sum_rows(received, codec, row) / nodes
    words = gather_words(encode_array(average, codec), axis_name)
    return split_by_size(decode_rows(words, codec, row).ravel(), sizes)


def clipped_node_mean(tree: Any, axis_name: str) -> Any:
    """Returns the node average, clipped to the range of the nodes' values.

    If all nodes have the same value, the average is exactly this value; a rounded sum may miss it.
    """
    axis_size(axis_name)  # raises if the axis is missing
    return _map_buffers(partial(_clipped_mean, axis_name=axis_name), tree, axis_name)


def _clipped_mean(buffer: jax.Array, axis_name: str) -> jax.Array:
    low = jax.lax.pmin(buffer, axis_name)
    high = jax.lax.pmax(buffer, axis_name)
    return jnp.clip(jax.lax.pmean(buffer, axis_name), low, high)


def agree_on(tree: Any, axis_name: str) -> Any:
    """Returns `clipped_node_mean`, but exchanges no model if all nodes have the same bits already.

    To find this out, nodes compare two numbers for each type. The result is float32 at least.
    """
    axis_size(axis_name)  # raises if the axis is missing
    tree = vary(upcast(tree), axis_name)
    leaves = jax.tree.leaves(tree)
    # Leaves that are packed into one array compile sooner. But under check_vma=True the array has
    # one type, which would say of leaves that are equal on all devices of a node that they differ.
    packs = not inner_axes(axis_name) and len(set(map(varying_axes, leaves))) == 1

    def average(tree: Any) -> Any:
        mean = partial(_clipped_mean, axis_name=axis_name)
        means = _map_buffers(mean, tree, axis_name) if packs else jax.tree.map(mean, tree)
        return vary(means, axis_name)

    if not leaves or is_simulated(axis_name):  # nothing travels
        return average(tree)
    parts = Layout(tree).pack(tree) if packs else leaves
    is_same = jnp.all(node_spread(jnp.stack(list(map(_digest, parts))), axis_name) == 0)
    return jax.lax.cond(is_same, lambda tree: tree, average, tree)


def _digest(values: jax.Array) -> jax.Array:
    """Returns two numbers, `int32[2]`, that almost surely tell apart arrays of different bits."""
    words = jax.lax.bitcast_convert_type(values, jnp.uint32)
    # Factors are odd, so that a sum always changes if a single word does.
    factors = [draw_words(make_seed_key(seed), 0, words.shape) | np.uint32(1) for seed in (0, 1)]
    sums = jnp.stack([jnp.sum(words * factor) for factor in factors])
    return jax.lax.bitcast_convert_type(sums, jnp.int32)


def node_sum(tree: Any, wire: Wire) -> Any:
    """Returns the sum of every leaf over the nodes, float32 at least."""
    axis_size(wire.axis_name)  # raises if the axis is missing

    def psum(part: jax.Array, wire: Wire) -> jax.Array:
        return jax.lax.psum(part, wire.axis_name)

    if inner_axes(wire.axis_name):
        return _map_buffers(partial(psum, wire=wire), tree, wire.axis_name)
    sum_buffer = partial(sharded_over_local, psum, wire=wire)
    return _map_buffers(sum_buffer, tree, wire.axis_name)


def node_spread(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns the largest value of all nodes minus the smallest, for each entry of `x`."""
    return jax.lax.pmax(x, axis_name) - jax.lax.pmin(x, axis_name)


def mean_beside(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns the node mean of a vector `[L]`, in a form that runs during other computation.

    All nodes get the same bits. XLA for TPUs runs permutes during computation that does not need
    them, but an all-reduce blocks the computation. On TPUs the mean of up to 64 nodes is therefore
    a ring of permutes.
    """

    def all_reduce(x: jax.Array) -> jax.Array:
        return as_varying(jax.lax.pmean(x, axis_name), axis_name)

    if not 1 < axis_size(axis_name) <= MAX_RING:
        return all_reduce(x)
    ring = partial(ring_mean, axis_name=axis_name)
    return jax.lax.platform_dependent(as_varying(x, axis_name), tpu=ring, default=all_reduce)


def ring_mean(x: jax.Array, axis_name: str) -> jax.Array:
    """Returns the node mean of a vector `[L]`; nodes send 2 (N - 1) / N of it along a ring.

    Each of N parts goes around the ring twice: first to be summed, so that one node has its mean,
    and then as the mean, to all others. So all nodes get the same bits.
    """
    nodes = axis_size(axis_name)
    rows = pad_to_rows(x, nodes)
    node = jax.lax.axis_index(axis_name)
    to_next = [(sender, (sender + 1) % nodes) for sender in range(nodes)]

    def row(hop: int) -> jax.Array:
        """Returns this node's values of the part that it holds after `hop` hops."""
        return jax.lax.dynamic_index_in_dim(rows, (node - hop) % nodes, keepdims=False)

    part = row(0)
    for hop in range(1, nodes):
        part = jax.lax.ppermute(part, axis_name, to_next) + row(hop)
    part = part / nodes
    means = jnp.zeros_like(rows)
    for hop in range(nodes):
        if hop:
            part = jax.lax.ppermute(part, axis_name, to_next)
        means = jax.lax.dynamic_update_index_in_dim(means, part, (node + 1 - hop) % nodes, 0)
    return means.ravel()[: x.size]


def sum_over_parts(values: Any, specs: Any) -> Any:
    """Adds up each parameter's scalar over the devices of a node that have parts of the parameter.

    Each device has one scalar for each parameter, and `specs` say how parameters are sharded. Only
    manual axes need this, because XLA itself adds over all other axes.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes

    def add_up(value: jax.Array, spec: PartitionSpec) -> jax.Array:
        axes = tuple(axis for axis in axes_of(spec) if axis in manual)
        return jax.lax.psum(value, axes) if axes else value

    return jax.tree.map(add_up, values, specs)


def mean_of_encoded(
    tree: Any, wire: Wire, key: jax.Array | None, mean_over: MeanOver = "nodes"
) -> tuple[Any, Any]:
    """Returns the node average of trees `x` that travel encoded, and what this node left out, `e`.

    The averages and `e`, summed over the nodes, are the sum of `x`. All nodes get the same average,
    in the types of `x`, float32 at least. Sparse messages are gathered. For dense ones, every node
    averages 1/N of the values and encodes the average; what this encoding leaves out goes into the
    node's `e`. If there is one node, or no more values than nodes, the average is exact. With
    `mean_over="senders"` a sum is divided by how many nodes sent a value other than 0 for it.
    """

    def average(part: jax.Array, wire: Wire, key: jax.Array | None) -> Any:
        assert wire.codec is not None
        return _mean_of_encoded(part, wire.axis_name, wire.codec, key, mean_over)

    mean, error = exchange_packed(average, vary(tree, wire.axis_name), wire, key, results=2)
    return mean, error


def exact_average(tree: Any, wire: Wire, key: jax.Array | None, is_beside: bool = False) -> Any:
    """Returns the node average of every leaf, with the same bits on all nodes; float32 at least.

    Nodes send one message per type, and each device of a node sends its share. What a codec leaves
    out is lost. With `is_beside` the average can run during other computation; see `mean_beside`.
    """
    axis_size(wire.axis_name)  # raises if the axis is missing

    def average(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        """Averages a flat message in the way of its codec."""
        if wire.codec is None and is_beside:
            return [mean_beside(part, wire.axis_name)]
        if wire.codec is None or isinstance(wire.codec, FloatCodec):
            return [node_mean(part, wire.axis_name, wire.codec)]
        return [_mean_of_encoded(part, wire.axis_name, wire.codec, key)[0]]

    (mean,) = exchange_packed(average, tree, wire, key)
    return mean


def _mean_of_encoded(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None, mean_over: MeanOver = "nodes"
) -> tuple[jax.Array, jax.Array]:
    """Computes `mean_of_encoded` for a flat array `x`: the mean, and what was left out."""
    nodes = axis_size(axis_name)
    if nodes == 1 or x.size <= nodes:
        return node_mean(x, axis_name), jnp.zeros_like(x)
    if codec.is_sparse:
        return _mean_of_sparse(x, axis_name, codec, key, mean_over)
    return _mean_of_dense(x, axis_name, codec, key)


def _mean_of_sparse(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None, mean_over: MeanOver
) -> tuple[jax.Array, jax.Array]:
    """Computes `_mean_of_encoded` for sparse codecs: each node gathers and decodes all messages."""
    words = encode_array(x, codec, key)
    error = x - decode_array(words, codec, x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    messages = gather_words(words, axis_name)
    if mean_over == "nodes":
        return sum_rows(messages, codec, like) / axis_size(axis_name), error

    def add(sums: Any, message: jax.Array) -> tuple[Any, None]:
        total, senders = sums  # of values, and of the nodes that sent each value
        values = decode_array(message, codec, like)
        return (total + values, senders + (values != 0).astype(like.dtype)), None

    zeros = jnp.zeros(like.shape, like.dtype)
    (total, senders), _ = jax.lax.scan(add, (zeros, zeros), messages)
    return total / jnp.maximum(senders, 1), error


def _mean_of_dense(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Computes `_mean_of_encoded` for dense codecs: nodes average a row each, 1/N of the values."""
    nodes = axis_size(axis_name)
    row = jax.ShapeDtypeStruct((-(-x.size // nodes),), x.dtype)
    words = encode_rows([x], nodes, codec, fold_in(key, 0))
    errors = pad_to_rows(x, nodes) - decode_rows(words, codec, row)
    average = sum_rows(exchange_rows(words, axis_name), codec, row) / nodes
    average_words = encode_array(average, codec, fold_in(key, 1))
    # N nodes get the average, so its error counts N times, in the row that this node averages.
    lack = nodes * (average - decode_array(average_words, codec, average))
    is_own_row = jnp.arange(nodes, dtype=jnp.int32)[:, None] == jax.lax.axis_index(axis_name)
    errors += jnp.where(is_own_row, lack[None], jnp.zeros_like(errors))
    mean = decode_rows(gather_words(average_words, axis_name), codec, row)
    return mean.ravel()[: x.size], errors.ravel()[: x.size]


def encode_rows(
    arrays: Sequence[jax.Array], rows: int, codec: Codec, key: jax.Array | None
) -> jax.Array:
    """Concatenates flat arrays, cuts them into rows, and encodes each row: words `[rows, length]`.

    The arrays have more than `rows` values together.
    """
    if rows > MAX_UNROLLED:
        buffer = pad_to_rows(concatenate_in_place(arrays), rows)
        numbers = jnp.arange(rows)
        return jax.vmap(lambda row, i: encode_array(row, codec, fold_in(key, i)))(buffer, numbers)
    # Each row is encoded in one pass. Rows of a buffer that is encoded would be copied once more.
    pieces = cut_into_rows(arrays, rows)
    return jnp.stack([encode_pieces(row, codec, fold_in(key, i)) for i, row in enumerate(pieces)])


def decode_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Decodes words of rows; returns the rows, each like `row`: `[rows, length]`."""
    return jax.vmap(lambda message: decode_array(message, codec, row))(words)


def sum_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Decodes words of rows, each like `row`, and returns the sum of the rows, `[length]`."""
    if len(words) > MAX_UNROLLED:
        return decode_rows(words, codec, row).sum(axis=0)
    # Not `sum(axis=0)`: XLA on CPU takes 75 ms for a `sum` of 10 MB of bfloat16, and 1 ms for this.
    return reduce(jnp.add, [decode_array(message, codec, row) for message in words])


def exchange_rows(rows: jax.Array, axis_name: str) -> jax.Array:
    """Sends row `i` to node `i`; returns the rows `[N, length]` that this node gets, by sender."""
    nodes = len(rows)
    if pairs_add_up() and nodes <= MAX_UNROLLED:
        node = jax.lax.axis_index(axis_name)
        received = [jax.lax.dynamic_index_in_dim(rows, node, keepdims=False)]
        for hop in range(1, nodes):
            row = jax.lax.dynamic_index_in_dim(rows, (node + hop) % nodes, keepdims=False)
            receivers = (np.arange(nodes) + hop) % nodes
            received += permute([row], receivers, axis_name, np.ones(nodes, bool))
        hops = (node - jnp.arange(nodes)) % nodes  # in which the row of each sender arrived
        return jnp.stack(received)[hops]
    # Under vmap, JAX (0.10) changes the shape of an array that all nodes have alike. A condition on
    # the node, always true, makes it one that may differ. XLA removes the condition.
    is_true = jax.lax.axis_index(axis_name) >= 0
    return jax.lax.all_to_all(jnp.where(is_true, rows, rows), axis_name, 0, 0)


def straight_through(rounded: Callable[..., Any], linear: Callable[..., Any]) -> Any:
    """Returns `rounded` with the derivative of `linear`, which computes the same without rounding.

    Messages of integers have no derivative, so what a node receives would have none either.
    `rounded` may take more arguments, such as a key, with respect to which there is no derivative.
    """
    apply = jax.custom_jvp(rounded)
    apply.defjvp(lambda primals, tangents: (apply(*primals), linear(tangents[0])))
    return apply


def buffer_mean(buffer: jax.Array, wire: Wire) -> jax.Array:
    """Returns the node average of a flat buffer in full precision."""

    def pmean(part: jax.Array, wire: Wire) -> jax.Array:
        return as_varying(jax.lax.pmean(part, wire.axis_name), wire.axis_name)

    return sharded_over_local(pmean, buffer, wire)


def mean_of_others(sent: jax.Array, axis_name: str) -> jax.Array:
    """Returns `(sum_j sent_j - sent_i) / (N - 1)`: what node i gets if all nodes average.

    Each node j has split off `sent_j`, and sends an equal share of it to every other node.
    """
    total = as_varying(jax.lax.psum(sent, axis_name), axis_name)
    return (total - sent) / (axis_size(axis_name) - 1)


def deliver_uniform(sent: jax.Array, key: jax.Array | None, wire: Wire) -> jax.Array:
    """Computes `mean_of_others` from rounded messages, by the traffic of one all-reduce.

    Every node sums 1/N of the buffer and replies to each node. The sender keeps the rounding errors
    of its message. The rounding error of a reply goes into the reply to the next node, and the
    replying node keeps the last error. So mass is conserved, and no node is off by more than two
    roundings.
    """
    assert wire.codec is not None
    nodes = axis_size(wire.axis_name)
    row = jax.ShapeDtypeStruct((-(-sent.size // nodes),), sent.dtype)
    words = encode_rows([sent], nodes, wire.codec, fold_in(key, 0))
    own_errors = sent - decode_rows(words, wire.codec, row).ravel()[: sent.size]
    received = exchange_rows(words, wire.axis_name)
    total = sum_rows(received, wire.codec, row)

    def reply(error: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
        words, number = inputs  # the message of one node, and a number for its reply's key
        exact = (total - decode_array(words, wire.codec, total)) / (nodes - 1) + error
        words = encode_array(exact, wire.codec, fold_in(key, number))
        return exact - decode_array(words, wire.codec, exact), words

    no_error = jnp.zeros_like(total)  # typed as the errors that follow it, which vary
    for name in sorted(varying_axes(total)):
        no_error = as_varying(no_error, name)
    error, replies = jax.lax.scan(reply, no_error, (received, 1 + jnp.arange(nodes)))
    arrived = decode_rows(exchange_rows(replies, wire.axis_name), wire.codec, row)
    is_own_row = jnp.arange(nodes, dtype=jnp.int32)[:, None] == jax.lax.axis_index(wire.axis_name)
    arrived += jnp.where(is_own_row, error[None], jnp.zeros_like(arrived))
    return arrived.ravel()[: sent.size] + own_errors
