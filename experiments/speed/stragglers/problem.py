"""What the nodes train: softmax regression on digits, and a sleep in the place of computation."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.data.images import load
from experiments.data.sharding import split_examples
from experiments.sleep import compute_one

LEARNING_RATE = 0.05  # of plain SGD
BATCH_SIZE_PER_NODE = 32
CLASSES = 10
FLOAT_BYTES = 4
DATA_FILE = "digits.npz"

Batch = tuple[Any, Any]
"""Images `[B, D]` and labels `[B]`."""


def make_optimizer() -> optax.GradientTransformation:
    """The local optimizer."""
    return optax.sgd(LEARNING_RATE)


def save_data(folder: Path) -> None:
    """Writes the digits into a folder, for all processes."""
    digits = load("mnist5k")
    images = digits.train_images.reshape(len(digits.train_labels), -1)
    np.savez(folder / DATA_FILE, images=images, labels=digits.train_labels)


class Data(NamedTuple):
    """The digits, and those of this node.

    Attributes:
      images: `[M, D]`.
      labels: `[M]`.
      shard: the indices of this node's digits.
    """

    images: np.ndarray
    labels: np.ndarray
    shard: np.ndarray

    @classmethod
    def read(cls, folder: Path, nodes: int, rank: int) -> "Data":
        """Reads what `save_data` wrote."""
        with np.load(folder / DATA_FILE) as arrays:
            images = arrays["images"]
            labels = arrays["labels"]
        return cls(images, labels, split_examples(labels, nodes, None, seed=0)[rank])

    def draw_batch(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A batch of this node's digits."""
        chosen = rng.choice(self.shard, BATCH_SIZE_PER_NODE)
        return self.images[chosen], self.labels[chosen]


def make_params(features: int, megabytes: float) -> dict[str, np.ndarray]:
    """Zeros; an array that the model does not use pads them to this number of 1e6 bytes."""
    params = {
        "w": np.zeros((features, CLASSES), np.float32),
        "b": np.zeros(CLASSES, np.float32),
    }
    padding = int(megabytes * 1e6 / FLOAT_BYTES) - sum(x.size for x in params.values())
    if padding > 0:
        params["padding"] = np.zeros(padding, np.float32)
    return params


def compute_loss(params: Any, batch: Batch) -> jax.Array:
    """Cross-entropy of one batch."""
    images, labels = batch
    logits = images @ params["w"] + params["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compute_gradients(params: Any, batch: Batch, seconds: jax.Array) -> tuple[Any, jax.Array]:
    """Gradients and loss of one node, which are there after these seconds.

    The sleep is a part of the compiled step, as computation on a device would be: what can run
    beside the computation of gradients, as the exchange of `osgp`, runs beside the sleep.
    """
    one = compute_one(seconds)

    def loss_after_sleep(params: Any) -> jax.Array:
        return one * compute_loss(params, batch)

    loss, grads = jax.value_and_grad(loss_after_sleep)(params)
    return grads, loss
