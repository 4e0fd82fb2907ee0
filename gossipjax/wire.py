"""The form in which messages travel: over which axes, in which type, and as which words.

A message is one or several flat arrays. Arrays of a lower-precision `wire_dtype` travel as
unsigned integers of the same bits, because XLA on CPU would widen a bfloat16 collective to float32.

A value on the wire is rounded by half a unit of the type's last digit at most: 2^-9 of the value in
bfloat16, 2^-12 in float16. Where the type has a smaller range than the values, as float16, every
array travels divided by a power of two, which fits its largest finite value and travels with it.
Values that are not finite arrive as such. The smallest consensus distance that gossip reaches is
then that of the rounding: about 1.3e-3 of the model's norm in bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

__all__ = ["Wire", "concatenate_in_place", "decode", "encode", "is_narrower", "make_wire"]

Like = jax.Array | jax.ShapeDtypeStruct  # which has a size and a type
MIN_BITS = 16  # of a floating-point type that can be averaged or sent


class Wire(NamedTuple):
    """The route and the type of messages.

    Attributes:
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node; None if a node is one device.
      dtype: the type of the values on the wire; None for their full precision.
    """

    axis_name: str = "nodes"
    local_axis_name: str | None = None
    dtype: np.dtype | None = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a transform's factory that make this wire again."""
        return {
            "axis_name": self.axis_name,
            "local_axis_name": self.local_axis_name,
            "wire_dtype": self.dtype,
        }


def make_wire(
    axis_name: str, local_axis_name: str | None = None, wire_dtype: DTypeLike | None = None
) -> Wire:
    """Returns the `Wire` of a factory's arguments.

    Raises:
      ValueError: if `wire_dtype` is not a floating-point type of at least 16 bits.

    >>> make_wire("nodes", wire_dtype="bfloat16").dtype
    dtype(bfloat16)
    """
    return Wire(axis_name, local_axis_name, require_wire_dtype(wire_dtype))


def require_wire_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Returns `dtype` as a dtype, or None; raises `ValueError` as `make_wire` does."""
    if dtype is None:
        return None
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or not is_real_float(result):
        raise ValueError(
            f"wire_dtype must be a floating-point type of {MIN_BITS} bits or more, such as "
            f"jnp.bfloat16, or None for full precision, got {dtype!r}."
        )
    return result


def is_real_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a real floating-point type of at least 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= MIN_BITS


def is_narrower(wire_dtype: np.dtype | None, dtype: np.dtype) -> bool:
    """Whether a message of `dtype` takes fewer bits as `wire_dtype`."""
    return wire_dtype is not None and wire_dtype.itemsize < dtype.itemsize


def encode(arrays: Sequence[jax.Array], wire_dtype: np.dtype | None) -> jax.Array:
    """Returns the words of flat arrays of one type, one array after another.

    A single value, such as a push-sum weight, keeps its full precision. An array of a larger range
    than `wire_dtype` takes one more word, the power of two that it is divided by. What is not
    finite stays so.

    >>> encode([jnp.array([1.0, 2.0])], jnp.dtype(jnp.bfloat16)).dtype
    dtype('uint16')
    >>> encode([jnp.array([1e6, 2e6])], jnp.dtype(jnp.float16)).shape
    (3,)
    """
    return concatenate_in_place([x for array in arrays for x in _encode_array(array, wire_dtype)])


def _encode_array(array: jax.Array, wire_dtype: np.dtype | None) -> list[jax.Array]:
    if wire_dtype is None or not is_narrower(wire_dtype, array.dtype):
        return [array]
    if array.size == 1:
        word = jnp.dtype(f"uint{8 * wire_dtype.itemsize}")
        return [jax.lax.bitcast_convert_type(array, word).ravel()]
    return _round(array, wire_dtype)


def _round(array: jax.Array, wire_dtype: np.dtype) -> list[jax.Array]:
    """The words of an array of which every value is rounded; before them their power of two."""
    word = jnp.dtype(f"uint{8 * wire_dtype.itemsize}")
    if not _is_scaled(wire_dtype, array):
        return [jax.lax.bitcast_convert_type(array.astype(wire_dtype), word)]
    magnitudes = jnp.where(jnp.isfinite(array), jnp.abs(array), jnp.zeros_like(array))
    _, exponent = jnp.frexp(magnitudes.max())  # the largest is below 2^exponent
    # Rounding up reaches 2^(maxexp - 1) at most. Both powers of two are normal numbers.
    limit = jnp.finfo(array.dtype).maxexp - 2
    exponent = jnp.clip(exponent - (jnp.finfo(wire_dtype).maxexp - 1), -limit, limit)
    scaled = array * _power_of_two(-exponent, array.dtype)
    header = jax.lax.bitcast_convert_type(exponent.astype(f"int{8 * word.itemsize}"), word)
    return [header.reshape(1), jax.lax.bitcast_convert_type(scaled.astype(wire_dtype), word)]


def encode_rounded(pieces: Sequence[jax.Array], wire_dtype: np.dtype) -> jax.Array:
    """Returns the words of one array, given in pieces, of which every value is rounded.

    Pieces are rounded before they are concatenated, which then moves half the bytes.
    """
    if any(_is_scaled(wire_dtype, piece) for piece in pieces):
        pieces = [concatenate_in_place(pieces)]
    return concatenate_in_place([words for p in pieces for words in _round(p, wire_dtype)])


def _is_scaled(wire_dtype: np.dtype, array: Like) -> bool:
    """Whether an array's values may exceed the range of the type on the wire."""
    has_smaller_range = jnp.finfo(wire_dtype).maxexp < jnp.finfo(array.dtype).maxexp
    return has_smaller_range and array.size > 1


def _power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def decode(words: jax.Array, wire_dtype: np.dtype | None, like: Sequence[Like]) -> list[jax.Array]:
    """Returns the flat arrays that `encode` made `words` of, in the sizes and types of `like`."""
    sizes = [_count_words(words.dtype, wire_dtype, array) for array in like]
    return [
        _decode_array(part, wire_dtype, array)
        for part, array in zip(split_by_size(words, sizes), like, strict=True)
    ]


def _count_words(word: np.dtype, wire_dtype: np.dtype | None, array: Like) -> int:
    if wire_dtype is None or not is_narrower(wire_dtype, array.dtype):
        return array.size
    if array.size == 1:
        return array.dtype.itemsize // word.itemsize
    return array.size + _is_scaled(wire_dtype, array)


def _decode_array(words: jax.Array, wire_dtype: np.dtype | None, like: Like) -> jax.Array:
    if wire_dtype is None or not is_narrower(wire_dtype, like.dtype):
        return words
    if like.size == 1:
        return jax.lax.bitcast_convert_type(words.reshape(1, -1), like.dtype)
    if not _is_scaled(wire_dtype, like):
        return jax.lax.bitcast_convert_type(words, wire_dtype).astype(like.dtype)
    exponent = jax.lax.bitcast_convert_type(words[0], f"int{8 * words.dtype.itemsize}")
    values = jax.lax.bitcast_convert_type(words[1:], wire_dtype).astype(like.dtype)
    return values * _power_of_two(exponent.astype(jnp.int32), like.dtype)


def split_by_size(buffer: Any, sizes: Sequence[int]) -> list[Any]:
    """Returns the consecutive slices of a flat buffer, of JAX or NumPy, that have these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    return [buffer[start:stop] for start, stop in itertools.pairwise(ends)]


def concatenate_in_place(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the concatenation; every array is computed at its offset in the result.

    So on GPUs, and on CPU over several processes; the result may then not be an output that takes a
    donated argument's memory. A concatenation of many arrays costs two more passes over memory; the
    explicit writes cost one. In one process on CPU, where nodes are simulated, XLA may fuse such
    writes with a permutation of what they write to.
    """
    if len(arrays) == 1:
        return arrays[0]
    if is_cpu_over_processes():
        return _write_slices(arrays)
    on_gpu = {"cuda": _write_slices, "rocm": _write_slices}
    return jax.lax.platform_dependent(arrays, default=jnp.concatenate, **on_gpu)


def is_cpu_over_processes() -> bool:
    """Whether messages go through Gloo: JAX on CPU, over several processes."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _write_slices(arrays: Sequence[jax.Array]) -> jax.Array:
    buffer = jax.lax.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    start = 0
    for array in arrays:
        buffer = jax.lax.dynamic_update_slice(buffer, array, (start,))
        start += array.size
    return buffer
