"""A decoder-only language model."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.transformer import (
    Attention,
    FeedForward,
    Size,
    TokenEmbedding,
    make_causal_mask,
)

DECODER_SIZES = {
    "pico": Size(layers=2, width=64, heads=4, hidden=256),
    "nano": Size(layers=4, width=128, heads=4, hidden=512),
    "mini": Size(layers=6, width=384, heads=6, hidden=1536),
    "gpt2-small": Size(layers=12, width=768, heads=12, hidden=3072),
    "gpt2-medium": Size(layers=24, width=1024, heads=16, hidden=4096),
    "gpt2-large": Size(layers=36, width=1280, heads=20, hidden=5120),
    "1b": Size(layers=18, width=2048, heads=16, hidden=8192),
}
"""Sizes by name. Parameters in the layers (12 * layers * width^2, and norms), and with a vocabulary
of 50,257 tokens:

| name        | layers only | in all        |
|-------------|-------------|---------------|
| pico        | 98,624      | 3,315,072     |
| nano        | 787,584     | 7,220,480     |
| mini        | 10,621,824  | 29,920,512    |
| gpt2-small  | 84,953,856  | 123,551,232   |
| gpt2-medium | 302,040,064 | 353,503,232   |
| gpt2-large  | 707,882,240 | 772,211,200   |
| 1b          | 906,045,440 | 1,008,971,776 |
"""

INIT_STDDEV = 0.02
"""Standard deviation of initial weights, GPT-2's."""


class DecoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each `x + f(RMSNorm(x))`.

    Each layer adds to the residual stream, so the last weights of its two parts start smaller by
    `sqrt(2 * layers)`, as in GPT-2.
    """

    size: Size
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, width]` -> `[B, T, width]`; a token sees itself and the earlier ones."""
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        inits: dict[str, Any] = {
            "kernel_init": nn.initializers.normal(INIT_STDDEV),
            "output_init": nn.initializers.normal(INIT_STDDEV / math.sqrt(2 * self.size.layers)),
        }
        positions = jnp.arange(x.shape[1])
        mask = make_causal_mask(positions, positions)
        attention = Attention(
            self.size.width, self.size.heads, rotary=True, name="attention", **inits, **types
        )
        feed_forward = FeedForward(
            self.size.hidden, nn.gelu, use_bias=False, name="feed_forward", **inits, **types
        )
        normed = nn.RMSNorm(name="attention_norm", **types)(x)
        x = x + attention(normed, attention.project(normed, positions), mask, positions)
        return x + feed_forward(nn.RMSNorm(name="feed_forward_norm", **types)(x))


class Decoder(nn.Module):
    """A decoder-only Transformer: pre-norm, rotary positions, tied embedding, no biases.

    GPT-2 with three changes of later models, such as LLaMA (Touvron et al. 2023): rotary positions,
    which need no table; RMSNorm in place of LayerNorm, because it trains as well with one reduction
    and one vector of parameters less; and no biases. It has no dropout: a corpus is read once.

    With the vocabulary and the shape of GPT-2 small it has 123,551,232 parameters: the 124,439,808
    of GPT-2 less 786,432 of its position table and 102,144 biases.

    >>> model = Decoder(vocabulary=50_257, size=DECODER_SIZES["gpt2-small"])
    >>> tokens = jnp.zeros((1, 16), jnp.int32)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    123551232
    >>> jax.eval_shape(model.apply, variables, tokens).shape
    (1, 16, 50257)

    References:
        Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023,
        arXiv:2302.13971.
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
        Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019, arXiv:1910.07467.
    """

    vocabulary: int
    size: Size = DECODER_SIZES["gpt2-small"]
    max_length: int = 1024  # tokens of the longest sequence that is accepted
    remat: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids `[B, T]` -> float32 logits `[B, T, V]`; those at t are of the token at t + 1."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"A sequence must have at most max_length = {self.max_length} tokens, got "
                f"{length}. Cut it, or build the model with a larger max_length."
            )
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        embedding = TokenEmbedding(
            self.vocabulary, self.size.width, INIT_STDDEV, name="embedding", **types
        )
        block = nn.remat(DecoderBlock) if self.remat else DecoderBlock
        x = embedding(tokens)
        for layer in range(self.size.layers):
            # The name is the same with remat, so a checkpoint can be resumed with or without it.
            x = block(self.size, name=f"block_{layer}", **types)(x)
        return embedding.logits(nn.RMSNorm(name="norm", **types)(x))
