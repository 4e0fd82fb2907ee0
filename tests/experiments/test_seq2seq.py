"""The encoder-decoder Transformer, against PyTorch's layers and the paper's size."""

import functools
import itertools

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.layers import make_dropout_rngs
from experiments.models.seq2seq import SEQ2SEQ_SIZES, Seq2Seq, translate
from experiments.models.transformer import Size

TINY = Size(layers=2, width=8, heads=2, hidden=12)
VOCABULARY = 7
SOURCES = jnp.array([[3, 4, 5, 6], [6, 5, 0, 0]])
TARGETS = jnp.array([[3, 4, 2], [5, 6, 2]])
MODEL = Seq2Seq(VOCABULARY, TINY)
APPLY = jax.jit(MODEL.apply, static_argnames=("method", "train"))


def fill(shape, number):
    """The rule for the weights of the comparison."""
    return 0.5 * np.sin(number + np.arange(np.prod(shape)) ** 2).reshape(shape)


# Computed with PyTorch 2.13 in float64 by
#
#     from torch import nn
#     options = {"dropout": 0.0, "batch_first": True, "layer_norm_eps": 1e-6}
#     encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, **options), 2)
#     decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, **options), 2)
#     embedding = nn.Embedding(7, 8)
#     is_padding = sources == 0
#     inputs = torch.tensor([[1, 3, 4], [1, 5, 6]])
#     is_later = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
#     encoded = encoder(embed(sources), src_key_padding_mask=is_padding)
#     output = decoder(
#         embed(inputs), encoded, tgt_mask=is_later, memory_key_padding_mask=is_padding
#     )
#     output @ embedding.weight.T
#
# where `embed(ids)` is `embedding(ids) * sqrt(8)` plus the sinusoids of the paper's section 3.5.
# Parameter number i of the three modules' `named_parameters()` is `fill(shape, i)`, but 0 where it
# is a bias of an attention layer.
PYTORCH_LOGITS = [
    [
        [0.39341, -0.4965, 0.13958, 0.67062, -0.10743, 1.02857, 0.29156],
        [0.37346, -0.50558, 0.08412, 0.63063, -0.08829, 0.96067, 0.25084],
        [0.39098, -0.48083, 0.10522, 0.657, -0.10593, 0.99106, 0.25366],
    ],
    [
        [0.39502, -0.49466, 0.12921, 0.66304, -0.10092, 1.02637, 0.28881],
        [0.3928, -0.48355, 0.10727, 0.65674, -0.09974, 1.00599, 0.26486],
        [0.3812, -0.49279, 0.08193, 0.63387, -0.08984, 0.96816, 0.246],
    ],
]


class Converter:
    """Numbers PyTorch's parameters one after the other, and lays them out as flax's."""

    def __init__(self):
        self.number = itertools.count()

    def next(self, *shape):
        return fill(shape, next(self.number))

    def make_attention(self):
        width = TINY.width
        stacked = self.next(3 * width, width)
        next(self.number)
        parameters = {
            name: {"kernel": stacked[i * width : (i + 1) * width].T}
            for i, name in enumerate(("query", "key", "value"))
        }
        parameters["output"] = {"kernel": self.next(width, width).T}
        next(self.number)
        return parameters

    def make_dense(self, inputs, outputs):
        return {"kernel": self.next(outputs, inputs).T, "bias": self.next(outputs)}

    def make_layer(self, attentions):
        layer = {name: self.make_attention() for name in attentions}
        layer["feed_forward"] = {
            "Dense_0": self.make_dense(TINY.width, TINY.hidden),
            "Dense_1": self.make_dense(TINY.hidden, TINY.width),
        }
        for name in (*attentions, "feed_forward"):
            norm = {"scale": self.next(TINY.width), "bias": self.next(TINY.width)}
            layer[f"{name}_norm"] = {"LayerNorm_0": norm}
        return layer


@functools.cache
def make_variables():
    converter = Converter()
    layers = range(TINY.layers)
    parameters = {f"encoder_{i}": converter.make_layer(["attention"]) for i in layers}
    attentions = ["self_attention", "source_attention"]
    parameters |= {f"decoder_{i}": converter.make_layer(attentions) for i in layers}
    parameters["embedding"] = {"embedding": converter.next(VOCABULARY, TINY.width)}
    return {"params": jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parameters)}


def test_forward_pass_is_that_of_pytorch():
    logits = APPLY(make_variables(), SOURCES, TARGETS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, PYTORCH_LOGITS, atol=5e-5)


@pytest.mark.parametrize(("name", "millions"), [("base", 65), ("big", 213)])
def test_sizes_have_the_papers_parameters(name, millions):
    model = Seq2Seq(37_000, SEQ2SEQ_SIZES[name])
    tokens = jnp.ones((1, 4), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    count = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert count == pytest.approx(millions * 1e6, rel=0.035)


def score(source, sequence, alpha=0.6):
    """Score of a translation, its `end_id` included, by a forward pass without a cache."""
    logits = APPLY(make_variables(), source[None], jnp.array([sequence]))
    log_probs = jax.nn.log_softmax(logits[0].at[:, :2].set(-jnp.inf))
    total = sum(float(log_probs[i, token]) for i, token in enumerate(sequence))
    return total / ((5 + len(sequence)) / 6) ** alpha


def test_translation_is_the_best_of_all():
    """With a beam that holds all: at most two tokens of five, for a source of one."""
    found = translate(MODEL, make_variables(), SOURCES[:, :1], beam=16, extra_length=1)
    for source, tokens, found_score in zip(SOURCES[:, :1], found.tokens, found.scores, strict=True):
        scores = {
            (*prefix, 2): score(source, (*prefix, 2))
            for length in range(2)
            for prefix in itertools.product([3, 4, 5, 6], repeat=length)
        }
        best = max(scores, key=lambda sequence: scores[sequence])
        assert tuple(tokens[: len(best)].tolist()) == best
        assert float(found_score) == pytest.approx(scores[best], abs=1e-4)


def test_dropout_is_that_of_the_seeds():
    variables = make_variables()

    @jax.jit
    def apply(seeds):
        rngs = make_dropout_rngs(seeds)
        return MODEL.apply(variables, SOURCES, TARGETS, train=True, rngs=rngs)

    first = apply(jnp.array([1, 2], jnp.uint32))
    np.testing.assert_array_equal(first, apply(jnp.array([1, 3], jnp.uint32)))
    assert not np.allclose(first, apply(jnp.array([2, 1], jnp.uint32)))
    assert not np.allclose(first, APPLY(variables, SOURCES, TARGETS))
    with pytest.raises(flax.errors.InvalidRngError):
        APPLY(variables, SOURCES, TARGETS, train=True)
