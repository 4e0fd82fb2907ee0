"""The blocks of Transformers, shared by the translation model and the language model.

References:
    Vaswani et al., "Attention Is All You Need", NIPS 2017, arXiv:1706.03762.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    arXiv:2104.09864.

In shapes, B is the number of sequences, T the number of queries, S the number of keys (T, S: tokens
of a sequence), H the number of heads, D the width of a head, V the size of the vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

MAX_WAVELENGTH = 10_000.0
"""Of positions: the slowest of the sines turns once in 2 pi times as many tokens."""

MAX_EXPONENT = 700.0  # exp of more is no float64


class Size(NamedTuple):
    """Size of a Transformer without its vocabulary."""

    layers: int  # an encoder-decoder has as many of each
    width: int  # of the embedding and of the layers' inputs and outputs, H * D
    heads: int  # H
    hidden: int  # width of the feed-forward networks' hidden layer


class KeysValues(NamedTuple):
    """Keys and values `[B, S, H, D]` of an attention layer: all it needs to know of the tokens."""

    keys: jax.Array
    values: jax.Array


def make_sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Sinusoidal encodings (Vaswani et al., section 3.5) of positions `[T]` -> `[T, width]`.

    The pair of columns (2i, 2i + 1) is the sine and cosine of `position / 10000^(2i / width)`.
    """
    angles = _make_angles(positions, width // 2)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, width)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., section 3.2) of queries or keys `[B, T, H, D]`.

    Turns the pair of columns (i, i + D/2) by the angle `position / 10000^(2i / D)`, so that the
    product of a query and a key depends on the difference of their positions `[T]` only. The paper
    pairs (2i, 2i + 1), which is the same up to a permutation of the columns.
    """
    angles = _make_angles(positions, x.shape[-1] // 2)[None, :, None, :]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _make_angles(positions: jax.Array, frequencies: int) -> jax.Array:
    """Angles `[T, frequencies]`, in float32: bfloat16 cannot count beyond 256."""
    exponents = jnp.arange(frequencies, dtype=jnp.float32) / frequencies
    return positions.astype(jnp.float32)[:, None] * (MAX_WAVELENGTH**-exponents)[None, :]


def make_causal_mask(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """True where a key is not later than the query: positions `[T]`, `[S]` -> `[1, 1, T, S]`."""
    return (keys[None, :] <= queries[:, None])[None, None]


def make_padding_mask(tokens: jax.Array, padding_id: int) -> jax.Array:
    """True where there is a token to attend to: ids `[B, S]` -> `[B, 1, 1, S]`."""
    return (tokens != padding_id)[:, None, None, :]


def compute_perplexity(loss: float) -> float:
    """Returns `exp(loss)` of a mean loss per token, at most `exp(700)`: JSON has no infinity.

    >>> compute_perplexity(0.0), compute_perplexity(1e30) < math.inf
    (1.0, True)
    """
    return math.exp(min(loss, MAX_EXPONENT))


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., section 3.2.2), 4 * width^2 parameters: no biases.

    `project` makes keys and values of the tokens to attend to, and a call attends to them. So the
    keys and values of a sequence can be kept while it grows, or while another one does.

    With `rotary`, queries and keys are rotated by their positions. `kernel_init` is of the
    projections to queries, keys and values, `output_init` of the last one.
    """

    width: int
    heads: int
    rotary: bool = False
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    output_init: Initializer = nn.initializers.xavier_uniform()
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads = {self.heads}, got {self.width}.")
        if self.rotary and self.width // self.heads % 2:
            raise ValueError(
                "width / heads must be even, because rotary positions turn pairs of columns, got "
                f"{self.width} / {self.heads}."
            )
        dense = partial(
            nn.Dense, self.width, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype
        )
        self.query = dense(kernel_init=self.kernel_init)
        self.key = dense(kernel_init=self.kernel_init)
        self.value = dense(kernel_init=self.kernel_init)
        self.output = dense(kernel_init=self.output_init)

    def split_heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)

    def project(self, x: jax.Array, positions: jax.Array | None = None) -> KeysValues:
        """Tokens `[B, S, width]` at positions `[S]` (only used if rotary) -> keys and values."""
        keys = self.split_heads(self.key(x))
        if self.rotary and positions is not None:
            keys = rotate(keys, positions)
        return KeysValues(keys, self.split_heads(self.value(x)))

    def __call__(
        self,
        x: jax.Array,
        attended: KeysValues,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from tokens `[B, T, width]` at positions `[T]` (if rotary); `[B, T, width]`.

        `mask` is True where a query may attend to a key: booleans that broadcast to `[B, H, T, S]`.
        """
        queries = self.split_heads(self.query(x))
        if self.rotary and positions is not None:
            queries = rotate(queries, positions)
        mixed = jax.nn.dot_product_attention(queries, attended.keys, attended.values, mask=mask)
        return self.output(mixed.reshape(x.shape))


class FeedForward(nn.Module):
    """Dense `hidden`, activation, dense: 2 * width * hidden parameters, and perhaps biases."""

    hidden: int
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    output_init: Initializer = nn.initializers.xavier_uniform()
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, width]` -> `[B, T, width]`."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        dense = partial(nn.Dense, use_bias=self.use_bias, **types)
        hidden = self.activation(dense(self.hidden, kernel_init=self.kernel_init)(x))
        return dense(x.shape[-1], kernel_init=self.output_init)(hidden)


class TokenEmbedding(nn.Module):
    """One table for tokens and for the logits of the next token: V * width parameters.

    At the start it is normal, with the standard deviation `stddev`.
    """

    vocabulary: int
    width: int
    stddev: float
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        init = nn.initializers.normal(self.stddev)
        shape = (self.vocabulary, self.width)
        self.embedding = self.param("embedding", init, shape, self.param_dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids `[B, T]` -> `[B, T, width]`; an id that is not in the vocabulary gives NaN."""
        return jnp.take(self.embedding, tokens, axis=0, mode="fill").astype(self.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[B, T, width]` -> float32 logits `[B, T, V]`."""
        table = self.embedding.astype(self.dtype)
        inputs = x.astype(self.dtype)
        return jnp.einsum("btd,vd->btv", inputs, table, preferred_element_type=jnp.float32)
