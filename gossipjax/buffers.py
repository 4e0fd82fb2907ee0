"""Pytrees as flat buffers, one per dtype, and buffers as the words that travel."""

from __future__ import annotations

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

    def pack(self, tree: Any, in_place: bool = False) -> list[jax.Array]:
        """The buffers `[size]`, leaf after leaf in the order of the tree.

        With `in_place`, a GPU computes every leaf where it lies in the buffer, which then may not
        be an output that takes a donated argument's memory. A concatenation of many leaves is two
        more passes over memory there, and writing the leaves first is one.
        """
        leaves = jax.tree.leaves(tree)
        packed = []
        for dtype, group in self._groups.items():
            parts = [jnp.asarray(leaves[i], dtype).ravel() for i in group]
            if in_place:
                on_gpu = {"cuda": _written, "rocm": _written}
                buffer = jax.lax.platform_dependent(parts, default=jnp.concatenate, **on_gpu)
            else:
                buffer = jnp.concatenate(parts)
            packed.append(buffer)
        return packed

    def unpack(self, buffers: Sequence[jax.Array]) -> Any:
        """The tree again; whatever follows the last leaf in a buffer is padding."""
        out: list[Any] = [None] * len(self._shapes)
        for group, buffer in zip(self._groups.values(), buffers, strict=True):
            flat, start = buffer.ravel(), 0
            for i in group:
                stop = start + int(np.prod(self._shapes[i]))
                out[i] = flat[start:stop].reshape(self._shapes[i])
                start = stop
        return jax.tree.unflatten(self._structure, out)


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


def encode(message: jax.Array, wire_dtype: np.dtype | None) -> jax.Array:
    """The words that travel for a flat message: narrow values as unsigned integers.

    Integers, because XLA on CPU would widen a bfloat16 collective to float32. The first value, the
    push-sum weight if there is one, goes in full width: its first word in its place, the others at
    the end, so that the rest is one pass. What is too large for the type is clipped.
    """
    if not narrows(message, wire_dtype):
        return message
    assert wire_dtype is not None
    words = jnp.dtype(f"uint{8 * wire_dtype.itemsize}")
    largest = jnp.finfo(wire_dtype).max.astype(message.dtype)
    narrow = jnp.clip(message, -largest, largest).astype(wire_dtype)
    first = jax.lax.bitcast_convert_type(message[:1], words).ravel()
    body = _with_first(first[0], jax.lax.bitcast_convert_type(narrow, words))
    return jnp.concatenate([body, first[1:]])


def decode(words: jax.Array, wire_dtype: np.dtype | None, like: jax.Array) -> jax.Array:
    """The message, as wide as `like`, that arrives as these words."""
    if not narrows(like, wire_dtype):
        return words
    assert wire_dtype is not None
    body, end = words[: like.size], words[like.size :]
    first = jnp.concatenate([body[:1], end]).reshape(1, -1)
    narrow = jax.lax.bitcast_convert_type(body, wire_dtype)
    return _with_first(
        jax.lax.bitcast_convert_type(first, like.dtype)[0], narrow.astype(like.dtype)
    )


def _with_first(value: jax.Array, rest: jax.Array) -> jax.Array:
    return jnp.where(jax.lax.iota(jnp.int32, rest.size) == 0, value, rest)
