"""Small integers with one scale per block, rounded at random: 1/4 or 1/8 of the bytes."""

from __future__ import annotations

import dataclasses
import math
from functools import reduce
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire._codec import (
    WORD,
    Codec,
    Like,
    as_values,
    as_words,
    compute_once,
    require_key,
    require_seed,
)
from gossipjax.wire._messages import concatenate_in_place

NOISE_BITS = 16  # of the number that is added before rounding
SHORT_BLOCK = 16
OCTET = 8  # bits
MIN_BLOCK = 8  # whose integers of 4 bits fill a word
MANTISSA_BITS = 23  # of float32
ONE = np.uint32(0x3F800000)  # the bits of the float32 number 1
HALF_STEP = np.uint32(2 ** (MANTISSA_BITS - NOISE_BITS - 1))  # half of the noise's smallest step
TO_INTEGER = np.float32(1.5 * 2**MANTISSA_BITS)  # a sum with it has no bits after the point


@dataclasses.dataclass(frozen=True, repr=False)
class IntegerCodec(Codec):
    """A codec of integers of `bits` bits, rounded up or down at random, and one scale per block.

    With `m = 2^(bits - 1) - 1` and a block's largest magnitude `a`, a value `v` becomes

        q = round(m v / a + r),    r uniform in [-1/2, 1/2);    v arrives as q a / m

    On average a value arrives unchanged. An array is cut into as few blocks as possible, of at most
    `block` values and of one length; zeros fill up the last block. The message contains all
    integers, and then all scales. Integers of 8 bits keep their order in the words, so packing does
    not move them. A byte contains two integers of 4 bits, one from each half of the block.

    >>> (int4().bits, int8().bits)
    (4, 8)
    """

    needs_key: ClassVar[bool] = True
    bits: int
    block: int
    seed: int

    @property
    def name(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"int{self.bits}(block={self.block}{seed})"

    def _cut(self, size: int) -> tuple[int, int]:
        """Returns the number of blocks of an array, and the length of each."""
        blocks = max(1, -(-size // self.block))
        length = -(-size // (blocks * MIN_BLOCK)) * MIN_BLOCK
        # As the length is rounded up, fewer blocks may be enough.
        return (-(-size // length), length) if size else (0, MIN_BLOCK)

    def _count_integer_words(self, size: int) -> int:
        blocks, length = self._cut(size)
        return blocks * length * self.bits // (8 * WORD.itemsize)

    def count_words(self, like: Like) -> int:
        blocks, _ = self._cut(like.size)
        scale_words = blocks * like.dtype.itemsize // WORD.itemsize
        return self._count_integer_words(like.size) + scale_words

    def join(self, size: int) -> tuple[Codec, int] | None:
        blocks, length = self._cut(size)  # padded to whole blocks, so each keeps its scale
        return dataclasses.replace(self, block=length), blocks * length

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Encodes an array as the integers of all blocks, and then their scales."""
        checked_key: jax.Array = require_key(self, key)
        blocks, length = self._cut(array.size)
        if not blocks:
            return jnp.zeros(0, WORD)
        # The last block is padded apart from the whole ones: with one padding for all, XLA would
        # test for every value whether it is of the array.
        end = array.size // length * length  # of the whole blocks
        last_block = jnp.pad(array[end:], (0, blocks * length - array.size))
        words = []
        scales = []
        for start, values in ((0, array[:end]), (end, last_block)):
            if values.size:
                rows = values.reshape(-1, length)
                scale = _find_largest(rows) * np.asarray(1 / self._limit, array.dtype)
                words.append(self._pack(self._round(rows, scale, checked_key, start)))
                scales.append(as_words(scale))
        return compute_once(concatenate_in_place([*words, *scales]))

    @property
    def _limit(self) -> int:
        """The largest integer that is sent, m in the formula of the class."""
        return 2 ** (self.bits - 1) - 1

    def _round(self, values: jax.Array, scales: jax.Array, key: jax.Array, start: int) -> jax.Array:
        """Rounds `[blocks, length]` values at random to integers, the last `bits` bits of words.

        `start` is the index of the first value in the array; it decides which numbers are drawn.
        """
        inverse = jnp.where(scales > 0, 1 / scales, 0)
        # Random bits become the mantissa of a float32 in [1, 2). Half a step is added, so the
        # noise is never exactly -1/2 or 1/2, and a value that is an integer stays the same.
        drawn = draw_words(key, start, values.shape) >> np.uint32(32 - NOISE_BITS)
        digits = (drawn << np.uint32(MANTISSA_BITS - NOISE_BITS)) | HALF_STEP
        noise = jax.lax.bitcast_convert_type(digits | ONE, jnp.float32) - np.float32(1.5)
        scaled = (values * inverse[:, None]).astype(jnp.float32)
        # The addition rounds to an integer, and leaves its bits at the end of the mantissa.
        moved = jnp.clip(scaled + noise, -self._limit, self._limit) + TO_INTEGER
        return jax.lax.bitcast_convert_type(moved, WORD) % 2**self.bits

    def _pack(self, integers: jax.Array) -> jax.Array:
        """Packs integers `[blocks, length]`, each in the last bits of a word, into full words."""
        parts = jnp.split(integers, OCTET // self.bits, axis=1)
        shifted = [part << np.uint32(self.bits * i) for i, part in enumerate(parts)]
        octets = reduce(jnp.bitwise_or, shifted).reshape(-1, WORD.itemsize)

        def join_by_shifts(octets: jax.Array) -> jax.Array:
            moved = [octets[:, i] << np.uint32(OCTET * i) for i in range(WORD.itemsize)]
            return reduce(jnp.bitwise_or, moved)

        def join_bytes(octets: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(octets.astype(jnp.uint8), WORD)

        # XLA for GPUs converted such bits to bytes wrongly; on CPUs bytes take half the time.
        return jax.lax.platform_dependent(octets, cpu=join_bytes, default=join_by_shifts)

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        """Unpacks the integers of all blocks, and multiplies each by the scale of its block."""
        blocks, length = self._cut(like.size)
        if not blocks:
            return jnp.zeros(0, like.dtype)
        packed, scales = jnp.split(words, [self._count_integer_words(like.size)])
        octets = jax.lax.bitcast_convert_type(packed, jnp.int8).reshape(blocks, 1, -1)
        # Shift each integer to the top of its byte and down again, which extends its sign.
        shifts = np.arange(OCTET - self.bits, -1, -self.bits, dtype=np.int8)[None, :, None]
        integers = (octets << shifts) >> np.int8(OCTET - self.bits)
        scales = as_values(scales, (blocks, 1), like.dtype)
        values = integers.reshape(blocks, length).astype(like.dtype) * scales
        return values.ravel()[: like.size]


def _find_largest(values: jax.Array) -> jax.Array:
    """Returns the largest magnitude of each block of `[..., block]`; not finite if a value is not.

    It compares the two halves of a block again and again. XLA on CPU vectorizes this, but not a
    reduction.
    """
    largest = jnp.abs(values)
    while largest.shape[-1] > SHORT_BLOCK and largest.shape[-1] % 2 == 0:
        half = largest.shape[-1] // 2
        largest = jnp.maximum(largest[..., :half], largest[..., half:])
    return largest.max(axis=-1)


def draw_words(key: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns random words of this shape: a hash of the key and of each index, from `start` on.

    The hash takes a tenth of the time of `jax.random.bits`, which on CPU takes longer than the rest
    of the message, and it is random enough for rounding. Its constants are from Ellis' `lowbias32`.
    """
    first, second = jax.random.key_data(key)
    indices = jax.lax.iota(WORD, math.prod(shape)).reshape(shape) + np.uint32(start)
    x = indices ^ first
    x = ((x ^ (x >> 16)) * np.uint32(0x7FEB352D)) ^ second
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def int8(block: int = 256, *, seed: int = 0) -> IntegerCodec:
    """Returns a codec of 8-bit integers with one float32 scale per block.

    In blocks of 256 a message has 0.254 of the bytes of float32.

    A value arrives with an error below 1/127 of the largest magnitude of its block; on average the
    error is 0. If a block contains a value that is not finite, no value of the block arrives
    finite. A block of zeros arrives as zeros.

    Args:
      block: the largest number of values that share a scale, a power of two from 8 on.
      seed: the seed of the rounding. Random numbers depend on the seed, the number of the update
        and the node, so a resumed run draws the same numbers.

    Raises:
      ValueError: if `block` is not a power of two from 8 on, or `seed` is not an integer from 0 to
        2^32 - 1.

    References:
      Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
      NIPS 2017, arXiv:1610.02132.

    >>> int8().count_bytes(25_600_000) / (4 * 25_600_000)
    0.25390625
    """
    return _make_codec(8, block, seed)


def int4(block: int = 256, *, seed: int = 0) -> IntegerCodec:
    """Returns a codec like `int8`, with 4 bits: errors are below 1/7 of the block's maximum.

    In blocks of 256 a message has 0.129 of the bytes of float32.

    >>> int4().count_bytes(25_600_000) / (4 * 25_600_000)
    0.12890625
    """
    return _make_codec(4, block, seed)


def _make_codec(bits: int, block: int, seed: int) -> IntegerCodec:
    """Makes the codec; raises `ValueError` if `block` is no power of two, or is below 8."""
    if block < MIN_BLOCK or block & (block - 1):
        raise ValueError(
            f"block of int{bits} must be a power of two, {MIN_BLOCK} at least, such as 256, got "
            f"{block!r}."
        )
    return IntegerCodec(bits, int(block), require_seed(seed, f"int{bits}"))
