"""The form in which a buffer of a share travels: a floating-point type or the words of a codec."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire import (
    Codec,
    FloatCodec,
    IntegerCodec,
    WireLike,
    fold_in,
    require_codec,
    round_to,
)

Wire = np.dtype | Codec


def wire_types(dtypes: Iterable[np.dtype], wire: WireLike | None) -> tuple[Wire, ...]:
    """The forms in which buffers of these types travel."""
    if wire is None:
        return tuple(dtypes)
    codec = require_codec(wire, "wire")
    if isinstance(codec, IntegerCodec):
        return tuple(codec for _ in dtypes)
    if not isinstance(codec, FloatCodec) or codec.dtype == np.float16:
        raise ValueError(
            f"wire must be bfloat16, a wider type, int8() or int4(), got {codec}: half of a "
            "numerator may lie outside of a smaller range, and no value may be left out."
        )
    return tuple(min(dtype, codec.dtype, key=lambda d: d.itemsize) for dtype in dtypes)


def make_key(wires: Sequence[Wire], place: int, step: int) -> jax.Array | None:
    """Returns the random key for rounding after a step of a node, if rounding is random."""
    seeds = [wire.seed for wire in wires if isinstance(wire, IntegerCodec)]
    return fold_in(fold_in(jax.random.key(seeds[0]), place), step) if seeds else None


def narrow(x: jax.Array, wire: Wire, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns a buffer in the form that travels, and the values that arrive."""
    if isinstance(wire, Codec):
        words = wire.encode(x, key)
        return words, wire.decode(words, x)
    shared = round_to(x, wire)
    return shared.astype(wire), shared


class Words:
    """A buffer that a codec has encoded. As an array it has the values that arrive."""

    def __init__(self, words: np.ndarray, codec: Codec, size: int, dtype: np.dtype):
        self.words = words
        self._codec = codec
        self._like = jax.ShapeDtypeStruct((size,), dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        array = np.asarray(_decode(self.words, self._codec, self._like.size, self._like.dtype))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __mul__(self, factor: float) -> np.ndarray:
        return np.asarray(self) * factor


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decode(words: Any, codec: Codec, size: int, dtype: np.dtype) -> jax.Array:
    return codec.decode(jnp.asarray(words), jax.ShapeDtypeStruct((size,), dtype))


def to_host(shared: jax.Array, wire: Wire, like: jax.Array) -> Any:
    """Copies a buffer in the form that travels to the host."""
    array = np.asarray(shared)
    return Words(array, wire, like.size, like.dtype) if isinstance(wire, Codec) else array


def as_bytes(x: Any, wire: Wire) -> memoryview:
    """Returns the frame of a buffer, without a copy if its form allows."""
    if isinstance(wire, Codec):
        return x.words.view(np.uint8).data
    return np.ascontiguousarray(x, wire).view(np.uint8).data


def count_bytes(wire: Wire, size: int, dtype: np.dtype) -> int:
    """Returns the number of bytes of a frame."""
    if isinstance(wire, Codec):
        return wire.count_words(jax.ShapeDtypeStruct((size,), dtype)) * wire.word.itemsize
    return size * wire.itemsize


def read_frame(frame: Any, wire: Wire, size: int, dtype: np.dtype) -> np.ndarray:
    """Returns the buffer in a frame, in the type in which a node holds it."""
    if isinstance(wire, Codec):
        return np.asarray(Words(np.frombuffer(frame, wire.word), wire, size, dtype))
    return np.frombuffer(frame, wire).astype(dtype, copy=False)
