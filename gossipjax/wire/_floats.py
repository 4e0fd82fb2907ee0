"""Narrower floating-point types: every value is rounded, and its bits are the word."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.wire._codec import Codec, Like, compute_once

MIN_BITS = 16  # of a floating-point type that can be averaged or sent


def is_real_float(dtype: DTypeLike) -> bool:
    """Says whether `dtype` is a real floating-point type of at least 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= MIN_BITS


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to the values of `dtype`; the result keeps the type of `x`.

    XLA for GPUs drops a conversion to a narrow type and back (`xla_allow_excess_precision`), and
    then `x - rounded` would be 0. XLA does not drop this function.
    """
    info = jnp.finfo(dtype)
    if x.dtype == dtype:
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return rounded
    # `reduce_precision` returns 0 for the subnormal values of the narrower type, which for float16
    # are those below 6e-5. Round these to multiples of the smallest one.
    smallest = float(info.smallest_subnormal)
    subnormal = jax.lax.round(
        x * jnp.asarray(1 / smallest, x.dtype), jax.lax.RoundingMethod.TO_NEAREST_EVEN
    ) * jnp.asarray(smallest, x.dtype)
    return jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)


@dataclasses.dataclass(frozen=True, repr=False)
class FloatCodec(Codec):
    """A codec that rounds to a floating-point type and sends the bits as unsigned integers.

    If the type has a smaller range than the values, each array is divided by a power of two. The
    power travels as one more word.

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
        """Says whether a message has a power of two, as values may exceed the range of the type."""
        has_smaller_range = jnp.finfo(self.dtype).maxexp < jnp.finfo(array.dtype).maxexp
        return has_smaller_range and array.size > 1

    def count_words(self, like: Like) -> int:
        return like.size + self.is_scaled(like)

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Rounds the values; returns their bits, and before them the power of two, if any."""
        del key
        if not self.is_scaled(array):
            return self._as_words(array)
        magnitudes = jnp.where(jnp.isfinite(array), jnp.abs(array), jnp.zeros_like(array))
        _, exponent = jnp.frexp(magnitudes.max())  # the largest is below 2^exponent
        # Rounding up reaches 2^(maxexp - 1) at most. The limit keeps both powers of two, 2^exponent
        # and 2^-exponent, normal numbers.
        limit = jnp.finfo(array.dtype).maxexp - 2
        exponent = jnp.clip(exponent - (jnp.finfo(self.dtype).maxexp - 1), -limit, limit)
        header = exponent.astype(f"int{8 * self.word.itemsize}").reshape(1)
        header = jax.lax.bitcast_convert_type(header, self.word)
        scaled = array * _power_of_two(-exponent, array.dtype)
        return jnp.concatenate([header, self._as_words(scaled)])

    def _as_words(self, array: jax.Array) -> jax.Array:
        """Rounds an array to the type of the codec; returns the bits as words."""
        rounded = round_to(array, self.dtype).astype(self.dtype)
        return compute_once(jax.lax.bitcast_convert_type(rounded, self.word))

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        """Returns the values of the bits, times the power of two in the first word, if any."""
        if not self.is_scaled(like):
            return jax.lax.bitcast_convert_type(words, self.dtype).astype(like.dtype)
        exponent = jax.lax.bitcast_convert_type(words[0], f"int{8 * self.word.itemsize}")
        values = jax.lax.bitcast_convert_type(words[1:], self.dtype).astype(like.dtype)
        return values * _power_of_two(exponent.astype(jnp.int32), like.dtype)


def _power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    return jnp.ldexp(jnp.ones((), dtype), exponent)


def float32() -> FloatCodec:
    """Returns a codec that sends float32, such as for `gx.choco`: float32 models lose nothing.

    >>> float32().count_bytes(1000)
    4000
    """
    return FloatCodec(jnp.dtype(jnp.float32))


def bfloat16() -> FloatCodec:
    """Returns a codec that rounds to bfloat16, by at most 2^-8 of a value: half of float32's bytes.

    >>> bfloat16().count_bytes(1000)
    2000
    """
    return FloatCodec(jnp.dtype(jnp.bfloat16))


def float16() -> FloatCodec:
    """Returns a codec that scales by a power of 2 and rounds to float16: an error of at most 2^-11.

    The error is relative. Values below 2^-29 of the largest lose more digits.

    >>> float16().count_bytes(1000)
    2002
    """
    return FloatCodec(jnp.dtype(jnp.float16))
