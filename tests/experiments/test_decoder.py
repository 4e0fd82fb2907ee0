"""The decoder-only language model, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.decoder import Decoder
from experiments.models.transformer import Size, rotate

TINY = Size(layers=2, width=12, heads=3, hidden=20)
VOCABULARY = 11


@functools.cache
def tiny():
    """A model with random weights, large enough to make all its parts matter."""
    model = Decoder(VOCABULARY, TINY, max_length=8)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    leaves, tree = jax.tree.flatten(variables)
    generator = np.random.default_rng(0)
    leaves = [generator.normal(0.3, 0.4, leaf.shape).astype(np.float32) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)


def draw_tokens(shape, seed=1):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean() + 1e-6) * scale


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turn(vector, position):
    """Rotates as a multiplication of complex numbers."""
    half = len(vector) // 2
    turns = np.exp(1j * position * 10_000.0 ** (-np.arange(half) / half))
    product = (vector[:half] + 1j * vector[half:]) * turns
    return np.concatenate([product.real, product.imag])


def attend(parameters, inputs):
    """Attention of one sequence, token by token and head by head: `[T, width]` -> the same."""
    queries, keys, values = (
        (inputs @ parameters[name]["kernel"]).reshape(len(inputs), TINY.heads, -1)
        for name in ("query", "key", "value")
    )
    outputs = np.zeros_like(queries)
    for t in range(len(inputs)):
        for head in range(TINY.heads):
            query = turn(queries[t, head], t)
            scores = [query @ turn(keys[s, head], s) for s in range(t + 1)]
            weights = np.exp(np.array(scores) / np.sqrt(len(query)))
            outputs[t, head] = weights @ values[: t + 1, head] / weights.sum()
    return outputs.reshape(inputs.shape) @ parameters["output"]["kernel"]


def compute_logits(variables, tokens):
    """The model in float64, for one sequence: `[T]` -> `[T, V]`."""
    parameters = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables)["params"]
    table = parameters["embedding"]["embedding"]
    x = table[tokens]
    for layer in range(TINY.layers):
        block = parameters[f"block_{layer}"]
        normed = np.array([rms_norm(row, block["attention_norm"]["scale"]) for row in x])
        x = x + attend(block["attention"], normed)
        normed = np.array([rms_norm(row, block["feed_forward_norm"]["scale"]) for row in x])
        hidden = gelu(normed @ block["feed_forward"]["Dense_0"]["kernel"])
        x = x + hidden @ block["feed_forward"]["Dense_1"]["kernel"]
    return np.array([rms_norm(row, parameters["norm"]["scale"]) for row in x]) @ table.T


def test_forward_pass_is_that_of_numpy():
    model, variables = tiny()
    tokens = draw_tokens((2, 7))
    logits = jax.jit(model.apply)(variables, tokens)
    assert logits.dtype == jnp.float32
    expected = np.array([compute_logits(variables, row) for row in tokens])
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_rotation_of_bfloat16_counts_beyond_256():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    rotated = rotate(x, jnp.array([512, 513]))
    assert rotated.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), jnp.array([512, 513]))
    np.testing.assert_allclose(rotated.astype(jnp.float32), exact, atol=0.01)
