"""CIFAR-10: cifar-10-python.tar.gz, or its folder cifar-10-batches-py."""

import functools
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.local import DataError, MissingDataError
from experiments.data.preparation.builder import Examples, KeyedExamples, Original, to_png

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
IMAGE_BYTES = 3 * 32 * 32

# What the pickles of the archive refer to: no other code of a file is run.
ALLOWED: dict[str, Callable[..., Any]] = {
    "_reconstruct": np.zeros(0).__reduce__()[0],  # pyright: ignore[reportAssignmentType]
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "encode": lambda text, encoding: text.encode(encoding),
}


class Unpickler(pickle.Unpickler):
    """Reads dictionaries, lists, texts and NumPy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in ALLOWED:
            return ALLOWED[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def open_cifar10(path: Path, max_corrupt: int) -> Original:
    """Reads the archive: its path, that of its folder, or that of a folder that holds one of them.

    The images are not compressed, so none can be corrupt; `max_corrupt` is not used.

    Raises:
        MissingDataError: if there is none, or a file of it is missing.
        DataError: if a file is corrupt, or a label out of range.
    """
    read_file = _find(path)
    return Original(
        name="cifar10",
        version="3.0.2",
        features={
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=CLASSES),
        },
        splits={
            "train": _make_examples(read_file, TRAIN_FILES, "train"),
            "test": _make_examples(read_file, TEST_FILES, "test"),
        },
    )


def _find(path: Path) -> Callable[[str], bytes]:
    """A function from the name of a file to its content."""
    for folder in (path, path / FOLDER):
        if (folder / TEST_FILES[0]).is_file():
            return lambda file: _read_bytes(folder / file)
    for archive in (path, path / ARCHIVE):
        if archive.is_file():
            files = _read_archive(archive)
            return lambda file: _find_member(files, archive, file)
    raise MissingDataError(
        f"--from must be {ARCHIVE}, its folder {FOLDER}, or a folder with one of them, got {path}."
    )


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise MissingDataError(f"--from must have all files of CIFAR-10, got no {path}.")
    return path.read_bytes()


def _read_archive(archive: Path) -> dict[str, bytes]:
    """All files of the archive, which are 180 MB."""
    try:
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.isfile()]
            contents = [tar.extractfile(member) for member in members]
            return {
                Path(member.name).name: content.read()
                for member, content in zip(members, contents, strict=True)
                if content is not None
            }
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{archive} is corrupt or cut short: {error}; fetch it again.") from error


def _find_member(files: dict[str, bytes], archive: Path, file: str) -> bytes:
    if file not in files:
        raise MissingDataError(f"{archive} must hold {FOLDER}/{file}, got an archive without.")
    return files[file]


def _make_examples(
    read_file: Callable[[str], bytes], files: tuple[str, ...], split: str
) -> Examples:
    contents = [_parse(file, read_file(file)) for file in files]  # all, before any is written
    images, labels = (np.concatenate(arrays) for arrays in zip(*contents, strict=True))
    return Examples(functools.partial(_read, images, labels, split), len(labels))


def _read(images: np.ndarray, labels: np.ndarray, split: str) -> KeyedExamples:
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        png = to_png(image)
        yield index, {"id": f"{split}_{index:05d}", "image": png, "label": int(label)}


def _parse(file: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 `[M, 32, 32, 3]` and labels `[M]` of a file."""
    try:
        batch = Unpickler(io.BytesIO(content), encoding="bytes").load()
        pixels = batch[b"data"].reshape(-1, IMAGE_BYTES)
        labels = np.array(batch[b"labels"], int)
    except Exception as error:  # of many types, for bytes that are no pickle
        raise DataError(f"{file} must be a pickle of CIFAR-10, got {error!r}.") from error
    is_fitting = pixels.dtype == np.uint8 and labels.shape == (len(pixels),) and len(labels) > 0
    if not is_fitting or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(
            f"{file} must hold the same number of images and of labels from 0 to 9, got "
            f"{len(pixels)} images of {pixels.dtype} and labels {list(labels.shape)} from "
            f"{labels.min(initial=0)} to {labels.max(initial=0)}."
        )
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
