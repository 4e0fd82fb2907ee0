"""The form in which a buffer of a share travels: as it is, or as the words of a codec."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire import Codec, WireLike, fold_in, require_codec

Wire = Codec | None  # None: a buffer travels as it is


def choose_wires(dtypes: Iterable[np.dtype], wire: WireLike | None) -> tuple[Wire, ...]:
    """The forms in which buffers of these types travel."""
    if wire is None:
        return tuple(None for _ in dtypes)
    codec = require_codec(wire, "wire")
    if codec.is_sparse:
        raise ValueError(
            f"wire must be a floating-point type, int8() or int4(), got {codec}: of a share no "
            "value may be left out."
        )
    return tuple(codec if codec.applies_to(dtype) else None for dtype in dtypes)


def make_key(wires: Sequence[Wire], place: int, step: int) -> jax.Array | None:
    """Returns the random key for rounding after a step of a node, if rounding is random."""
    seeds = [wire.seed for wire in wires if wire and wire.needs_key]  # pyright: ignore[reportAttributeAccessIssue]
    return fold_in(fold_in(jax.random.key(seeds[0]), place), step) if seeds else None


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


def as_bytes(x: Any, wire: Wire, dtype: np.dtype) -> memoryview:
    """Returns the frame of a buffer, without a copy if its form allows."""
    array = np.ascontiguousarray(x, dtype) if wire is None else x.words
    return array.view(np.uint8).data


def count_bytes(wire: Wire, size: int, dtype: np.dtype) -> int:
    """Returns the number of bytes of a frame."""
    if wire is None:
        return size * dtype.itemsize
    return wire.count_words(jax.ShapeDtypeStruct((size,), dtype)) * wire.word.itemsize


def read_frame(frame: Any, wire: Wire, size: int, dtype: np.dtype) -> np.ndarray:
    """Returns the buffer in a frame, in the type in which a node holds it."""
    if wire is None:
        return np.frombuffer(frame, dtype)
    return np.asarray(Words(np.frombuffer(frame, wire.word), wire, size, dtype))
