"""The largest values of each block in 14 bits each: SparseLoCo's messages."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.topology.schedule import require_int
from gossipjax.wire._codec import WORD, Codec, Like, as_values, as_words

INDEX_BITS = 12
BINS = 4
RANGE = 6  # standard deviations of the values, which the bins divide evenly
CODE_BITS = INDEX_BITS + 2
WORD_BITS = 8 * WORD.itemsize
GROUP = 16  # as few codes fill whole words
GROUP_WORDS = GROUP * CODE_BITS // WORD_BITS


@dataclasses.dataclass(frozen=True, repr=False)
class BlockTopK(Codec):
    """The `count` values of the largest magnitude of every block, each with its bin.

    An array is cut into as few blocks as possible, of at most `block` values and of one length;
    zeros fill up the last block. The message contains all codes, and then a table of 4 values for
    each block. A code is the index of a value in its block, in 12 bits, and the value's bin, in 2
    bits; 16 codes take 7 words.

    >>> block_top_k(8, 256)
    block_top_k(8, block=256)
    """

    is_sparse: ClassVar[bool] = True
    count: int
    block: int

    @property
    def name(self) -> str:
        return f"block_top_k({self.count}, block={self.block})"

    def _cut(self, size: int) -> tuple[int, int, int]:
        """Returns how many blocks an array has, their length, and how many values each sends."""
        blocks = -(-size // self.block)
        length = -(-size // max(1, blocks))
        return blocks, length, min(self.count, length)

    def _count_code_words(self, size: int) -> int:
        """Returns the number of words of the codes of all blocks, which come before the tables."""
        blocks, _, count = self._cut(size)
        return -(-blocks * count // GROUP) * GROUP_WORDS

    def count_words(self, like: Like) -> int:
        blocks, _, _ = self._cut(like.size)
        table = blocks * BINS * like.dtype.itemsize // WORD.itemsize
        return self._count_code_words(like.size) + table

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Encodes an array as the codes of all blocks, and then their tables of means."""
        del key
        blocks, length, count = self._cut(array.size)
        if not blocks:
            return jnp.zeros(0, WORD)
        rows = jnp.pad(array, (0, blocks * length - array.size)).reshape(blocks, length)
        # Values that are not finite count as the largest, so that receivers hear of them.
        magnitudes = jnp.where(jnp.isfinite(rows), jnp.abs(rows), np.asarray(np.inf, rows.dtype))
        _, indices = jax.lax.top_k(magnitudes, count)
        values = jnp.take_along_axis(rows, indices, axis=1)
        bins = _find_bins(values)
        codes = indices.astype(WORD) | bins << np.uint32(INDEX_BITS)
        table = as_words(_average_bins(values, bins))
        # Computed once, so that the sender keeps what its receivers miss; see `IntegerCodec`.
        return jax.lax.optimization_barrier(jnp.concatenate([_pack(codes.ravel()), table]))

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        """Puts the mean of a value's bin at the value's index; values that were not sent are 0."""
        blocks, length, count = self._cut(like.size)
        if not blocks:
            return jnp.zeros(0, like.dtype)
        packed, table = jnp.split(words, [self._count_code_words(like.size)])
        table = as_values(table, (blocks, BINS), like.dtype)
        codes = _unpack(packed)[: blocks * count].reshape(blocks, count).astype(jnp.int32)
        values = jnp.take_along_axis(table, codes >> INDEX_BITS, axis=1)
        starts = length * jax.lax.broadcasted_iota(jnp.int32, (blocks, 1), 0)
        # The zeros that fill up the last block have indices beyond the array, and are dropped.
        indices = starts + codes % 2**INDEX_BITS
        zeros = jnp.zeros(like.size, like.dtype)
        return zeros.at[indices.ravel()].set(values.ravel(), mode="drop", unique_indices=True)


def _find_bins(values: jax.Array) -> jax.Array:
    """Returns the bins, 0 to 3, of `[blocks, count]` values; 2 where a block is not finite."""
    largest = jnp.abs(values).max(axis=1, keepdims=True)
    scaled = jnp.where(largest > 0, values / largest, 0)  # so that no square is too large or small
    centered = scaled - scaled.mean(axis=1, keepdims=True)
    variance = jnp.square(centered).sum(axis=1, keepdims=True) / max(1, values.shape[1] - 1)
    width = jnp.sqrt(variance) * np.asarray(RANGE / BINS, values.dtype)
    widths_from_mean = jnp.where(width > 0, centered / width, 0)
    return jnp.clip(jnp.round(widths_from_mean + BINS // 2), 0, BINS - 1).astype(WORD)


def _average_bins(values: jax.Array, bins: jax.Array) -> jax.Array:
    """Returns the mean of the values in each bin, `[blocks, 4]`; 0 for an empty bin."""
    is_in = bins[:, None, :] == jax.lax.broadcasted_iota(WORD, (1, BINS, 1), 1)
    sums = jnp.where(is_in, values[:, None, :], jnp.zeros_like(values[:, None, :])).sum(axis=2)
    counts = is_in.sum(axis=2).astype(values.dtype)
    return sums / jnp.maximum(counts, np.asarray(1, values.dtype))


def _pack(codes: jax.Array) -> jax.Array:
    """Packs codes of 14 bits, `[n]`, into words; each code begins where the last one ends."""
    codes = jnp.pad(codes, (0, -codes.size % GROUP))
    return _join_bits(_split_bits(codes, CODE_BITS), WORD_BITS)


def _unpack(words: jax.Array) -> jax.Array:
    """Unpacks the words of `_pack`. It returns more codes than were packed: zeros at the end."""
    return _join_bits(_split_bits(words, WORD_BITS), CODE_BITS)


def _split_bits(numbers: jax.Array, bits: int) -> jax.Array:
    """Returns the lowest `bits` bits of each number `[n]`, the lowest first: `[n bits]`."""
    return (numbers[:, None] >> np.arange(bits, dtype=WORD)[None] & np.uint32(1)).ravel()


def _join_bits(digits: jax.Array, bits: int) -> jax.Array:
    """Joins digits, as `_split_bits` returns them, to numbers of `bits` bits each."""
    shifted = digits.reshape(-1, bits) << np.arange(bits, dtype=WORD)[None]
    return shifted.sum(axis=1, dtype=WORD)


def block_top_k(count: int = 64, block: int = 4096) -> BlockTopK:
    """Returns a codec that sends the largest `count` of every `block` values, in 14 bits each.

    If the values `v` that a block sends have the mean `m` and the standard deviation `s`, then

        bin = clip(round((v - m) / (6 s / 4) + 2), 0, 3);    v arrives as the mean of its bin

    The index takes 12 bits and the bin 2. The four means of a block travel in full precision. By
    default a message has 1/128 of the bytes of float32. Use the codec with
    `gx.outer(error_feedback=)`, `gx.choco` and `gx.allreduce`, which keep what is left out.

    A block is a run of consecutive values of a message. The authors' code differs: it cuts matrices
    into squares of 64 x 64, and has one table for a tensor. If a block sends a value that is not
    finite, no value that it sends arrives finite.

    Args:
      count: the largest number of values that a block sends, from 1 to `block`.
      block: the largest number of values in a block, up to 4096.

    Raises:
      ValueError: if `count` or `block` is not an integer in its range.

    References:
      After Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
      arXiv:2508.15706, whose text was not available; the bins and their means are
      taken from `one-covenant/templar`, src/tplr/compress.py.

    >>> block_top_k().count_bytes(2**20) / (4 * 2**20)
    0.0078125
    """
    block = require_int(block, "block of block_top_k", 1, 2**INDEX_BITS)
    return BlockTopK(require_int(count, "count of block_top_k", 1, block), block)
