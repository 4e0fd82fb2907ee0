"""Data sets on this machine, in the folders of TensorFlow Datasets; no network is ever asked."""

import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from experiments.program import FatalError
from gossipjax.processes import local_nodes, put, to_host

VERSION = re.compile(r"\d+\.\d+\.\d+")
FILE_FORMAT = "array_record"

Example = TypeVar("Example")
ImageExample = tuple[np.ndarray, int]
"""An image, uint8 `[H, W, 3]`, and its label."""


class DataError(ValueError):
    """Data that cannot be loaded, read or divided."""


class MissingDataError(DataError, FileNotFoundError):
    """A folder without the data; the message names the missing files and what to do."""


class RecordError(DataError, FatalError):
    """Records that a run meets and cannot go on with: wrong labels, or too many corrupt ones."""


def find_folder(data_dir: Path | None) -> Path:
    """Returns the folder of data sets: the given one, `$TFDS_DATA_DIR`, ~/tensorflow_datasets."""
    default = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    return (data_dir or Path(default)).expanduser()


def find_prepared(name: str, folder: Path) -> Path | None:
    """Returns the folder of the newest version of a prepared data set, FOLDER/NAME/VERSION."""
    infos = (folder / name).glob("*/dataset_info.json")
    versions = [info.parent for info in infos if VERSION.fullmatch(info.parent.name)]
    return max(versions, key=lambda path: [*map(int, path.name.split("."))], default=None)


def open_splits(
    version_dir: Path, names: tuple[str, ...], keep_encoded: tuple[str, ...] = ()
) -> list[Any]:
    """Returns the splits of a prepared data set: sequences of examples, for reading at random.

    The features in `keep_encoded` stay encoded, such as images, which are bytes then.

    Raises:
        DataError: if a split or one of its files is missing, or the files cannot be read without
            TensorFlow.
    """
    import tensorflow_datasets as tfds  # here, because the import takes a quarter of a second

    try:
        builder: Any = tfds.builder_from_directory(version_dir)
    except Exception as error:  # TFDS does not wrap the errors of its libraries
        raise DataError(
            f"{version_dir} must hold a data set of TensorFlow Datasets, got {error}: prepare it "
            "again."
        ) from error
    if builder.info.file_format.value != FILE_FORMAT:
        raise DataError(
            f"{version_dir} holds files that cannot be read without TensorFlow; prepare the data "
            f'set with file_format="{FILE_FORMAT}".'
        )
    splits = builder.info.splits
    for name in names:
        if name not in splits:
            raise DataError(
                f"{version_dir} must have the splits {', '.join(names)}, got "
                f"{', '.join(splits) or 'none'}: prepare it again, from all files."
            )
        missing = [path for path in splits[name].filepaths if not Path(path).exists()]
        if missing:
            raise DataError(f"{version_dir} must hold all its files, got no {missing[0]}.")
    decoders = {feature: tfds.decode.SkipDecoding() for feature in keep_encoded}
    return [builder.as_data_source(split=name, decoders=decoders) for name in names]


def read_examples(source: Any, name: str, decode: Callable[[Any], Example]) -> Iterator[Example]:
    """Yields `decode(record)` for the records of a split; an error names the split and the record.

    Raises:
        DataError: for the first record that cannot be read or decoded.
    """
    for index in range(len(source)):
        try:
            example = decode(source[index])
        except (DataError, MemoryError):
            raise
        except Exception as error:  # of many types: TFDS and protobuf do not wrap theirs
            raise DataError(
                f"example {index} of {name} must be one that can be read, got {error}: repair the "
                "data set, or prepare it again."
            ) from error
        yield example


class CorruptImages:
    """Corrupt images: each is named on stderr once, and they are counted up to a limit.

    Attributes:
        errors: name of the image -> what is wrong with it.
    """

    def __init__(self, limit: int):
        self.errors: dict[str, str] = {}
        self._limit = limit
        self._lock = threading.Lock()

    def add(self, name: str, error: object) -> None:
        """Adds an image; raises `RecordError` if there are more than the limit."""
        with self._lock:
            if name in self.errors:
                return
            self.errors[name] = str(error)
            count = len(self.errors)
        message = f"{name} is corrupt: {error}"
        if count > self._limit:
            raise RecordError(
                f"at most {self._limit} images must be corrupt, got {self._limit + 1}, the last "
                f"one: {message}. Raise --max-corrupt-images, or repair the data set."
            )
        print(f"left out, {count} so far: {message}", file=sys.stderr)


class SplitReader:
    """Reads and decodes the images of a prepared split, of which some may be corrupt.

    Attributes:
        corrupt: the numbers of the corrupt images that this process has met.
    """

    def __init__(self, source: Any, name: str, classes: int, corrupt: CorruptImages):
        self._source = source
        self._name = name
        self._classes = classes
        self._all_corrupt = corrupt
        self.corrupt: set[int] = set()

    def __len__(self) -> int:
        return len(self._source)

    def decode(self, index: int, crop: Callable[[Image.Image], np.ndarray]) -> ImageExample | None:
        """Returns an image, cropped, with its label; None if it is corrupt.

        Raises:
            RecordError: if the label is out of range, or too many images are corrupt.
        """
        try:
            record = self._source[index]
            with Image.open(io.BytesIO(record["image"])) as image:
                pixels = crop(image)
        except MemoryError:
            raise
        except Exception as error:  # of many types: Pillow, TFDS and protobuf do not wrap theirs
            self._all_corrupt.add(f"image {index} of {self._name}", error)
            self.corrupt.add(index)
            return None
        return pixels, self._require_label(index, record)

    def read_encoded(self, index: int) -> bytes:
        """Returns an image as it is in its record: the bytes of a file."""
        return self._source[index]["image"]

    def count_corrupt(self) -> int:
        """Returns how many corrupt images all processes have met; all of them must call it."""
        if jax.process_count() == 1:
            return len(self.corrupt)
        marks = np.zeros(len(self), bool)
        marks[list(self.corrupt)] = True
        mesh = Mesh(np.array(jax.devices()), ("nodes",))
        rows = np.stack([np.packbits(marks)] * len(local_nodes(mesh, mesh.size)))
        together = np.bitwise_or.reduce(to_host(put(rows, mesh, mesh.size)), axis=0)
        return int(np.unpackbits(together).sum())

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Returns int32 labels; raises `RecordError` if one is out of range or cannot be read."""
        labels = np.empty(len(indices), np.int32)
        for row, index in enumerate(indices.tolist()):
            try:
                record = self._source[index]
            except Exception as error:  # of many types, see above
                raise RecordError(
                    f"image {index} of {self._name} must have a label, got {error}: repair the "
                    "data set, or divide it evenly, without --dirichlet-alpha."
                ) from error
            labels[row] = self._require_label(index, record)
        return labels

    def _require_label(self, index: int, record: Any) -> int:
        label = int(record["label"])
        if not 0 <= label < self._classes:
            raise RecordError(
                f"labels must be from 0 to {self._classes - 1}, got {label} for image {index} of "
                f"{self._name}: prepare the data set again."
            )
        return label
