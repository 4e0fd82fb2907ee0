"""The original files of CIFAR-10 and ImageNet."""

import functools
import io
import pickle
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.local import DataError, MissingDataError
from experiments.data.prefetch import count_cores, map_ahead
from experiments.data.preparation import Examples, KeyedExamples, Original, to_png

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILES = ("test_batch",)
CIFAR_CLASSES = [
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
]
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


def open_cifar10(path: Path) -> Original:
    """Reads cifar-10-python.tar.gz or its folder, in this path or at it."""
    files = _read_cifar(path)
    return Original(
        name="cifar10",
        version="3.0.2",
        features={
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=CIFAR_CLASSES),
        },
        splits={
            "train": _make_cifar_examples(files, TRAIN_FILES, "train"),
            "test": _make_cifar_examples(files, TEST_FILES, "test"),
        },
    )


def _read_cifar(path: Path) -> dict[str, bytes]:
    """Returns the content of the files by name, which are 180 MB."""
    folders = [folder for folder in (path, path / FOLDER) if (folder / TEST_FILES[0]).is_file()]
    archives = [archive for archive in (path, path / ARCHIVE) if archive.is_file()]
    if folders:
        paths = (folders[0] / name for name in (*TRAIN_FILES, *TEST_FILES))
        return {path.name: path.read_bytes() for path in paths if path.is_file()}
    if not archives:
        raise MissingDataError(
            f"--from must be {ARCHIVE}, its folder {FOLDER}, or a folder with one of them, got "
            f"{path}."
        )
    try:
        with tarfile.open(archives[0]) as tar:
            contents = {Path(member.name).name: tar.extractfile(member) for member in tar}
            return {name: content.read() for name, content in contents.items() if content}
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{archives[0]} is corrupt or cut short: {error}; fetch it again."
        ) from error


def _make_cifar_examples(
    contents: dict[str, bytes], files: tuple[str, ...], split: str
) -> Examples:
    parts = [_parse_cifar(file, contents) for file in files]  # all before one is written
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))

    def read() -> KeyedExamples:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = f"{split}_{index:05d}"
            yield index, {"id": name, "image": to_png(image), "label": int(label)}

    return Examples(read, len(labels))


def _parse_cifar(file: str, contents: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, uint8 `[M, 32, 32, 3]`, and the labels `[M]` of a file."""
    if file not in contents:
        raise MissingDataError(f"--from must have all files of CIFAR-10, got no {FOLDER}/{file}.")
    try:
        batch = Unpickler(io.BytesIO(contents[file]), encoding="bytes").load()
        pixels = batch[b"data"].reshape(-1, IMAGE_BYTES)
        labels = np.array(batch[b"labels"], int)
    except Exception as error:  # of many types, for bytes that are no pickle
        raise DataError(f"{file} must be a pickle of CIFAR-10, got {error!r}.") from error
    is_fitting = pixels.dtype == np.uint8 and labels.shape == (len(pixels),) and len(labels) > 0
    if not is_fitting or labels.min() < 0 or labels.max() >= len(CIFAR_CLASSES):
        raise DataError(
            f"{file} must hold the same number of images and of labels from 0 to 9, got "
            f"{len(pixels)} images of {pixels.dtype} and labels {list(labels.shape)} from "
            f"{labels.min(initial=0)} to {labels.max(initial=0)}."
        )
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


SUFFIXES = frozenset({".jpeg", ".jpg", ".png"})
JPEG_QUALITY = 95  # of images that are something else


def open_imagenet2012(folder: Path) -> Original:
    """Reads FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE; classes in alphabetical order.

    So the 1,000 official classes, n01440764 and others, have the labels of TensorFlow Datasets.
    Every image is decoded once. A corrupt one is named and left out; one that is not an
    RGB or grey JPEG, of which ImageNet has 23, is written as one.
    """
    images = {split: _find_images(folder / split) for split in ("train", "val")}
    classes = sorted({path.parent.name for path in images["train"]})
    unknown = {path.parent.name for path in images["val"]} - set(classes)
    if unknown:
        raise MissingDataError(
            f"{folder / 'val'} must have classes of {folder / 'train'}, got {sorted(unknown)[0]}: "
            "move every validation image into the folder of its class."
        )
    return Original(
        name="imagenet2012",
        version="5.1.0",
        features={
            "file_name": tfds.features.Text(),
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=classes),
        },
        splits={
            name: Examples(functools.partial(_read_images, images[split]), len(images[split]))
            for name, split in (("train", "train"), ("validation", "val"))
        },
    )


def _find_images(folder: Path) -> list[Path]:
    """Returns the images of a split; what else is in the folders of its classes is not read."""
    images = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
    if not images:
        raise MissingDataError(
            "--from must be a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, got no image in "
            f"{folder}/*/."
        )
    return images


def _read_images(paths: list[Path]) -> KeyedExamples:
    contents = map_ahead(_read_jpeg, paths, ahead=4 * count_cores())
    for path, content in zip(paths, contents, strict=True):
        if isinstance(content, Exception):
            print(f"left out: {path} is corrupt: {content}", file=sys.stderr)
            continue
        example = {"file_name": path.name, "image": content, "label": path.parent.name}
        yield f"{path.parent.name}/{path.name}", example


def _read_jpeg(path: Path) -> io.BytesIO | Exception:
    """Returns the bytes of an image as a JPEG file, or what is wrong with it."""
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                return io.BytesIO(content)
            jpeg = io.BytesIO()
            image.convert("RGB").save(jpeg, "JPEG", quality=JPEG_QUALITY)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises errors of many types
        return error
    jpeg.seek(0)
    return jpeg


ORIGINALS: dict[str, Callable[[Path], Original]] = {
    "cifar10": open_cifar10,
    "imagenet2012": open_imagenet2012,
}
"""Name -> function of a folder or file."""
