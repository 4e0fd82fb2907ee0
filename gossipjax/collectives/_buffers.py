"""Packs a pytree into one flat buffer per type, float32 at least, to send one message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.wire import (
    MIN_BITS,
    concatenate_in_place,
    is_cpu_over_processes,
    is_real_float,
    split_by_size,
)

MAX_OPERANDS = 100  # of a concatenation; of more, small neighbours are joined before
SMALL_LEAF = 2**14  # values


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the type in which values of `dtype` are mixed: float32 at least."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.promote_types(dtype, np.float32) if is_float else np.dtype(np.float32)


def upcast(tree: Any) -> Any:
    """Returns the leaves as arrays of their accumulation type."""
    return jax.tree.map(lambda x: jnp.asarray(x, accumulation_dtype(jnp.result_type(x))), tree)


def cast_like(tree: Any, like: Any) -> Any:
    """Returns the leaves of `tree` in the types of the leaves of `like`."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)


def dtype_of(leaf: Any) -> Any:
    """Returns the type of an array or a number; None for all else, such as a text or a type."""
    if isinstance(leaf, str | bytes | type | np.dtype):
        return None
    try:
        return jnp.result_type(leaf)
    except (TypeError, ValueError):
        return None


def require_floats(tree: Any, name: str) -> None:
    """Raises `ValueError` if a leaf of `tree` is not of a real floating-point type."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = dtype_of(leaf)
        if dtype is None or not is_real_float(dtype):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be floating-point of {MIN_BITS} bits or "
                f"more, which gossip can average, got {repr(leaf) if dtype is None else dtype}. "
                "Keep other leaves out of the tree, as nnx.split(module, nnx.Param, ...) and "
                "eqx.partition(model, eqx.is_inexact_array) do, or mask them."
            )


def _require_unsharded(tree: Any) -> None:
    """Raises `ValueError` if a leaf is sharded over an Explicit axis: then it cannot be packed."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", ())
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"leaves that are exchanged must not be sharded over an Explicit axis, got "
                f"leaf{jax.tree_util.keystr(path)} of type {jax.typeof(leaf)}, which cannot become "
                "part of a flat message. Give the axis the type jax.sharding.AxisType.Auto, under "
                "which XLA shards the message, or replicate the leaf by jax.sharding.reshard."
            )


class Layout:
    """The position of every leaf of a pytree in flat buffers, one per accumulation type."""

    def __init__(self, tree: Any):
        _require_unsharded(tree)
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [jnp.shape(leaf) for leaf in leaves]
        dtypes = [accumulation_dtype(jnp.result_type(leaf)) for leaf in leaves]
        # For each buffer: its type, and the numbers of its leaves.
        self._groups = [
            (dtype, [i for i, other in enumerate(dtypes) if other == dtype])
            for dtype in sorted(set(dtypes), key=str)
        ]

    @property
    def dtypes(self) -> list[np.dtype]:
        """The type of each buffer."""
        return [dtype for dtype, _ in self._groups]

    @property
    def sizes(self) -> list[int]:
        """The number of values of each buffer."""
        return [sum(sizes) for sizes in self._leaf_sizes()]

    def _leaf_sizes(self) -> list[list[int]]:
        """Returns the number of values of each leaf of each buffer."""
        return [[int(np.prod(self._shapes[i])) for i in group] for _, group in self._groups]

    def pack(self, tree: Any) -> list[jax.Array]:
        """Returns the buffers `[size]`, leaf after leaf in the order of the tree."""
        concatenate = concatenate_in_place if is_cpu_over_processes() else _concatenate
        return [concatenate(leaves) for leaves in self.ravel(tree)]

    def unpack(self, buffers: Sequence[jax.Array | np.ndarray]) -> Any:
        """Returns the tree that `pack` packed; values after the last leaf are padding."""
        return self.unravel(
            [
                split_by_size(buffer.ravel(), sizes)
                for sizes, buffer in zip(self._leaf_sizes(), buffers, strict=True)
            ]
        )

    def ravel(self, tree: Any) -> list[list[jax.Array]]:
        """Returns the flat leaves `[size]` of each buffer, which `pack` concatenates."""
        leaves = jax.tree.leaves(tree)
        return [
            [jnp.asarray(leaves[i], dtype).ravel() for i in group] for dtype, group in self._groups
        ]

    def unravel(self, flat_leaves: Sequence[Sequence[jax.Array | np.ndarray]]) -> Any:
        """Returns the tree that `ravel` took apart."""
        leaves: list[Any] = [None] * len(self._shapes)
        for (_, group), flat in zip(self._groups, flat_leaves, strict=True):
            for i, leaf in zip(group, flat, strict=True):
                leaves[i] = leaf.reshape(self._shapes[i])
        return jax.tree.unflatten(self._structure, leaves)


def _concatenate(leaves: list[jax.Array]) -> jax.Array:
    """Concatenates flat leaves; if there are many, it first joins small neighbours.

    XLA for GPUs concatenates more than 128 operands in two parts, and so writes most values twice.
    """
    if len(leaves) <= MAX_OPERANDS:
        return jnp.concatenate(leaves)
    joined: list[jax.Array] = []
    for is_small, group in itertools.groupby(leaves, lambda leaf: leaf.size <= SMALL_LEAF):
        run = list(group)
        if is_small and len(run) > 1:
            # Without a barrier XLA would make one concatenation of all leaves again.
            run = [jax.lax.optimization_barrier(jnp.concatenate(run))]
        joined += run
    return jnp.concatenate(joined)


def pad_to_rows(buffer: jax.Array, rows: int, multiple: int = 1) -> jax.Array:
    """Pads a flat buffer with zeros to `[rows, length]`, where `multiple` divides the length.

    >>> pad_to_rows(jnp.ones(5), 2).shape, pad_to_rows(jnp.ones(5), 2, multiple=4).shape
    ((2, 3), (2, 4))
    """
    length = -(-buffer.size // (rows * multiple)) * multiple
    return jnp.pad(buffer, (0, rows * length - buffer.size)).reshape(rows, length)


def cut_into_rows(arrays: Sequence[jax.Array], rows: int) -> list[list[jax.Array]]:
    """Cuts flat arrays, as if they were concatenated, into rows of equal length.

    Each row is a list of pieces of the arrays; the last row is padded with zeros.
    """
    size = sum(array.size for array in arrays)
    length = -(-size // rows)
    padding = jnp.zeros((rows * length - size,), arrays[0].dtype)
    result: list[list[jax.Array]] = [[] for _ in range(rows)]
    start = 0
    for array in [*arrays, padding]:
        end = start + array.size
        for row in range(start // length, -(-end // length)):  # the rows that the array reaches
            first = max(0, row * length - start)
            result[row].append(array[first : (row + 1) * length - start])
        start = end
    return result


def pack_u16_pairs(words: jax.Array) -> jax.Array:
    """Packs 16-bit words into half as many words of 32 bits; wider words stay as they are.

    Two nodes exchange words by their sum, from which each subtracts its own. XLA on CPU computes
    and sends sums in 32 bits at least, so words of 16 bits would travel at twice their size.
    """
    if words.dtype.itemsize > 2:
        return words
    low, high = pad_to_rows(words, 2).astype(jnp.uint32)
    return low | high << 16


def unpack_u16_pairs(pairs: jax.Array, like: jax.Array) -> jax.Array:
    """Unpacks what `pack_u16_pairs` packed; `like` is an array like the unpacked words."""
    if like.dtype.itemsize > 2:
        return pairs
    halves = [pairs, pairs >> 16]  # the conversion to 16 bits drops the upper bits
    return jnp.concatenate(halves).astype(like.dtype)[: like.size]
