"""Exchanges over a named axis: the only module that calls lax collectives.

Everything here runs inside `shard_map`, `pmap` or `vmap(axis_name=...)`, on one node's values. A
round has two halves: `split` divides what a node has into what it keeps and what it sends, and
`deliver` exchanges what was sent. Under overlap a step lies between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.buffers import (
    Layout,
    apart,
    cast_like,
    decode,
    encode,
    in_rows,
    joined_in_place,
    narrows,
)
from gossipjax.schedule import Round

Step = int | np.integer | jax.Array
LEAST_REMAINDER = 1 / 128  # below it, a subtraction in float32 would cancel too many digits


def axis_size(axis_name: str) -> int:
    """The number of nodes on `axis_name`; `ValueError` where no such axis is bound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"no axis named {axis_name!r} here: run it inside shard_map, pmap or vmap with "
            f"axis_name={axis_name!r} (gx.spmd does), or pass the name of your axis as axis_name."
        ) from None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes over which `x` varies by its type; none unless under shard_map's check_vma=True."""
    return jax.typeof(x).manual_axis_type.varying


def varies(x: jax.Array, axis_name: str) -> bool:
    """False if `x` is known, by its type, to be the same all over the axis."""
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    return not types_known or axis_name in varying_axes(x)


def as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """`x` with the type of a value that differs between nodes, so that all rounds agree in type."""
    return x if varies(x, axis_name) else jax.lax.pcast(x, axis_name, to="varying")


def _over_buffers(apply: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies `apply` to the leaves of `tree`, packed into buffers; they come back wide."""
    layout = Layout(tree)
    return layout.unpack([apply(buffer) for buffer in layout.pack(tree)])


def mean(tree: Any, axis_name: str, wire_dtype: np.dtype | None = None) -> Any:
    """The node average of every leaf, summed in float32 at least and returned in its own type.

    It is the same on all nodes, to the bit. With a narrower `wire_dtype`, values travel in it.
    """
    nodes = axis_size(axis_name)

    def average(buffer: jax.Array) -> jax.Array:
        if nodes == 1 or buffer.size <= nodes or not narrows(buffer, wire_dtype):
            return jax.lax.pmean(buffer, axis_name)
        return _narrow_mean(buffer, axis_name, wire_dtype)

    return cast_like(_over_buffers(average, tree), tree)


def _narrow_mean(buffer: jax.Array, axis_name: str, wire_dtype: np.dtype | None) -> jax.Array:
    """Every node averages 1/N of the buffer, summed wide, and all gather the parts.

    Each value is rounded twice: on its way to be summed, and on the way back.
    """
    rows = in_rows(buffer, axis_size(axis_name))
    words = jax.vmap(lambda row: encode([row], wire_dtype))(rows)
    came = jax.lax.all_to_all(words, axis_name, 0, 0)
    own = jax.vmap(lambda row, like: decode(row, wire_dtype, [like])[0])(came, rows).mean(axis=0)
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    to = "invarying" if types_known else "varying"
    words = jax.lax.all_gather(encode([own], wire_dtype), axis_name, tiled=True, to=to)
    return decode(words, wire_dtype, [rows.ravel()])[0][: buffer.size]


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


class Wire(NamedTuple):
    """How messages travel: over which axes of a mesh, and in which type."""

    axis_name: str
    local_axis_name: str | None = None
    dtype: np.dtype | None = None


def split(x: Any, mixing: Round, axis_name: str) -> tuple[Any, Any]:
    """What a node keeps of `x`, `P_ii x`, and the rest, which it sends: together exactly `x`."""
    if mixing.is_identity:
        return x, jax.tree.map(jnp.zeros_like, x)
    own = np.diag(mixing.matrix)

    def rest(leaf: jax.Array, kept: jax.Array) -> jax.Array:
        if own.max() < 1:
            return leaf - kept
        return jnp.where(per_node(own < 1, bool, axis_name), leaf - kept, 0)

    kept = jax.tree.map(lambda leaf: per_node(own, leaf.dtype, axis_name) * leaf, x)
    return kept, jax.tree.map(rest, x, kept)


def deliver(sent: jax.Array, mixing: Round, wire: Wire) -> jax.Array:
    """What arrives of the buffers that all nodes `split` off in this round.

    Sender `j` divides its buffer by `P_ij / (1 - P_jj)` over its receivers. What rounding leaves
    over comes back to it, so that no mass is lost; not so in full width where a node keeps less
    than 1/128, or all average exactly. Nothing is sent in a round of no exchange.
    """
    if mixing.is_identity or not sent.size:
        return sent

    def exchanged(part: jax.Array, wire: Wire) -> jax.Array:
        if mixing.is_uniform and wire.dtype is None:
            everything = as_varying(jax.lax.psum(part, wire.axis_name), wire.axis_name)
            return (everything - part) / (mixing.size - 1)
        if not narrows(part, wire.dtype):
            return _exchange([part], mixing, wire)[0]
        # The weight, if there is one, is the first value.
        first, whole = _exchange([part[:1], part], mixing, wire)
        return jnp.where(jax.lax.iota(jnp.int32, part.size) == 0, first, whole)

    return _in_shares(exchanged, sent, wire)


def deliver_leaves(sent: list[jax.Array], mixing: Round, wire: Wire) -> list[jax.Array]:
    """The same of flat leaves of one type, which travel as one message.

    Of each leaf its own narrow words are made, since it takes less to join those.
    """
    sizes = [leaf.size for leaf in sent]
    if narrows(sent[0], wire.dtype) and wire.local_axis_name is None and sum(sizes):
        return _exchange(sent, mixing, wire)
    return apart(deliver(joined_in_place(sent), mixing, wire), sizes)


def _exchange(sent: list[jax.Array], mixing: Round, wire: Wire) -> list[jax.Array]:
    axis_name, dtype = wire.axis_name, sent[0].dtype
    own = np.diag(mixing.matrix)
    left, arrived, shares = sent, [], []
    for receivers, weights in mixing.slots:
        share = np.divide(weights, 1 - own, out=np.zeros_like(own), where=weights > 0)
        messages = [per_node(share, dtype, axis_name) * part for part in sent]
        if (share == 0).any():
            # A filler must carry a true zero: 0 * NaN would spread a NaN along edges of no graph.
            sends = per_node(share > 0, bool, axis_name)
            messages = [jnp.where(sends, message, 0) for message in messages]
        words = encode(messages, wire.dtype)
        came = _send(words, receivers, axis_name)
        left = jax.tree.map(jnp.subtract, left, decode(words, wire.dtype, messages))
        arrived.append(decode(came, wire.dtype, messages))
        shares.append(share.astype(dtype))
    nothing_left = own.min() < LEAST_REMAINDER or _divides_exactly(np.array(shares))
    if nothing_left and not narrows(sent[0], wire.dtype):
        left, *arrived = arrived
    return [reduce(jnp.add, parts) for parts in zip(left, *arrived, strict=True)]


def _send(words: jax.Array, receivers: np.ndarray, axis_name: str) -> jax.Array:
    """Each node's words go to its receiver; what comes from the sender."""
    nodes = np.arange(len(receivers))
    in_pairs = (receivers[receivers] == nodes).all() and (receivers != nodes).all()
    if in_pairs and groups_are_faster():
        pairs = [[int(i), int(j)] for i, j in enumerate(receivers) if i < j]
        try:
            own = _joined(words)  # integers wrap around: the difference is exact
            return _unjoined(jax.lax.psum(own, axis_name, axis_index_groups=pairs) - own, words)
        except NotImplementedError:  # under vmap, and where types tell what varies
            pass
    return jax.lax.ppermute(words, axis_name, list(enumerate(receivers.tolist())))


def _joined(words: jax.Array) -> jax.Array:
    """Words of 16 bits two by two, one of either half: XLA on CPU would sum them in 32 bits."""
    if words.dtype.itemsize > 2:
        return words
    low, high = in_rows(words, 2).astype(jnp.uint32)
    return low | high << 16


def _unjoined(pairs: jax.Array, like: jax.Array) -> jax.Array:
    if like.dtype.itemsize > 2:
        return pairs
    return jnp.concatenate([pairs, pairs >> 16]).astype(like.dtype)[: like.size]


def groups_are_faster() -> bool:
    """Whether collectives over the groups of two beat a permutation between their nodes.

    Gloo sends both ways of a pair over one connection, and a permutation waits for one before the
    other: 1.65 s instead of 0.85 s for 20 MB at 200 Mbit/s. A sum uses both ways at once.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _divides_exactly(shares: np.ndarray) -> bool:
    """Whether shares `[K, N]` are halves, quarters, ... that make up the whole."""
    mantissas, _ = np.frexp(shares)
    totals = shares.sum(axis=0)
    return bool(np.isin(mantissas, (0, 0.5)).all() and np.isin(totals, (0, 1)).all())


def average(buffer: jax.Array, wire: Wire) -> jax.Array:
    """The node average of a flat buffer, the same to the bit on all nodes."""

    def pmean(part: jax.Array, wire: Wire) -> jax.Array:
        return as_varying(jax.lax.pmean(part, wire.axis_name), wire.axis_name)

    return _in_shares(pmean, buffer, wire)


def _in_shares(
    apply: Callable[[jax.Array, Wire], jax.Array], buffer: jax.Array, wire: Wire
) -> jax.Array:
    """Each of a node's L devices applies `apply` to 1/L of the buffer; all gather the whole.

    So a server sends its model once per peer, and not L times.
    """
    local = wire.local_axis_name
    if local is None:
        return apply(buffer, wire)
    devices = axis_size(local)
    types_known = local in varying_axes(jax.lax.axis_index(local))
    if types_known and local in varying_axes(buffer):
        raise ValueError(
            f"the model varies over {local!r}, where its replicas must be equal: put "
            f"gx.allreduce({local!r}) first in the chain."
        )
    shares = in_rows(buffer, devices)
    own = jax.lax.dynamic_index_in_dim(shares, jax.lax.axis_index(local), keepdims=False)
    to = "invarying" if types_known else "varying"
    return jax.lax.all_gather(apply(own, wire), local, tiled=True, to=to)[: buffer.size]


def per_node(values: np.ndarray, dtype: Any, axis_name: str) -> Any:
    """This node's entry of `values` `[N, ...]`; a constant where all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]
