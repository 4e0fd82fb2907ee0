"""Narrower floating-point types: every value is rounded, and the words are the bits of the type."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.wire._codec import Codec, Like

MIN_BITS = 16  # of a floating-point type that can be averaged or sent


def is_real_float(dtype: DTypeLike) -> bool:
    """Whether `dtype` is a real floating-point type of at least 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= MIN_BITS


@dataclasses.dataclass(frozen=True, repr=False)
class FloatCodec(Codec):
    """Values rounded to a floating-point type, as unsigned integers of the same bits.

    Where the type has a smaller range than the values, an array takes one more word: the power of
    two by which it is divided.

    >>> bfloat16().dtype.name
    'bfloat16'
    """

    is_elementwise: ClassVar[bool] = True
    dtype: np.dtype

    @property
    def name(self) -> str:
        return f"{self.dtype.name}()"

    @property
    def word(self) -> np.dtype:
        return jnp.dtype(f"uint{8 * self.dtype.itemsize}")

    def applies_to(self, dtype: np.dtype) -> bool:
        return self.dtype.itemsize < dtype.itemsize

    def is_scaled(self, array: Like) -> bool:
        """Whether an array's values may exceed the range of the type."""
        has_smaller_range = jnp.finfo(self.dtype).maxexp < jnp.finfo(array.dtype).maxexp
        return has_smaller_range and array.size > 1

    def count_words(self, like: Like) -> int:
        return like.size + self.is_scaled(like)

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        del key
        if not self.is_scaled(array):
            return jax.lax.bitcast_convert_type(array.astype(self.dtype), self.word)
        magnitudes = jnp.where(jnp.isfinite(array), jnp.abs(array), jnp.zeros_like(array))
        _, exponent = jnp.frexp(magnitudes.max())  # the largest is below 2^exponent
        # Rounding up reaches 2^(maxexp - 1) at most. Both powers of two are normal numbers.
        limit = jnp.finfo(array.dtype).maxexp - 2
        exponent = jnp.clip(exponent - (jnp.finfo(self.dtype).maxexp - 1), -limit, limit)
        scaled = (array * _power_of_two(-exponent, array.dtype)).astype(self.dtype)
        header = exponent.astype(f"int{8 * self.word.itemsize}").reshape(1)
        words = [jax.lax.bitcast_convert_type(part, self.word) for part in (header, scaled)]
        return jnp.concatenate(words)

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        if not self.is_scaled(like):
            return jax.lax.bitcast_convert_type(words, self.dtype).astype(like.dtype)
        exponent = jax.lax.bitcast_convert_type(words[0], f"int{8 * self.word.itemsize}")
        values = jax.lax.bitcast_convert_type(words[1:], self.dtype).astype(like.dtype)
        return values * _power_of_two(exponent.astype(jnp.int32), like.dtype)


def _power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def float32() -> FloatCodec:
    """Values in float32, which is full precision for what is float32: for `gx.choco`.

    >>> float32().count_bytes(1000)
    4000
    """
    return FloatCodec(jnp.dtype(jnp.float32))


def bfloat16() -> FloatCodec:
    """Values rounded to bfloat16: half the bytes, 2^-9 of a value at most.

    >>> bfloat16().count_bytes(1000)
    2000
    """
    return FloatCodec(jnp.dtype(jnp.bfloat16))


def float16() -> FloatCodec:
    """Values rounded to float16, 2^-12 of a value at most, and a power of two that scales them.

    >>> float16().count_bytes(1000)
    2002
    """
    return FloatCodec(jnp.dtype(jnp.float16))
