"""Trains an image classifier over gossiping nodes, and compares algorithms.

    python -m experiments.image

Without options: a small CNN on 5,000 MNIST digits, with SGP over 8 nodes and with AllReduce. It
prints a table and writes `metrics.jsonl`, `summary.json` and plots into a folder, `--out`.

It runs unchanged on one process, under `python -m gossipjax.launch` and on the hosts of a cluster:
the data and the batches of a node do not depend on the process that holds it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments import data, models
from experiments.checks import PositiveFloat
from experiments.paths import OptionalPath
from experiments.training.main import run_program
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task, Variables

DTYPES = {
    "float32": (jnp.float32, jnp.float32),
    "mixed_bfloat16": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
"""Precision -> the types of computation and of parameters."""


@dataclasses.dataclass(frozen=True)
class Options(TrainingOptions):
    """Trains an image classifier over gossiping nodes."""

    CHANGEABLE_ON_RESUME: ClassVar[frozenset[str]] = TrainingOptions.CHANGEABLE_ON_RESUME | {
        "data_dir",
        "download",
    }

    dataset: Literal["mnist5k", "fashion_mnist"] = "mnist5k"
    """mnist5k: 5,000 digits, installed with the program. fashion_mnist: see --data-dir."""
    data_dir: OptionalPath = None
    """Folder of Fashion-MNIST's four official idx files, or of TensorFlow Datasets."""
    download: bool = False
    """Let TensorFlow Datasets download Fashion-MNIST if it is not there."""
    dirichlet_alpha: PositiveFloat | None = None
    """Divide each class over the nodes by Dirichlet(alpha): a small alpha is uneven. If not given,
    the examples are shuffled."""
    model: Literal["small_cnn", "linear"] = "small_cnn"
    """small_cnn: 106,000 parameters. linear: softmax regression on the pixels."""
    normalization: models.Normalization = "none"
    """batch: BatchNorm after the convolutions; of the pixels, for linear."""
    precision: Literal["float32", "mixed_bfloat16", "bfloat16"] = "float32"
    """mixed_bfloat16: computation in bfloat16, parameters in float32. bfloat16: parameters too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_stats != "local" and self.normalization == "none":
            raise ValueError(
                f"--batch-stats {self.batch_stats} needs --normalization batch, got none."
            )
        if self.dataset == "mnist5k" and (self.data_dir or self.download):
            raise ValueError(
                "--data-dir and --download need --dataset fashion_mnist, got mnist5k, which is "
                "installed."
            )


class ImageClassification(Task):
    """A classifier of images, trained by cross-entropy."""

    def __init__(self, options: Options):
        self.dataset = data.load(options.dataset, options.data_dir, options.download)
        self.dirichlet_alpha = options.dirichlet_alpha
        dtype, param_dtype = DTYPES[options.precision]
        self.model: Any = models.MODELS[options.model](
            self.dataset.classes, dtype, param_dtype, options.normalization
        )
        self.num_examples = len(self.dataset.train_labels)
        self.description = (
            f"{self.dataset.name}, {self.num_examples:,} training and "
            f"{len(self.dataset.test_labels):,} test examples"
        )

    def init(self, seed: int) -> Variables:
        return self.model.init(jax.random.key(seed), self.dataset.train_images[:1])

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        logits, new = self.model.apply(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new.get("batch_stats")

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        images = self.dataset.train_images
        labels = self.dataset.train_labels
        shards = data.split_examples(labels, nodes.size, self.dirichlet_alpha, seed)
        rows = data.draw_batches(shards, batch_size_per_node, seed, nodes.local)
        return ((images[row], labels[row]) for row in itertools.islice(rows, start, None))

    def test_batches(self) -> list[Any]:
        return [(self.dataset.test_images, self.dataset.test_labels)]

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        images, labels = batch
        predictions = self.model.apply(variables, images).argmax(axis=-1)
        return {"accuracy": Metric(predictions == labels)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.image", Options, ImageClassification, arguments)


if __name__ == "__main__":
    main()
