"""Pytrees as flat buffers, one per dtype, and buffers as the words that travel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def wide(dtype: Any) -> np.dtype:
    """The type in which values of `dtype` are mixed: float32 at least."""
    return np.promote_types(dtype, np.float32)


def widened(tree: Any) -> Any:
    """The leaves as arrays of float32 at least."""
    return jax.tree.map(lambda x: jnp.asarray(x, wide(jnp.result_type(x))), tree)


def cast_like(tree: Any, like: Any) -> Any:
    """The leaves of `tree` in the types of those of `like`."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)


def _is_real_float(dtype: Any, bits: int) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= bits


def require_floats(tree: Any, what: str) -> None:
    """Raises `ValueError` if a leaf of `tree` is not of a real floating-point type."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not _is_real_float(dtype, 16):
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {dtype}; gossip averages floating-point "
                "leaves of 16 bits or more. Keep others out of the tree, or mask them."
            )


def require_wire_dtype(dtype: Any) -> np.dtype | None:
    """`dtype` as a dtype, or None; `ValueError` unless it is floating-point of 16 bits or more."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not _is_real_float(found, 16):
        raise ValueError(
            f"wire_dtype is a floating-point type of 16 bits or more, such as jnp.bfloat16, or "
            f"None for full width; given {dtype!r}."
        )
    return found


class Layout:
    """Where each leaf of a pytree lies in flat buffers, one per dtype (float32 at least)."""

    def __init__(self, tree: Any):
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [jnp.shape(leaf) for leaf in leaves]
        dtypes = [wide(jnp.result_type(leaf)) for leaf in leaves]
        self._groups = {
            dtype: [i for i, d in enumerate(dtypes) if d == dtype]
            for dtype in sorted(set(dtypes), key=str)
        }

    @property
    def sizes(self) -> list[int]:
        """How many values each buffer has."""
        shapes = self._shapes
        return [sum(int(np.prod(shapes[i])) for i in group) for group in self._groups.values()]

    def pack(self, tree: Any) -> list[jax.Array]:
        """The buffers `[size]`, leaf after leaf in the order of the tree."""
        return [jnp.concatenate(parts) for parts in self.flat(tree)]

    def unpack(self, buffers: Sequence[jax.Array]) -> Any:
        """The tree again; whatever follows the last leaf in a buffer is padding."""
        shapes = [[self._shapes[i] for i in group] for group in self._groups.values()]
        return self.unflat(
            [
                apart(buffer.ravel(), [int(np.prod(shape)) for shape in of_leaves])
                for of_leaves, buffer in zip(shapes, buffers, strict=True)
            ]
        )

    def flat(self, tree: Any) -> list[list[jax.Array]]:
        """What `pack` joins: the leaves `[size]` of each buffer."""
        leaves = jax.tree.leaves(tree)
        return [
            [jnp.asarray(leaves[i], dtype).ravel() for i in group]
            for dtype, group in self._groups.items()
        ]

    def unflat(self, parts: Sequence[Sequence[jax.Array]]) -> Any:
        """The tree again, of what `flat` makes of it."""
        out: list[Any] = [None] * len(self._shapes)
        for group, flats in zip(self._groups.values(), parts, strict=True):
            for i, flat in zip(group, flats, strict=True):
                out[i] = flat.reshape(self._shapes[i])
        return jax.tree.unflatten(self._structure, out)


def apart(buffer: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """The parts of a flat buffer, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return [buffer[start:stop] for start, stop in itertools.pairwise(ends)]


def joined_in_place(parts: Sequence[jax.Array]) -> jax.Array:
    """The concatenation; a GPU computes every part where it lies in it.

    It then may not be an output that takes a donated argument's memory. A concatenation of many
    parts is two more passes over memory there, and writing the parts first is one.
    """
    if len(parts) == 1:
        return parts[0]
    on_gpu = {"cuda": _written, "rocm": _written}
    return jax.lax.platform_dependent(parts, default=jnp.concatenate, **on_gpu)


def _written(parts: Sequence[jax.Array]) -> jax.Array:
    """The parts one after another, each written into its place."""
    buffer = jax.lax.empty((sum(part.size for part in parts),), parts[0].dtype)
    start = 0
    for part in parts:
        buffer = jax.lax.dynamic_update_slice(buffer, part, (start,))
        start += part.size
    return buffer


def in_rows(buffer: jax.Array, rows: int) -> jax.Array:
    """A flat buffer, padded with zeros, as `[rows, length]`."""
    length = -(-buffer.size // rows)
    return jnp.pad(buffer, (0, rows * length - buffer.size)).reshape(rows, length)


def narrows(message: jax.Array, wire_dtype: np.dtype | None) -> bool:
    """Whether `message` would travel in fewer bits than it has."""
    return wire_dtype is not None and wire_dtype.itemsize < message.dtype.itemsize


def encode(parts: Sequence[jax.Array], wire_dtype: np.dtype | None) -> jax.Array:
    """The words that travel for flat arrays, one after another: narrow values as unsigned integers.

    Integers, because XLA on CPU would widen a bfloat16 collective to float32. A single value, such
    as a push-sum weight, goes in full width. What is too large for the type is clipped.
    """
    return joined_in_place([_words(part, wire_dtype) for part in parts])


def _words(part: jax.Array, wire_dtype: np.dtype | None) -> jax.Array:
    if not narrows(part, wire_dtype):
        return part
    assert wire_dtype is not None
    words = jnp.dtype(f"uint{8 * wire_dtype.itemsize}")
    if part.size == 1:
        return jax.lax.bitcast_convert_type(part, words).ravel()
    largest = jnp.finfo(wire_dtype).max.astype(part.dtype)
    narrow = jnp.clip(part, -largest, largest).astype(wire_dtype)
    return jax.lax.bitcast_convert_type(narrow, words)


def decode(
    words: jax.Array, wire_dtype: np.dtype | None, like: Sequence[jax.Array]
) -> list[jax.Array]:
    """The flat arrays, of the sizes and as wide as those of `like`, that arrive as these words."""

    def values(words: jax.Array, part: jax.Array) -> jax.Array:
        if not narrows(part, wire_dtype):
            return words
        if part.size == 1:
            return jax.lax.bitcast_convert_type(words.reshape(1, -1), part.dtype)
        assert wire_dtype is not None
        return jax.lax.bitcast_convert_type(words, wire_dtype).astype(part.dtype)

    of_one = like[0].dtype.itemsize // words.dtype.itemsize
    sizes = [of_one if part.size == 1 else part.size for part in like]
    return [values(*pair) for pair in zip(apart(words, sizes), like, strict=True)]
