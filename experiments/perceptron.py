"""The perceptron of the studies that simulate many nodes, and the images on which it learns."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import data

CLASSES = 10
Params = dict[str, jax.Array]
Batch = Any
"""Arrays `[B, ...]`."""


class Images(NamedTuple):
    """Pixels `[E, P]`, which have mean 0 all together, and labels `[E]`, to train and to test."""

    train: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]

    @property
    def pixels(self) -> int:
        """P, the inputs of the perceptron."""
        return self.train[0].shape[1]


def load_images(fashion_mnist: Path | None, pool: int = 1) -> Images:
    """Loads Fashion-MNIST from a folder, or 5,000 MNIST digits without one.

    Squares of `pool` x `pool` pixels become their mean.
    """
    name = "mnist5k" if fashion_mnist is None else "fashion_mnist"
    loaded = data.load(name, fashion_mnist)

    def flatten(images: np.ndarray) -> jax.Array:
        side = images.shape[1] // pool
        squares = images.reshape(len(images), side, pool, side, pool)
        return jnp.asarray(squares.mean((2, 4)).reshape(len(images), side * side))

    return Images(
        (flatten(loaded.train_images), jnp.asarray(loaded.train_labels)),
        (flatten(loaded.test_images), jnp.asarray(loaded.test_labels)),
    )


def init_perceptron(key: jax.Array, pixels: int, hidden: int) -> Params:
    """Returns the parameters of a perceptron with one hidden layer, drawn as He et al. do."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (pixels, hidden)) * math.sqrt(2 / pixels),
        "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(second, (hidden, CLASSES)) * math.sqrt(1 / hidden),
        "b2": jnp.zeros(CLASSES),
    }


def predict(params: Params, pixels: jax.Array) -> jax.Array:
    """Returns the logits `[B, 10]` of pixels `[B, P]`."""
    hidden = jax.nn.relu(pixels @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def compute_loss(params: Params, batch: Batch) -> jax.Array:
    """Returns the mean cross-entropy of pixels `[B, P]` and labels `[B]`, in nats."""
    pixels, labels = batch
    logits = predict(params, pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compute_accuracy(params: Params, batch: Batch) -> jax.Array:
    """Returns the part of the images whose largest logit is that of their label."""
    pixels, labels = batch
    return (predict(params, pixels).argmax(-1) == labels).mean(dtype=jnp.float32)
