"""The encoder-decoder Transformer for translation, and its beam search."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from experiments.data.tokens import Sequences, extend_widths, make_buckets
from experiments.models.beam_search import Hypotheses, beam_search
from experiments.models.transformer import (
    Attention,
    FeedForward,
    KeysValues,
    Size,
    TokenEmbedding,
    make_causal_mask,
    make_padding_mask,
    make_sinusoids,
)

SEQ2SEQ_SIZES = {
    "mini": Size(layers=2, width=128, heads=4, hidden=512),
    "base": Size(layers=6, width=512, heads=8, hidden=2048),
    "big": Size(layers=6, width=1024, heads=16, hidden=4096),
}
"""Sizes by name; `layers` in the encoder, and in the decoder. With the vocabulary of about 37,000
tokens of WMT English-German they have 5,658,624, 63,045,632 and 214,171,648 parameters; the paper
gives base 65 and big 213 million."""


class Memory(NamedTuple):
    """Encoded sources, as the layers of the decoder attend to them."""

    mask: jax.Array  # True at a token, False at padding, `[B, 1, 1, S]`
    layers: tuple[KeysValues, ...]  # `[B, S, H, D]`, of each layer of the decoder


Cache = tuple[KeysValues, ...]
"""Keys and values `[B, L, H, D]` of the target's tokens so far, for each layer of the decoder."""


class AddAndNorm(nn.Module):
    """`LayerNorm(x + Dropout(change))` around each part of a layer: 2 * width parameters."""

    dropout: float
    dtype: DTypeLike
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, change: jax.Array, train: bool) -> jax.Array:
        """Two arrays `[B, T, width]` -> `[B, T, width]`."""
        change = nn.Dropout(self.dropout)(change, deterministic=not train)
        return nn.LayerNorm(dtype=self.dtype, param_dtype=self.param_dtype)(x + change)


class Layer(nn.Module):
    """What the layers of encoder and decoder have in common: their parts."""

    size: Size
    dropout: float
    dtype: DTypeLike
    param_dtype: DTypeLike

    def make_attention(self) -> Attention:
        width = self.size.width
        return Attention(width, self.size.heads, dtype=self.dtype, param_dtype=self.param_dtype)

    def make_feed_forward(self) -> FeedForward:
        return FeedForward(self.size.hidden, dtype=self.dtype, param_dtype=self.param_dtype)

    def make_add_and_norm(self) -> AddAndNorm:
        return AddAndNorm(self.dropout, self.dtype, self.param_dtype)


class EncoderLayer(Layer):
    """Self-attention over the source, then a feed-forward network."""

    def setup(self) -> None:
        self.attention = self.make_attention()
        self.attention_norm = self.make_add_and_norm()
        self.feed_forward = self.make_feed_forward()
        self.feed_forward_norm = self.make_add_and_norm()

    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Tokens `[B, S, width]`, mask `[B, 1, 1, S]` -> `[B, S, width]`."""
        x = self.attention_norm(x, self.attention(x, self.attention.project(x), mask), train)
        return self.feed_forward_norm(x, self.feed_forward(x), train)


class DecoderLayer(Layer):
    """Self-attention over the target, attention over the source, then a feed-forward network."""

    def setup(self) -> None:
        self.self_attention = self.make_attention()
        self.self_attention_norm = self.make_add_and_norm()
        self.source_attention = self.make_attention()
        self.source_attention_norm = self.make_add_and_norm()
        self.feed_forward = self.make_feed_forward()
        self.feed_forward_norm = self.make_add_and_norm()

    def project_source(self, encoded: jax.Array) -> KeysValues:
        """Encoded sources `[B, S, width]` -> their keys and values for this layer."""
        return self.source_attention.project(encoded)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array,
        source: KeysValues,
        source_mask: jax.Array,
        cached: KeysValues | None,
        index: jax.Array | int,
        train: bool,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the layer's output, and the keys and values that it attended to in the target.

        Args:
            x: tokens `[B, T, width]`, at positions `index` to `index + T - 1`.
            mask: True where a token may attend to another, `[1, 1, T, T]`; with a cache `[..., L]`.
            source: from `project_source`; `source_mask`, `[B, 1, 1, S]`, is True at its tokens.
            cached: keys and values of the tokens before `index`; None if `x` are all.
        """
        target = self.self_attention.project(x)
        if cached is not None:
            target = write_at(cached, target, index)
        x = self.self_attention_norm(x, self.self_attention(x, target, mask), train)
        x = self.source_attention_norm(x, self.source_attention(x, source, source_mask), train)
        return self.feed_forward_norm(x, self.feed_forward(x), train), target


def write_at(cached: KeysValues, new: KeysValues, index: jax.Array | int) -> KeysValues:
    """Returns the cached `[B, L, H, D]` with the new `[B, T, H, D]` in place of `index` onwards."""
    keys = jax.lax.dynamic_update_slice_in_dim(cached.keys, new.keys, index, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(cached.values, new.values, index, axis=1)
    return KeysValues(keys, values)


class Seq2Seq(nn.Module):
    """The Transformer of Vaswani et al.: encoder and decoder, post-norm, one shared embedding.

    As the paper's formulas have it, attention has no biases and no dropout of its weights. The
    dropout of the paper is 0.1 for base and 0.3 for big (English-German).

    >>> model = Seq2Seq(vocabulary=37_000)
    >>> tokens = jnp.ones((1, 16), jnp.int32)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    63045632
    >>> jax.eval_shape(model.apply, variables, tokens, tokens).shape
    (1, 16, 37000)

    Sequences are rows of ids, filled up at the end with `padding_id`; a target ends with `end_id`
    and does not contain `begin_id`. In training, `apply` needs a key for dropout, which
    `make_dropout_rngs` makes of seeds in the batch.

    References:
        Vaswani et al., "Attention Is All You Need", NIPS 2017, arXiv:1706.03762.
    """

    vocabulary: int
    size: Size = SEQ2SEQ_SIZES["base"]
    dropout: float = 0.1
    padding_id: int = 0
    begin_id: int = 1
    end_id: int = 2
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False

    def setup(self) -> None:
        width = self.size.width
        types = (self.dtype, self.param_dtype)
        self.embedding = TokenEmbedding(self.vocabulary, width, width**-0.5, *types)
        self.embedding_dropout = nn.Dropout(self.dropout)
        parts = (self.size, self.dropout, *types)
        encoder_layer, decoder_layer = self.choose_layers()
        # The names are the same with remat, so a checkpoint can be resumed with or without it.
        self.encoder = [encoder_layer(*parts) for _ in range(self.size.layers)]
        self.decoder = [decoder_layer(*parts) for _ in range(self.size.layers)]

    @nn.nowrap
    def choose_layers(self) -> tuple[type[EncoderLayer], type[DecoderLayer]]:
        """The classes of the layers, whose last argument is `train`: static also with `remat`."""
        if not self.remat:
            return EncoderLayer, DecoderLayer
        return nn.remat(EncoderLayer, static_argnums=3), nn.remat(DecoderLayer, static_argnums=7)

    def embed(self, tokens: jax.Array, positions: jax.Array, train: bool) -> jax.Array:
        """Ids `[B, T]` at positions `[T]` -> inputs of the first layer, `[B, T, width]`."""
        sinusoids = make_sinusoids(positions, self.size.width)[None].astype(self.dtype)
        embedded = self.embedding(tokens) * jnp.asarray(self.size.width**0.5, self.dtype)
        return self.embedding_dropout(embedded + sinusoids, deterministic=not train)

    def encode(self, sources: jax.Array, train: bool = False) -> Memory:
        """Source ids `[B, S]` -> what the decoder attends to."""
        mask = make_padding_mask(sources, self.padding_id)
        x = self.embed(sources, jnp.arange(sources.shape[1]), train)
        for layer in self.encoder:
            x = layer(x, mask, train)
        return Memory(mask, tuple(layer.project_source(x) for layer in self.decoder))

    def decode(
        self,
        memory: Memory,
        inputs: jax.Array,
        cache: Cache | None = None,
        index: jax.Array | int = 0,
        train: bool = False,
    ) -> tuple[jax.Array, Cache]:
        """Returns logits `[B, T, V]` of the token after each input, and the cache with the inputs.

        `inputs` are ids `[B, T]` of the target from position `index` on, the first of all
        `begin_id`; `cache`, from `make_cache` or a former call, is of those before.
        """
        positions = index + jnp.arange(inputs.shape[1])
        keys = inputs.shape[1] if cache is None else cache[0].keys.shape[1]
        # Padding of a target is at its end, where no token before it attends to.
        mask = make_causal_mask(positions, jnp.arange(keys))
        x = self.embed(inputs, positions, train)
        attended = []
        for number, layer in enumerate(self.decoder):
            cached = None if cache is None else cache[number]
            x, target = layer(x, mask, memory.layers[number], memory.mask, cached, index, train)
            attended.append(target)
        return self.embedding.logits(x), tuple(attended)

    def __call__(self, sources: jax.Array, targets: jax.Array, train: bool = False) -> jax.Array:
        """Ids `[B, S]` and `[B, T]` -> float32 logits `[B, T, V]`.

        The logits at t predict `targets[:, t]`, given `targets[:, :t]`: the model shifts the
        targets itself.
        """
        begin = jnp.full_like(targets[:, :1], self.begin_id)
        inputs = jnp.concatenate([begin, targets[:, :-1]], axis=1)
        logits, _ = self.decode(self.encode(sources, train), inputs, train=train)
        return logits

    @nn.nowrap
    def make_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens of `batch` targets."""
        heads = self.size.heads
        zeros = jnp.zeros((batch, length, heads, self.size.width // heads), self.dtype)
        return tuple(KeysValues(zeros, zeros) for _ in range(self.size.layers))


@partial(jax.jit, static_argnames=("model", "beam", "alpha", "extra_length"))
def translate(
    model: Seq2Seq,
    variables: Any,
    sources: jax.Array,
    *,
    beam: int = 4,
    alpha: float = 0.6,
    extra_length: int = 50,
) -> Hypotheses:
    """Translates sources by beam search, with the settings of Vaswani et al. (section 6.1).

    A translation of ids `[B, S]` has at most as many tokens as its source, plus `extra_length`:
    `[B, S + extra_length]`. It depends neither on padding nor on the other sources. `beam` is the
    number of hypotheses, `alpha` the exponent of the length penalty.
    """
    length = sources.shape[1] + extra_length
    memory: Any = model.apply(variables, sources, method="encode")
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf, beam, axis=0), memory)
    never = jnp.array([model.padding_id, model.begin_id])

    def step(cache: Cache, tokens: jax.Array, index: jax.Array) -> tuple[jax.Array, Cache]:
        inputs = tokens[:, None]
        output: Any = model.apply(variables, rows, inputs, cache, index, method="decode")
        logits, cache = output
        return logits[:, 0].at[:, never].set(-jnp.inf), cache

    return beam_search(
        step,
        model.make_cache(len(rows.mask), length),
        (sources != model.padding_id).sum(axis=1) + extra_length,
        length,
        begin_id=model.begin_id,
        end_id=model.end_id,
        padding_id=model.padding_id,
        beam=beam,
        alpha=alpha,
    )


def translate_texts(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    variables: Any,
    texts: Sequence[str],
    widths: Sequence[int],
    tokens: int,
    **search: Any,
) -> list[str]:
    """Translates texts by beam search, texts of similar length together.

    Args:
        widths: lengths that sources are padded to; twice the last, and so on, for longer ones.
        tokens: of the sources that are translated together, padding included.
        search: `beam` and `alpha` of `translate`.
    """
    sources = Sequences.encode(tokenizer, texts)
    translations = [""] * len(texts)
    for bucket in make_buckets(sources.lengths, extend_widths(widths, sources.lengths)):
        size = bucket.rows_per_batch(tokens)
        for start in range(0, len(bucket.rows), size):
            rows = bucket.rows[start : start + size]
            # Of one shape: the last rows are repeated, and their translations left out.
            padded = sources.pad(np.resize(rows, size), bucket.width)
            found = translate(model, variables, padded, **search)
            for row, ids in zip(rows, np.asarray(found.tokens)[: len(rows)], strict=True):
                translations[row] = tokenizer.decode(ids.tolist())
    return translations
