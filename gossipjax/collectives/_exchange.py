"""Exchanges over a named axis: the only module that calls lax collectives on parameters.

Everything here runs inside `shard_map`, `pmap` or `vmap(axis_name=...)`, on one node's values. A
round has two halves: `split` divides a node's values into what it keeps and what it sends, and
`deliver` exchanges the sent parts. Under overlap a step lies between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.collectives._buffers import Layout, cast_like, pad_to_rows
from gossipjax.topology.schedule import Round
from gossipjax.wire import (
    Wire,
    concatenate_in_place,
    decode,
    encode,
    is_narrower,
    split_by_size,
)

StepLike = int | np.integer | jax.Array
MIN_SELF_WEIGHT = 1 / 128  # below it, a subtraction in float32 would cancel too many digits


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


def _map_buffers(apply: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies `apply` to the packed leaves of `tree`; they come back in accumulation types."""
    layout = Layout(tree)
    return layout.unpack([apply(buffer) for buffer in layout.pack(tree)])


def node_mean(tree: Any, axis_name: str, wire_dtype: np.dtype | None = None) -> Any:
    """The node average of every leaf, summed in float32 at least and returned in its own type.

    With a narrower `wire_dtype`, values travel in it.
    """
    nodes = axis_size(axis_name)

    def average(buffer: jax.Array) -> jax.Array:
        narrow = is_narrower(wire_dtype, buffer.dtype)
        if nodes == 1 or buffer.size <= nodes or not narrow:
            return jax.lax.pmean(buffer, axis_name)
        return _narrow_mean(buffer, axis_name, wire_dtype)

    return cast_like(_map_buffers(average, tree), tree)


def _narrow_mean(buffer: jax.Array, axis_name: str, wire_dtype: np.dtype | None) -> jax.Array:
    """Every node averages 1/N of the buffer in full precision, and all gather the parts.

    Each value is rounded twice: before it is summed, and before it is gathered.
    """
    rows = pad_to_rows(buffer, axis_size(axis_name))
    words = jax.vmap(lambda row: encode([row], wire_dtype))(rows)
    received = jax.lax.all_to_all(words, axis_name, 0, 0)
    decoded = jax.vmap(lambda row, like: decode(row, wire_dtype, [like])[0])(received, rows)
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    to = "invarying" if types_known else "varying"
    average = encode([decoded.mean(axis=0)], wire_dtype)
    words = jax.lax.all_gather(average, axis_name, tiled=True, to=to)
    return decode(words, wire_dtype, [rows.ravel()])[0][: buffer.size]


def clipped_node_mean(tree: Any, axis_name: str) -> Any:
    """The node average between the smallest and the largest value: exact where all agree."""
    axis_size(axis_name)

    def average(buffer: jax.Array) -> jax.Array:
        low = jax.lax.pmin(buffer, axis_name)
        high = jax.lax.pmax(buffer, axis_name)
        return jnp.clip(jax.lax.pmean(buffer, axis_name), low, high)

    return _map_buffers(average, tree)


def node_sum(tree: Any, wire: Wire) -> Any:
    """The sum of every leaf over the nodes, float32 at least."""
    axis_size(wire.axis_name)

    def psum(part: jax.Array, wire: Wire) -> jax.Array:
        return jax.lax.psum(part, wire.axis_name)

    return _map_buffers(lambda buffer: _sharded_over_local(psum, buffer, wire), tree)


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


def split(x: Any, round_: Round, axis_name: str) -> tuple[Any, Any]:
    """The part `P_ii x` of `x` that this node keeps, and the rest `x - P_ii x`, which it sends."""
    if round_.is_identity:
        return x, jax.tree.map(jnp.zeros_like, x)
    self_weights = np.diag(round_.matrix)

    def rest(leaf: jax.Array, kept: jax.Array) -> jax.Array:
        if self_weights.max() < 1:
            return leaf - kept
        sends = select_for_node(self_weights < 1, bool, axis_name)
        return jnp.where(sends, leaf - kept, jnp.zeros_like(leaf))

    kept = jax.tree.map(lambda leaf: select_for_node(self_weights, leaf.dtype, axis_name) * leaf, x)
    return kept, jax.tree.map(rest, x, kept)


def deliver(sent: jax.Array, round_: Round, wire: Wire) -> jax.Array:
    """Returns what arrives of the buffers that all nodes `split` off in this round.

    Sender `j` divides its buffer by `P_ij / (1 - P_jj)` over its receivers. The sender keeps the
    rounding error of every message, so mass is conserved. Exceptions, in full precision only:
    rounds with a self weight below 1/128, and exact averages. A round of no exchange sends nothing.
    """
    if round_.is_identity or not sent.size:
        return sent

    def exchange(part: jax.Array, wire: Wire) -> jax.Array:
        if round_.is_uniform and wire.dtype is None:
            total = as_varying(jax.lax.psum(part, wire.axis_name), wire.axis_name)
            return (total - part) / (round_.size - 1)
        if not is_narrower(wire.dtype, part.dtype):
            return _exchange([part], round_, wire)[0]
        # The weight, if there is one, is the first value.
        first, whole = _exchange([part[:1], part], round_, wire)
        return jnp.where(jax.lax.iota(jnp.int32, part.size) == 0, first, whole)

    return _sharded_over_local(exchange, sent, wire)


def deliver_leaves(sent: list[jax.Array], round_: Round, wire: Wire) -> list[jax.Array]:
    """Delivers flat leaves of one type as one message.

    Low-precision words are made leaf by leaf, because they are cheaper to concatenate.
    """
    sizes = [leaf.size for leaf in sent]
    narrow = is_narrower(wire.dtype, sent[0].dtype)
    if narrow and wire.local_axis_name is None and sum(sizes):
        return _exchange(sent, round_, wire)
    return split_by_size(deliver(concatenate_in_place(sent), round_, wire), sizes)


def _exchange(sent: list[jax.Array], round_: Round, wire: Wire) -> list[jax.Array]:
    dtype = sent[0].dtype
    self_weights = np.diag(round_.matrix)
    remainder = sent
    arrivals = []
    shares = []
    for receivers, weights in round_.slots:
        share = np.divide(
            weights, 1 - self_weights, out=np.zeros_like(self_weights), where=weights > 0
        )
        messages = [select_for_node(share, dtype, wire.axis_name) * part for part in sent]
        if (share == 0).any():
            # A filler must carry a true zero: 0 * NaN would spread a NaN along edges of no graph.
            sends = select_for_node(share > 0, bool, wire.axis_name)
            messages = [jnp.where(sends, m, jnp.zeros_like(m)) for m in messages]
        words = encode(messages, wire.dtype)
        received = _permute(words, receivers, wire.axis_name)
        remainder = jax.tree.map(jnp.subtract, remainder, decode(words, wire.dtype, messages))
        arrivals.append(decode(received, wire.dtype, messages))
        shares.append(share.astype(dtype))
    nothing_remains = self_weights.min() < MIN_SELF_WEIGHT or _divides_exactly(np.array(shares))
    if not nothing_remains or is_narrower(wire.dtype, dtype):
        arrivals.insert(0, remainder)
    return [reduce(jnp.add, parts) for parts in zip(*arrivals, strict=True)]


def _permute(words: jax.Array, receivers: np.ndarray, axis_name: str) -> jax.Array:
    """Sends each node's words to its receiver; returns the words of its sender."""
    nodes = np.arange(len(receivers))
    in_pairs = (receivers[receivers] == nodes).all() and (receivers != nodes).all()
    if in_pairs and groups_are_faster():
        pairs = [[int(i), int(j)] for i, j in enumerate(receivers) if i < j]
        try:
            packed = _pack_u16_pairs(words)  # integers wrap around: the difference is exact
            total = jax.lax.psum(packed, axis_name, axis_index_groups=pairs)
            return _unpack_u16_pairs(total - packed, words)
        except NotImplementedError:  # under vmap, and where types tell what varies
            pass
    return jax.lax.ppermute(words, axis_name, list(enumerate(receivers.tolist())))


def _pack_u16_pairs(words: jax.Array) -> jax.Array:
    """Packs 16-bit words in pairs, one of either half: XLA on CPU would sum them in 32 bits."""
    if words.dtype.itemsize > 2:
        return words
    low, high = pad_to_rows(words, 2).astype(jnp.uint32)
    return low | high << 16


def _unpack_u16_pairs(pairs: jax.Array, like: jax.Array) -> jax.Array:
    if like.dtype.itemsize > 2:
        return pairs
    return jnp.concatenate([pairs, pairs >> 16]).astype(like.dtype)[: like.size]


def groups_are_faster() -> bool:
    """Whether a sum over groups of two beats a permutation between pairs of nodes.

    Gloo sends both directions of a pair over one connection, and a permutation runs one after the
    other: 1.65 s instead of 0.85 s for 20 MB at 200 Mbit/s. A sum uses both at once.
    """
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _divides_exactly(shares: np.ndarray) -> bool:
    """Whether shares `[K, N]` are halves, quarters, ... that add up to the whole."""
    mantissas, _ = np.frexp(shares)
    totals = shares.sum(axis=0)
    return bool(np.isin(mantissas, (0, 0.5)).all() and np.isin(totals, (0, 1)).all())


def buffer_mean(buffer: jax.Array, wire: Wire) -> jax.Array:
    """The node average of a flat buffer in full precision."""

    def pmean(part: jax.Array, wire: Wire) -> jax.Array:
        return as_varying(jax.lax.pmean(part, wire.axis_name), wire.axis_name)

    return _sharded_over_local(pmean, buffer, wire)


def _sharded_over_local(
    apply: Callable[[jax.Array, Wire], jax.Array], buffer: jax.Array, wire: Wire
) -> jax.Array:
    """Each of a node's L devices applies `apply` to 1/L of the buffer; all gather the whole.

    A server then sends its model once per peer, and not L times.
    """
    local = wire.local_axis_name
    if local is None:
        return apply(buffer, wire)
    devices = axis_size(local)
    types_known = local in varying_axes(jax.lax.axis_index(local))
    if types_known and local in varying_axes(buffer):
        raise ValueError(
            f"the model must be the same on all devices of {local!r}, got one that varies over it: "
            f"put gx.allreduce({local!r}) first in the chain."
        )
    shards = pad_to_rows(buffer, devices)
    shard = jax.lax.dynamic_index_in_dim(shards, jax.lax.axis_index(local), keepdims=False)
    to = "invarying" if types_known else "varying"
    return jax.lax.all_gather(apply(shard, wire), local, tiled=True, to=to)[: buffer.size]


def select_for_node(values: np.ndarray, dtype: DTypeLike, axis_name: str) -> Any:
    """This node's entry of `values` `[N, ...]`; a constant where all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]
