"""Exchanges of what a codec makes of values, which the caller accounts for: sparse ones, too.

Nothing is kept here at a sender: both functions return what was sent, and the caller keeps the
difference (error feedback, or the copies of CHOCO).
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.collectives._averages import mean_beside, node_mean
from gossipjax.collectives._axes import as_varying, axis_size, select_for_node
from gossipjax.collectives._buffers import Layout, pad_to_rows
from gossipjax.collectives._exchange import (
    exchange_rows,
    fold_in_node,
    gather_words,
    permute,
    sharded_over_local,
)
from gossipjax.collectives._rows import decode_rows, encode_rows, sum_rows
from gossipjax.topology.schedule import Round
from gossipjax.wire import Codec, FloatCodec, Wire, decode, encode, fold_in


def mix_encoded(tree: Any, round_: Round, wire: Wire, key: jax.Array | None) -> tuple[Any, Any]:
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
    part: jax.Array, wire: Wire, round_: Round, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    words = encode([part], wire.codec, key)
    sent = decode(words, wire.codec, [part])[0]
    mixed = [select_for_node(round_.self_weights, part.dtype, wire.axis_name) * sent]
    for receivers, weights in round_.slots:
        message = permute(words, receivers, wire.axis_name, weights > 0)
        received = decode(message, wire.codec, [part])[0]
        by_receiver = np.zeros_like(weights)
        by_receiver[receivers] = weights
        weighted = select_for_node(by_receiver, part.dtype, wire.axis_name) * received
        if (weights == 0).any():  # a filler, whose 0 * NaN would spread along edges of no graph
            is_edge = select_for_node(by_receiver > 0, bool, wire.axis_name)
            weighted = jnp.where(is_edge, weighted, jnp.zeros_like(weighted))
        mixed.append(weighted)
    return sent, reduce(jnp.add, mixed)


def mean_of_encoded(
    tree: Any, axis_name: str, codec: Codec, key: jax.Array | None
) -> tuple[Any, Any]:
    """Returns the node average of what the codec leaves of `x`, and what it leaves out, `e`.

    The sum over the nodes of the averages and of `e` is that of `x`. All nodes get the same
    average, in the types of `x`, float32 at least. Sparse messages are gathered. Of dense ones,
    every node averages 1/N and encodes the average; what that leaves out goes into its `e`. One
    node, and no more values than nodes, are averaged in full precision.

    Args:
      tree: `x`, float32 at least.
      axis_name: of the nodes.
      codec: the form of the messages.
      key: for codecs that need one; nodes fold their index in.
    """
    layout = Layout(tree)
    key = fold_in_node(key, Wire(axis_name))
    results = [
        _mean_of_encoded(as_varying(buffer, axis_name), axis_name, codec, fold_in(key, i))
        for i, buffer in enumerate(layout.pack(tree))
    ]
    means, errors = zip(*results, strict=True) if results else ((), ())
    return layout.unpack(means), layout.unpack(errors)


def exact_average(tree: Any, wire: Wire, key: jax.Array | None, is_beside: bool = False) -> Any:
    """The node average of every leaf, of the same bits on all nodes; float32 at least.

    One message per type, of which each device of a node sends its share. What a codec leaves out
    is lost. `is_beside` is for an average beside other computation; see `mean_beside`.
    """
    axis_size(wire.axis_name)
    layout = Layout(tree)
    key = fold_in_node(key, wire)

    def average(part: jax.Array, wire: Wire, key: jax.Array | None) -> jax.Array:
        if wire.codec is None and is_beside:
            return mean_beside(part, wire.axis_name)
        if wire.codec is None or isinstance(wire.codec, FloatCodec):
            return node_mean(part, wire.axis_name, wire.codec)
        return _mean_of_encoded(part, wire.axis_name, wire.codec, key)[0]

    averages = [
        sharded_over_local(partial(average, key=fold_in(key, i)), buffer, wire)
        for i, buffer in enumerate(layout.pack(tree))
    ]
    return layout.unpack(averages)


def _mean_of_encoded(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    nodes = axis_size(axis_name)
    if nodes == 1 or x.size <= nodes:
        return node_mean(x, axis_name), jnp.zeros_like(x)
    average = _mean_of_sparse if codec.is_sparse else _mean_of_dense
    return average(x, axis_name, codec, key)


def _mean_of_sparse(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    words = encode([x], codec, key)
    error = x - decode(words, codec, [x])[0]
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total = sum_rows(gather_words(words, axis_name), codec, like)
    return total / axis_size(axis_name), error


def _mean_of_dense(
    x: jax.Array, axis_name: str, codec: Codec, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    nodes = axis_size(axis_name)
    row = jax.ShapeDtypeStruct((-(-x.size // nodes),), x.dtype)
    words = encode_rows([x], nodes, codec, fold_in(key, 0))
    errors = pad_to_rows(x, nodes) - decode_rows(words, codec, row)
    average = sum_rows(exchange_rows(words, axis_name), codec, row) / nodes
    words = encode([average], codec, fold_in(key, 1))
    # N nodes get the average: what it lacks counts N times, in the row that this node averages.
    lack = nodes * (average - decode(words, codec, [average])[0])
    is_own_row = jnp.arange(nodes)[:, None] == jax.lax.axis_index(axis_name)
    errors += jnp.where(is_own_row, lack[None], jnp.zeros_like(errors))
    mean = decode_rows(gather_words(words, axis_name), codec, row)
    return mean.ravel()[: x.size], errors.ravel()[: x.size]
