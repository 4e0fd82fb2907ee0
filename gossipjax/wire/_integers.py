"""Small integers with a scale per block, rounded at random: a quarter or an eighth of the bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire._codec import WORD, Codec, Like, require_key, require_seed
from gossipjax.wire._messages import concatenate_in_place, is_cpu_over_processes, split_by_size

NOISE_BITS = 16  # of the number that is added before rounding
SHORT_BLOCK = 16
# Of float32: the number 1, half a step of the noise, and what leaves no digits after the point.
MANTISSA_BITS = 23
ONE = np.uint32(0x3F800000)
HALF_STEP = np.uint32(2 ** (MANTISSA_BITS - NOISE_BITS - 1))
TO_INTEGER = np.float32(1.5 * 2**MANTISSA_BITS)

Shape = tuple[int, int, int]
"""Groups, parts of a word, and words of a group."""


@dataclasses.dataclass(frozen=True, repr=False)
class IntegerCodec(Codec):
    """Integers of `bits` bits and a scale per block; the rounding up or down is drawn.

    With `m = 2^(bits - 1) - 1` and a block's largest magnitude `a`, a value `v` becomes

        q = round(m v / a + r),    r uniform in [-1/2, 1/2);    v arrives as q a / m

    which is `v` on average. P = 32 / bits consecutive blocks make a group of `block` words: the
    `i`-th has the `i`-th value of each of these blocks, so that packing needs no transposition.
    What is left at the end of an array is a smaller group. All words come first, then all scales.
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

    def _shapes(self, size: int) -> list[Shape]:
        """`[groups, parts, block]` of the whole groups, and of the smaller one; none of size 0."""
        whole, rest = divmod(size, self._parts * self.block)
        shapes = [(whole, self._parts, self.block), (1, self._parts, -(-rest // self._parts))]
        return [shape for shape in shapes if math.prod(shape)]

    def count_words(self, like: Like) -> int:
        scales = sum(groups * parts for groups, parts, _ in self._shapes(like.size))
        return -(-like.size // self._parts) + scales * like.dtype.itemsize // WORD.itemsize

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        given: jax.Array = require_key(self, key)
        words = []
        scales = []
        start = 0
        for shape in self._shapes(array.size):
            values = _take(array, start, shape)
            scale = _find_largest(values) * np.asarray(1 / self._limit, array.dtype)
            words.append(self._pack_apart(array, start, scale, given, shape).ravel())
            scales.append(jax.lax.bitcast_convert_type(scale, WORD).ravel())
            start += math.prod(shape)
        if not words:
            return jnp.zeros(0, WORD)
        # Computed once: XLA could round another way where it computes them again for the sender,
        # which would then keep another rest than the receivers miss.
        return jax.lax.optimization_barrier(concatenate_in_place([*words, *scales]))

    @property
    def _limit(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _pack_apart(
        self, array: jax.Array, start: int, scales: jax.Array, key: jax.Array, shape: Shape
    ) -> jax.Array:
        """`_pack` of a part of `array`, as a loop of its own where messages go through Gloo.

        XLA on CPU would make one loop of it and of the concatenation that follows, with a branch
        for each word, which takes twice as long as both. It does not look into branches.
        """

        def pack() -> jax.Array:
            # Taken here, as what is given to a branch is copied first.
            return self._pack(_take(array, start, shape), scales, _noise(key, start, shape))

        if not is_cpu_over_processes():
            return pack()
        # Zeros on the same devices as the words are.
        nothing = jax.lax.bitcast_convert_type(scales, WORD).ravel()[0] % 1
        empty = jnp.broadcast_to(nothing, (shape[0], shape[2]))
        return jax.lax.cond((scales > 0).any(), pack, lambda: empty)

    def _pack(self, values: jax.Array, scales: jax.Array, noise: jax.Array) -> jax.Array:
        """`[groups, block]` words of `[groups, parts, block]` values, with noise for two each."""
        inverse = jnp.where(scales > 0, 1 / scales, 0)
        words = jnp.zeros((), WORD)
        for part in range(self._parts):
            drawn = noise[:, part // 2] >> np.uint32(NOISE_BITS * (part % 2))
            # The digits of a number in [1, 2), between two multiples of the smallest step, so that
            # integers stay what they are.
            digits = ((drawn % 2**NOISE_BITS) << MANTISSA_BITS - NOISE_BITS) | HALF_STEP
            drawn = jax.lax.bitcast_convert_type(digits | ONE, jnp.float32) - np.float32(1.5)
            scaled = (values[:, part] * inverse[:, part, None]).astype(jnp.float32)
            # The sum is rounded to an integer, whose digits are then the last of its mantissa.
            moved = jnp.clip(scaled + drawn, -self._limit, self._limit) + TO_INTEGER
            number = jax.lax.bitcast_convert_type(moved, WORD) % 2**self.bits
            words |= number << np.uint32(self.bits * part)
        return words

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        shapes = self._shapes(like.size)
        scale_words = like.dtype.itemsize // WORD.itemsize
        sizes = [groups * block for groups, _, block in shapes]
        sizes += [groups * parts * scale_words for groups, parts, _ in shapes]
        pieces = split_by_size(words, sizes)
        count = len(shapes)
        values = [
            self._unpack(pieces[i], pieces[count + i], shape, like)
            for i, shape in enumerate(shapes)
        ]
        values = concatenate_in_place(values) if values else jnp.zeros(0, like.dtype)
        return values[: like.size]

    def _unpack(self, words: jax.Array, scales: jax.Array, shape: Shape, like: Like) -> jax.Array:
        groups, parts, block = shape
        if like.dtype.itemsize > WORD.itemsize:
            scales = scales.reshape(groups, parts, -1)
        scales = jax.lax.bitcast_convert_type(scales, like.dtype).reshape(groups, parts, 1)
        shifts = np.arange(32 - self.bits, -1, -self.bits, dtype=np.uint32)[None, :, None]
        # The number moves to the top of the word, and down again with its sign.
        shifted = words.reshape(groups, 1, block) << shifts
        numbers = jax.lax.bitcast_convert_type(shifted, jnp.int32) >> (32 - self.bits)
        return (numbers.astype(like.dtype) * scales).ravel()


def _take(array: jax.Array, start: int, shape: Shape) -> jax.Array:
    """The values of `array` from `start` on, in this shape; zeros after the last."""
    size = math.prod(shape)
    values = array[start : start + size]
    return jnp.pad(values, (0, size - values.size)).reshape(shape)


def _find_largest(values: jax.Array) -> jax.Array:
    """The largest magnitude of each block, `[..., block]`; not finite where a value is not.

    Halves are compared as long as they are long, which is vectorized on CPU; a reduction is not.
    """
    largest = jnp.abs(values)
    while largest.shape[-1] > SHORT_BLOCK and largest.shape[-1] % 2 == 0:
        half = largest.shape[-1] // 2
        largest = jnp.maximum(largest[..., :half], largest[..., half:])
    return largest.max(axis=-1)


def _noise(key: jax.Array, start: int, shape: Shape) -> jax.Array:
    """Returns random words, one for two values: a hash of their place and of the key.

    Of a tenth of the cost of `jax.random.bits`, which on CPU takes longer than the rest of the
    message; rounding needs no more. The constants are those of Ellis' `lowbias32`.
    """
    groups, parts, block = shape
    first, second = jax.random.key_data(key)
    places = jax.lax.iota(WORD, groups * parts // 2 * block) + np.uint32(start // 2)
    x = places ^ first
    x = ((x ^ (x >> 16)) * np.uint32(0x7FEB352D)) ^ second
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)).reshape(groups, parts // 2, block)


def int8(block: int = 256, seed: int = 0) -> IntegerCodec:
    """Integers of 8 bits, a float32 scale per block: 0.254 of the bytes with blocks of 256.

    A value arrives off by less than 1/127 of the largest of its block, and right on average. Where
    a block holds a value that is not finite, the whole block arrives so; of zeros, it arrives so.

    Args:
      block: values that share a scale, a power of two.
      seed: of the rounding, which is drawn from it, the number of the update and the node: a
        resumed run draws the same.

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
