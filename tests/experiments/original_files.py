"""Tiny stand-ins for the original files of the data sets, in their formats."""

import gzip
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.data.idx import IDX_FILES

CLASSES = ("n01440764", "n01443537", "n01484850")
RNG = np.random.default_rng(7)
MNIST = (
    RNG.integers(0, 256, (12, 28, 28), np.uint8),
    RNG.integers(0, 10, 12, np.uint8),
    RNG.integers(0, 256, (5, 28, 28), np.uint8),
    RNG.integers(0, 10, 5, np.uint8),
)
CIFAR_PER_FILE = 8


def idx(array: np.ndarray) -> bytes:
    """An array as an idx file."""
    header = [0x800 + array.ndim, *array.shape]
    return b"".join(number.to_bytes(4) for number in header) + array.tobytes()


def write_idx(folder: Path, gz: bool = False) -> Path:
    """The four idx files of `MNIST`."""
    folder.mkdir(exist_ok=True, parents=True)
    for file, array in zip(IDX_FILES, MNIST, strict=True):
        content = gzip.compress(idx(array)) if gz else idx(array)
        (folder / (f"{file}.gz" if gz else file)).write_bytes(content)
    return folder


def make_cifar_image(index: int) -> np.ndarray:
    """Image number `index`, uint8 `[32, 32, 3]`: one of its pixels tells the number."""
    image = np.random.default_rng(index).integers(3, 256, (32, 32, 3), np.uint8)
    image[16, 16] = (index, 1, 2)
    return image


def write_cifar(folder: Path, archive: bool = False) -> Path:
    """CIFAR-10's python archive, or its folder; example i of all has label `i % 10`."""
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for number in range(6):
        rows = range(number * CIFAR_PER_FILE, (number + 1) * CIFAR_PER_FILE)
        images = np.stack([make_cifar_image(row) for row in rows])
        content = {
            b"labels": [row % 10 for row in rows],
            b"data": images.transpose(0, 3, 1, 2).reshape(len(rows), -1),
        }
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        (inner / name).write_bytes(pickle.dumps(content, protocol=2))
    if archive:
        with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
            tar.add(inner, inner.name)
        shutil.rmtree(inner)
    return folder


def write_imagenet(folder: Path) -> Path:
    """A folder of class folders, with images of several sizes, one grey and one PNG."""
    for split, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(CLASSES):
            inner = folder / split / name
            inner.mkdir(parents=True)
            for index in range(count):
                size = (260 + 20 * index, 240)
                image = Image.new("RGB", size, (40 * index, 80 * label, 100))
                if index == 1:
                    image = image.convert("L")
                image.save(inner / f"{name}_{index}.JPEG", "PNG" if index == 2 else "JPEG")
    return folder
