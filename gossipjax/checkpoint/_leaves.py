"""The arrays of any state: what they are, and a checksum of what is in them."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
    """Whether it is an array of typed PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(tree: Any) -> list[list[Any]]:
    """`[path, shape, type]` of every leaf."""

    def described(path: Any, leaf: Any) -> list[Any]:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return [jax.tree_util.keystr(path), list(array.shape), str(array.dtype)]

    return [described(*found) for found in jax.tree_util.tree_leaves_with_path(tree)]


def require_same(saved: list[list[Any]], wanted: list[list[Any]], what: str) -> None:
    """Raises `ValueError` at the first leaf that `describe` tells otherwise of `what`."""
    for there, here in itertools.zip_longest(saved, wanted):
        if there == here:
            continue
        way_out = "It is of another model, optimizer or algorithm."
        if there and here and (there[0], there[1][1:], there[2]) == (here[0], here[1][1:], here[2]):
            way_out = (
                "It is of another number of nodes: read it as it was saved and give it to "
                "gossipjax.resume.change_nodes."
            )
        said = ["{}: {} {}".format(*leaf) if leaf else "nothing more" for leaf in (there, here)]
        raise ValueError(f"{what} has {said[0]}, where this run has {said[1]}. {way_out}")


def checksum(leaves: list[Any]) -> int:
    """`sum_l (2 l + 1) sum_i (2 i + 1) word_li` modulo 2^32, of all words `i` of all arrays `l`.

    Words are the bits as unsigned integers of up to 32 bits; a change of any single word changes
    the sum. The same for NumPy arrays and for JAX's, on one process or several; of the latter, one
    number per device leaves the devices.

    >>> checksum([np.ones(2, np.uint8), np.array([True])])
    7
    """
    groups: dict[Any, dict[int, Any]] = {}
    for number, leaf in enumerate(leaves):
        on_device = isinstance(leaf, jax.Array)
        devices = frozenset(leaf.sharding.device_set) if on_device else None
        array = leaf if on_device else _words(np.asarray(leaf), np)
        groups.setdefault(devices, {})[number] = array
    return sum(int(_checksum(group)) for group in groups.values()) % 2**32


@jax.jit
def _checksum(arrays: dict[int, Any]) -> jax.Array:
    total = jnp.uint32(0)
    for number, array in arrays.items():
        words = _words(jax.random.key_data(array) if is_key(array) else array, jnp)
        index, stride = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
            stride = stride * words.shape[axis] % 2**32
        total += jnp.uint32(2 * number + 1) * jnp.sum(words.astype(jnp.uint32) * (2 * index + 1))
    return total


def _words(array: Any, numpy: Any) -> Any:
    array = numpy.atleast_1d(array)
    return array.view(f"uint{8 * min(4, array.dtype.itemsize)}")
