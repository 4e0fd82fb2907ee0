"""Trains an image classifier over gossiping nodes, and compares algorithms.

    python -m experiments.image

Without options it trains a small CNN on 5,000 MNIST digits over 8 nodes, with SGP and with
AllReduce. The program prints a table and writes `metrics.jsonl`, `summary.json` and plots into a
folder, `--out`.

The program runs unchanged in one process, under `python -m gossipjax.launch` and on the hosts of a
cluster. The data and batches of a node are the same in any process.
`experiments/training/__init__.py` says which file does what.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax

import gossipjax as gx
from experiments import data, models
from experiments.data.sharding import Shuffle
from experiments.models.layers import draw_dropout_seeds, make_dropout_rngs
from experiments.options import DTYPES, OptionalPath, PositiveFloat
from experiments.training.main import run_program
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task, Variables


@dataclasses.dataclass(frozen=True)
class ImageOptions(TrainingOptions):
    """Trains an image classifier over gossiping nodes."""

    dataset: Literal["mnist5k", "fashion_mnist", "mnist", "cifar10", "imagenet2012"] = "mnist5k"
    """mnist5k is 5,000 digits that are installed with the program. All others are read from
    --data-dir."""
    data_dir: OptionalPath = None
    """For mnist and fashion_mnist, a folder with the authors' four idx files, gzipped or not. For
    cifar10 and imagenet2012, a folder with NAME/VERSION, which `python -m experiments.data prepare`
    or TensorFlow Datasets has written."""
    dirichlet_alpha: PositiveFloat | None = None
    """Divide the images of each class over the nodes by Dirichlet(alpha); the smaller alpha, the
    more uneven. Without an alpha, images are shuffled."""
    model: Literal[
        "small_cnn", "mlp", "linear", "resnet20", "resnet56", "vgg11", "resnet18", "resnet50"
    ] = "small_cnn"
    """small_cnn has 106,000 parameters. mlp has two hidden layers, as many parameters, and is
    faster. linear is softmax regression on pixels. resnet20, resnet56 and vgg11 are for CIFAR,
    resnet18 and resnet50 for ImageNet.
    """
    normalization: models.Normalization | None = None
    """batch is BatchNorm after the convolutions, or of the pixels for linear; group is GroupNorm,
    for small_cnn. The default is batch for residual networks, which need BatchNorm, and none for
    all others."""
    no_decay_on_norm_and_bias: bool = False
    """Apply weight decay to kernels only, not to biases and BatchNorm's scales (Goyal et al.)."""

    @property
    def model_normalization(self) -> models.Normalization:
        """The normalization of the model, even if the option is not given."""
        return self.normalization or ("batch" if self.model.startswith("resnet") else "none")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_local_shuffle(self.dirichlet_alpha)
        chosen = self.model_normalization
        if self.batch_stats != "local" and chosen != "batch":
            raise ValueError(
                f"--batch-stats {self.batch_stats} needs --normalization batch, got {chosen}."
            )
        if self.model.startswith("resnet") and chosen != "batch":
            raise ValueError(
                f"--normalization must be batch for {self.model}, which diverges without, got "
                f"{chosen}."
            )
        if chosen == "group" and self.model != "small_cnn":
            raise ValueError(f"--normalization group needs --model small_cnn, got {self.model}.")
        if self.remat and self.model in ("small_cnn", "mlp", "linear"):
            raise ValueError(f"--remat needs a deep --model, such as resnet20, got {self.model}.")
        if self.dataset == "mnist5k" and self.data_dir:
            raise ValueError(
                "--data-dir needs another --dataset, such as fashion_mnist, got mnist5k, which is "
                "installed."
            )


class ImageClassification(Task):
    """A classifier of images, trained by cross-entropy."""

    def __init__(self, options: ImageOptions):
        is_prepared = options.dataset in data.RECIPES
        load: Any = data.ImageRecords if is_prepared else data.load
        self.images: data.Images = load(options.dataset, options.data_dir)
        self.dirichlet_alpha = options.dirichlet_alpha
        self.shuffle: Shuffle = options.shuffle
        dtype, param_dtype = DTYPES[options.precision]
        remat = {"remat": True} if options.remat else {}
        self.model: Any = models.MODELS[options.model](
            self.images.classes, dtype, param_dtype, options.model_normalization, **remat
        )
        self.has_dropout = options.model == "vgg11"
        self.decay_mask = models.decay_mask if options.no_decay_on_norm_and_bias else None
        self.num_examples = self.images.num_train
        self.description = (
            f"{self.images.name}, {self.num_examples:,} training and "
            f"{self.images.num_test:,} test examples"
        )

    def init(self, seed: int) -> Variables:
        example = np.zeros((1, *self.images.shape), np.float32)
        return jax.jit(self.model.init)(jax.random.key(seed), example)

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        images, labels, *seeds = batch
        logits, new = self.model.apply(
            variables,
            self.images.standardize(images),
            train=True,
            mutable=["batch_stats"],
            rngs=make_dropout_rngs(*seeds) if seeds else None,
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new.get("batch_stats")

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        is_even = self.dirichlet_alpha is None
        # Only an uneven division needs the labels, and reading the labels of records takes long.
        labels = np.arange(self.num_examples) if is_even else self.images.train_labels
        division = data.divide_examples(
            labels, nodes.size, self.dirichlet_alpha, seed, self.shuffle
        )
        batches = self.images.batches(division, batch_size_per_node, seed, nodes.local, start)
        if not self.has_dropout:
            return batches
        return (
            (*batch, draw_dropout_seeds(seed, step, nodes.local, batch_size_per_node))
            for step, batch in enumerate(batches, start)
        )

    def test_batches(self) -> Iterator[Any]:
        return self.images.test_batches()

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        images, labels = batch
        predictions = self.model.apply(variables, self.images.standardize(images)).argmax(axis=-1)
        return {"accuracy": Metric(predictions == labels)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.image", ImageOptions, ImageClassification, arguments)


if __name__ == "__main__":
    main()
