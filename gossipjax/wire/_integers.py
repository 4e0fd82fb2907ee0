"""Small integers with a scale per block, rounded at random: a quarter or an eighth of the bytes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire._codec import WORD, Codec, Like, require_key
from gossipjax.wire._require import require_seed

NOISE_BITS = 16  # of the number that is added before rounding down


@dataclasses.dataclass(frozen=True, repr=False)
class IntegerCodec(Codec):
    """Integers of `bits` bits and a scale per block; the rounding up or down is drawn.

    With `m = 2^(bits - 1) - 1` and a block's largest magnitude `a`, a value `v` becomes

        q = floor(m v / a + r),    r uniform in [0, 1);    v arrives as q a / m

    which is `v` on average. An array is cut into P = 32 / bits parts; word `i` holds the `i`-th
    value of every part, so that packing needs no transposition. Blocks lie inside the parts.
    """

    needs_key: ClassVar[bool] = True
    bits: int
    block: int
    seed: int

    @property
    def name(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"int{self.bits}(block={self.block}{seed})"

    @property
    def _parts(self) -> int:
        return 8 * WORD.itemsize // self.bits

    def _shape(self, size: int) -> tuple[int, int, int]:
        """The number of parts, the length of a part, and the number of blocks in it."""
        length = -(-size // self._parts)
        return self._parts, length, -(-length // self.block)

    def count_words(self, like: Like) -> int:
        parts, length, blocks = self._shape(like.size)
        return length + parts * blocks * like.dtype.itemsize // WORD.itemsize

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        parts, length, blocks = self._shape(array.size)
        rows = jnp.pad(array, (0, parts * length - array.size)).reshape(parts, length)
        rows = jnp.pad(rows, ((0, 0), (0, blocks * self.block - length)))
        rows = rows.reshape(parts, blocks, self.block)
        limit = 2 ** (self.bits - 1) - 1
        # Also where it is not finite: then what is decoded of the block is not finite either.
        scales = jnp.abs(rows).max(axis=-1) * np.asarray(1 / limit, array.dtype)
        inverse = jnp.where(scales > 0, 1 / scales, jnp.zeros_like(scales))
        noise = _noise(require_key(self, key), (parts // 2, blocks, self.block))
        words = jnp.zeros((), WORD)
        for part in range(parts):
            drawn = noise[part // 2] >> np.uint32(NOISE_BITS * (part % 2))
            # Between two multiples of the smallest step, so that integers stay what they are.
            drawn = (drawn % 2**NOISE_BITS).astype(array.dtype) + np.asarray(0.5, array.dtype)
            scaled = rows[part] * inverse[part][:, None]
            rounded = jnp.floor(scaled + drawn * np.asarray(2.0**-NOISE_BITS, array.dtype))
            number = jnp.clip(rounded, -limit, limit).astype(jnp.int32).astype(WORD)
            words |= (number % 2**self.bits) << np.uint32(self.bits * part)
        scale_words = jax.lax.bitcast_convert_type(scales, WORD).ravel()
        return jnp.concatenate([words.ravel()[:length], scale_words])

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        parts, length, blocks = self._shape(like.size)
        scale_words = words[length:].reshape(parts, blocks, like.dtype.itemsize // WORD.itemsize)
        scales = jax.lax.bitcast_convert_type(
            scale_words[..., 0] if like.dtype.itemsize == WORD.itemsize else scale_words, like.dtype
        )
        shifts = np.arange(32 - self.bits, -1, -self.bits, dtype=np.uint32)
        # The number moves to the top of the word, and down again with its sign.
        shifted = jax.lax.bitcast_convert_type(words[None, :length] << shifts[:, None], jnp.int32)
        numbers = (shifted >> (32 - self.bits)).astype(like.dtype)
        scales = jnp.broadcast_to(scales[..., None], (parts, blocks, self.block))
        return (numbers * scales.reshape(parts, -1)[:, :length]).ravel()[: like.size]


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random words: a hash of their index and of the key.

    Of a tenth of the cost of `jax.random.bits`, which on CPU takes longer than the rest of the
    message; rounding needs no more. The constants are those of Ellis' `lowbias32`.
    """
    first, second = jax.random.key_data(key)
    x = jax.lax.iota(WORD, int(np.prod(shape))) ^ first
    x = ((x ^ (x >> 16)) * np.uint32(0x7FEB352D)) ^ second
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)).reshape(shape)


def int8(block: int = 256, seed: int = 0) -> IntegerCodec:
    """Integers of 8 bits, a float32 scale per block: 0.254 of the bytes with blocks of 256.

    A value arrives off by less than 1/127 of the largest of its block, and right on average. Where
    a block holds a value that is not finite, the whole block arrives so; of zeros, it arrives so.

    Args:
      block: values that share a scale, a power of two.
      seed: of the rounding, which is drawn from it, from the number of the update and the node: a
        run that is resumed draws the same.

    Raises:
      ValueError: if `block` is not a power of two, or `seed` not an integer from 0 to 2^32 - 1.

    References:
      Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
      NIPS 2017, arXiv:1610.02132.

    >>> int8().count_bytes(25_600_000) / (4 * 25_600_000)
    0.25390625
    """
    return _integers(8, block, seed)


def int4(block: int = 256, seed: int = 0) -> IntegerCodec:
    """Integers of 4 bits, as `int8`: 0.129 of the bytes, off by less than 1/7 of the largest.

    >>> int4().count_bytes(25_600_000) / (4 * 25_600_000)
    0.12890625
    """
    return _integers(4, block, seed)


def _integers(bits: int, block: int, seed: int) -> IntegerCodec:
    is_integer = isinstance(block, int | np.integer) and not isinstance(block, bool)
    if not is_integer or block < 1 or block & (block - 1):
        raise ValueError(f"block of int{bits} must be a power of two, such as 256, got {block!r}.")
    return IntegerCodec(bits, int(block), require_seed(seed, f"int{bits}"))
