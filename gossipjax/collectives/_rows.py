"""Flat arrays as N rows of words, one for every node: how a narrow average cuts its messages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from gossipjax.collectives._buffers import cut_into_rows, pad_to_rows
from gossipjax.wire import Codec, concatenate_in_place, decode, encode, encode_pieces, fold_in

MAX_UNROLLED = 32  # rows; for more, a program of one operation per row compiles too long


def encode_rows(
    arrays: Sequence[jax.Array], rows: int, codec: Codec, key: jax.Array | None
) -> jax.Array:
    """Returns the words `[rows, length]` of flat arrays of more than `rows` values."""
    if rows > MAX_UNROLLED:
        buffer = pad_to_rows(concatenate_in_place(arrays), rows)
        numbers = jnp.arange(rows)
        return jax.vmap(lambda row, i: encode([row], codec, fold_in(key, i)))(buffer, numbers)
    # One pass over memory each. Rows of one rounded buffer would be copied once more.
    pieces = cut_into_rows(arrays, rows)
    return jnp.stack([encode_pieces(row, codec, fold_in(key, i)) for i, row in enumerate(pieces)])


def decode_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the rows `[rows, length]`, each like `row`."""
    return jax.vmap(lambda message: decode(message, codec, [row])[0])(words)


def sum_rows(words: jax.Array, codec: Codec, row: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns the sum `[length]` of the rows in the type of `row`."""
    if len(words) > MAX_UNROLLED:
        return decode_rows(words, codec, row).sum(axis=0)
    # Not `sum(axis=0)`: XLA on CPU takes 75 ms for that of 10 MB of bfloat16, and 1 ms for this.
    return reduce(jnp.add, [decode(message, codec, [row])[0] for message in words])
