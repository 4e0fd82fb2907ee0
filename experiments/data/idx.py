"""The idx files of MNIST and Fashion-MNIST."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from experiments.data.local import DataError

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def missing_idx_files(folder: Path) -> list[str]:
    """Returns the names of the files that are not in the folder, gzipped or not."""
    return [file for file in IDX_FILES if not _idx_path(folder, file).exists()]


def read_idx_files(folder: Path) -> list[np.ndarray]:
    """Returns training images uint8 `[M, 28, 28]` and labels `[M]`, test images and labels."""
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
