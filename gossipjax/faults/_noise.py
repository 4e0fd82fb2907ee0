"""Noise on messages, for every algorithm that takes a `wire`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from gossipjax.wire import Codec, as_values, as_words

Like = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, repr=False)
class NoiseCodec(Codec):
    """Sends values in full precision, with normal noise on all that are not 0.

    >>> NoiseCodec(std=0.1, seed=0).std
    0.1
    """

    needs_key: ClassVar[bool] = True
    std: float
    seed: int

    @property
    def name(self) -> str:
        return f"noise({self.std:g}, seed={self.seed})"

    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        assert key is not None
        noise = jnp.asarray(self.std, array.dtype) * jax.random.normal(
            key, array.shape, array.dtype
        )
        # Padding and entries that the sender leaves out are 0, and stay 0.
        noisy = array + jnp.where(array == 0, jnp.zeros_like(noise), noise)
        return as_words(noisy)

    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        return as_values(words, like.shape, like.dtype)

    def count_words(self, like: Like) -> int:
        return like.size * like.dtype.itemsize // self.word.itemsize


def noise(std: float, *, seed: int = 0) -> NoiseCodec:
    """Returns a `wire=` that adds normal noise of standard deviation `std` to every value sent.

    The sender knows the noise, as if it masked its model on purpose, and subtracts it from later
    messages. So the sums over all nodes stay the same, as with any codec. Push-sum weights, zeros
    and exact averages get no noise. For noise that nobody knows, use `gx.faults.Faults(noise=)`.

    Args:
      std: the standard deviation, 0 or more.
      seed: decides the noise, together with the count in the state and the node.

    >>> import gossipjax as gx
    >>> tx = gx.dpsgd(gx.topology.ring(4), wire=gx.faults.noise(0.01))
    """
    return NoiseCodec(std, seed)
