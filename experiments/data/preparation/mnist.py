"""MNIST and Fashion-MNIST: four idx files."""

import functools
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.idx import missing_idx_files, read_idx_files
from experiments.data.local import MissingDataError
from experiments.data.preparation.builder import Examples, KeyedExamples, Original, to_png

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def open_mnist(folder: Path, max_corrupt: int) -> Original:
    """Reads the four idx files in the folder, gzipped or not; there is nothing to leave out."""
    return _open(folder, "mnist", tuple(map(str, range(10))))


def open_fashion_mnist(folder: Path, max_corrupt: int) -> Original:
    """Reads the four idx files in the folder, gzipped or not; there is nothing to leave out."""
    return _open(folder, "fashion_mnist", FASHION_CLASSES)


def _open(folder: Path, name: str, classes: tuple[str, ...]) -> Original:
    missing = missing_idx_files(folder)
    if missing:
        raise MissingDataError(
            f"--from must be a folder with the four idx files of {name}, gzipped or not, got "
            f"{folder} without {', '.join(missing)}."
        )
    train_images, train_labels, test_images, test_labels = read_idx_files(folder)
    return Original(
        name=name,
        version="3.0.1",
        features={
            "image": tfds.features.Image(shape=(28, 28, 1)),
            "label": tfds.features.ClassLabel(names=classes),
        },
        splits={
            "train": _make_examples(train_images, train_labels),
            "test": _make_examples(test_images, test_labels),
        },
    )


def _make_examples(images: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples(functools.partial(_read, images, labels), len(labels))


def _read(images: np.ndarray, labels: np.ndarray) -> KeyedExamples:
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield index, {"image": to_png(image), "label": int(label)}
