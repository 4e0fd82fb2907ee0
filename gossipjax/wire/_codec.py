"""A codec: how a flat array of values becomes words on the wire, and how words become values."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.topology.schedule import require_int

Like = jax.Array | jax.ShapeDtypeStruct  # which has a size and a type

KEY_IMPLEMENTATION = "threefry2x32"  # draws the same numbers on every kind of device
WORD = np.dtype(np.uint32)
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, repr=False)
class Codec(abc.ABC):
    """A form of messages: a static, hashable pair of functions on flat arrays `[size]`.

    Only the size and the type of an array decide the number of words. A codec does not get arrays
    of one value, such as push-sum weights; they travel in full precision.

    >>> import gossipjax as gx
    >>> [isinstance(codec, Codec) for codec in (gx.wire.int8(), gx.wire.top_k(0.1))]
    [True, True]
    """

    is_sparse: ClassVar[bool] = False  # values are left out: `x / w` of push-sum would be wrong
    needs_key: ClassVar[bool] = False  # `encode` draws random numbers
    is_elementwise: ClassVar[bool] = False  # encoding an array in parts gives the same words

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The call that makes this codec, without the module."""

    @property
    def word(self) -> np.dtype:
        """The type of a word, an unsigned integer."""
        return WORD

    def applies_to(self, dtype: np.dtype) -> bool:
        """Says whether the codec makes arrays of `dtype` smaller; other arrays travel unchanged."""
        del dtype
        return True

    @abc.abstractmethod
    def encode(self, array: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Encodes a flat array as words."""

    @abc.abstractmethod
    def decode(self, words: jax.Array, like: Like) -> jax.Array:
        """Decodes `words`, which `encode` made, to an array with the size and type of `like`."""

    @abc.abstractmethod
    def count_words(self, like: Like) -> int:
        """Returns the number of words of an array with the size and type of `like`."""

    def join(self, size: int) -> tuple[Codec, int] | None:
        """Says how to encode several arrays of `size` values at once, with the words of each alone.

        Returns the codec for the joint array, and the size to which each array must be padded; None
        if one array cannot stand for several.
        """
        del size
        return None

    def count_bytes(self, size: int) -> int:
        """Returns the bytes of a message of `size` float32 values, scales and indices included."""
        return self.count_words(jax.ShapeDtypeStruct((size,), np.float32)) * self.word.itemsize

    def __repr__(self) -> str:
        return self.name


def as_words(values: jax.Array) -> jax.Array:
    """Returns the bits of values of 32 or 64 bits, as flat words."""
    return jax.lax.bitcast_convert_type(values, WORD).ravel()


def as_values(words: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns values, of this shape and type, from their bits: it undoes `as_words`."""
    per_value = dtype.itemsize // WORD.itemsize
    words = words.reshape(shape if per_value == 1 else (*shape, per_value))
    return jax.lax.bitcast_convert_type(words, dtype)


def require_key(codec: Codec, key: Any) -> Any:
    """Returns the key that a codec needs to draw numbers; raises `ValueError` if it is None."""
    if key is None:
        raise ValueError(
            f"key must be a PRNG key for {codec}, which draws random numbers, got None: give "
            "another one to every exchange, such as jax.random.fold_in(key, step)."
        )
    return key


def require_seed(seed: Any, name: str) -> int:
    """Returns `seed`; raises `ValueError` unless it is an integer from 0 to 2^32 - 1."""
    return require_int(seed, f"seed of {name}", 0, MAX_SEED)


def make_seed_key(seed: int) -> jax.Array:
    """Makes a threefry key from a seed, so that the default kind of JAX's keys does not matter."""
    return jax.random.key(seed, impl=KEY_IMPLEMENTATION)


def as_key(key: Any) -> jax.Array:
    """Makes a threefry key from any JAX key, typed or raw."""
    words = jax.random.bits(key, (2,), np.uint32)
    return jax.random.wrap_key_data(words, impl=KEY_IMPLEMENTATION)


def fold_in(key: jax.Array | None, number: Any) -> jax.Array | None:
    """Returns `jax.random.fold_in(key, number)`, or None if no key is given."""
    return None if key is None else jax.random.fold_in(key, number)


@jax.custom_batching.custom_vmap
def compute_once(words: jax.Array) -> jax.Array:
    """Lets XLA compute the words once, and not again for each operation that reads them.

    The sender keeps what the words leave out. If XLA computed the words again for this remainder,
    it could fuse a product and a sum there and round them once, but round them separately in the
    message. A value between two words could then become one word in the remainder and another in
    the message, and mass would be lost.
    """

    def choose_when_run(words: jax.Array) -> jax.Array:
        """Returns the words through a condition, because XLA for CPUs drops barriers early."""
        # XLA cannot see into the branches of a condition, nor that this condition is always true.
        if not words.size:
            return words
        return jax.lax.cond((words.ravel()[0] | 1) > 0, lambda x: x, jnp.bitwise_not, words)

    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(words, cpu=choose_when_run, default=barrier)


@compute_once.def_vmap
def _compute_once_for_nodes(
    axis_size: int, is_mapped: list[bool], words: jax.Array
) -> tuple[jax.Array, bool]:
    """Keeps one condition for all nodes: by default `vmap` makes a `select`, which XLA fuses."""
    del axis_size, is_mapped
    return compute_once(words), True
