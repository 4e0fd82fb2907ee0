"""Messages that leave values out: the largest, or some drawn at random."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire._codec import (
    KEY_IMPLEMENTATION,
    WORD,
    Codec,
    Like,
    as_values,
    as_words,
    require_key,
    require_seed,
)

KEY_WORDS = 2


@dataclasses.dataclass(frozen=True, repr=False)
class SparseCodec(Codec):
    """Sends `k = max(1, round(fraction n))` of n values; the others arrive as 0."""

    is_sparse: ClassVar[bool] = True
    fraction: float

    def count_values(self, size: int) -> int:
        """Returns the number of values that are sent of an array of `size`."""
        return min(size, max(1, round(self.fraction * size)))


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(SparseCodec):
    """A codec that sends the values of the largest magnitude, each with its index.

    >>> top_k(0.25).fraction
    0.25
    """

    @property
    def name(self) -> str:
        return f"top_k({self.fraction})"

    def count_words(self, like: Like) -> int:
        return self.count_values(like.size) * (1 + like.dtype.itemsize // WORD.itemsize)

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the indices of the largest magnitudes, and then the bits of their values."""
        del key
        # Values that are not finite count as the largest, so that receivers hear of them.
        magnitudes = jnp.where(jnp.isfinite(array), jnp.abs(array), np.asarray(np.inf, array.dtype))
        _, indices = jax.lax.top_k(magnitudes, self.count_values(array.size))
        return jnp.concatenate([indices.astype(WORD), as_words(array[indices])])

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        count = self.count_values(like.size)
        return _scatter(words[:count].astype(jnp.int32), words[count:], like)


@dataclasses.dataclass(frozen=True, repr=False)
class RandomK(SparseCodec):
    """A codec that sends the key, and k values drawn at random, one from each of k groups.

    A group consists of neighbouring values. The groups are shifted at random, so every value is
    sent with the same probability.

    >>> random_k(0.25).fraction
    0.25
    """

    needs_key: ClassVar[bool] = True
    seed: int

    @property
    def name(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"random_k({self.fraction}{seed})"

    def count_words(self, like: Like) -> int:
        return KEY_WORDS + self.count_values(like.size) * like.dtype.itemsize // WORD.itemsize

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        data = jax.random.key_data(require_key(self, key))
        return jnp.concatenate([data, as_words(array[self._draw(data, array.size)])])

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        return _scatter(self._draw(words[:KEY_WORDS], like.size), words[KEY_WORDS:], like)

    def _draw(self, data: jax.Array, size: int) -> jax.Array:
        """Draws an index in each of k groups by the key in a message; receivers draw the same."""
        count = self.count_values(size)
        if not count:
            return jnp.zeros(0, jnp.int32)
        width, wider = divmod(size, count)  # the first `wider` groups have one value more
        group = jax.lax.iota(WORD, count)
        starts = group * np.uint32(width) + jnp.minimum(group, np.uint32(wider))
        widths = np.uint32(width) + (group < wider).astype(WORD)
        key = jax.random.wrap_key_data(data, impl=KEY_IMPLEMENTATION)
        bits = jax.random.bits(key, (count + 1,), WORD)
        shift = bits[count] % np.uint32(size)
        return ((starts + bits[:count] % widths + shift) % np.uint32(size)).astype(jnp.int32)


def _scatter(indices: jax.Array, words: jax.Array, like: Like) -> jax.Array:
    """Returns zeros, with the size and type of `like`, but at `indices` the values of `words`."""
    values = as_values(words, indices.shape, like.dtype)
    return jnp.zeros(like.size, like.dtype).at[indices].set(values, unique_indices=True)


def top_k(fraction: float) -> TopK:
    """Returns a codec that sends the values largest in magnitude, a fraction of all, and indices.

    A value and its index take 8 bytes. The fraction, above 0 and at most 1, counts in each message,
    not in each leaf. Use the codec with `gx.choco`, `gx.contrib.deepsqueeze` and `gx.allreduce`,
    which keep what is left out.

    Raises:
      ValueError: if `fraction` is not above 0 and at most 1.

    >>> top_k(0.01).count_bytes(1000)
    80
    """
    return TopK(_require_fraction(fraction, "top_k"))


def random_k(fraction: float, *, seed: int = 0) -> RandomK:
    """Returns a codec that sends a fraction of the values, drawn anew for every message.

    Each value takes 4 bytes. The key takes 8 bytes, and sender and receivers draw the indices from
    it. `fraction` is as in `top_k`, and `seed` as in `int8`.

    Raises:
      ValueError: if `fraction` or `seed` (from 0 to 2^32 - 1) is out of its range.

    >>> random_k(0.01).count_bytes(1000)
    48
    """
    return RandomK(_require_fraction(fraction, "random_k"), require_seed(seed, "random_k"))


def _require_fraction(fraction: Any, name: str) -> float:
    """Returns a fraction as a float; raises `ValueError` unless it is above 0 and at most 1."""
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction of {name} must be a number above 0 and at most 1, got {fraction!r}."
        )
    return float(fraction)
