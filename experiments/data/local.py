"""Data sets on this machine, in the folders of TensorFlow Datasets; no network is ever asked."""

import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from experiments.program import FatalError

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
    """A record that a run meets and cannot go on with."""


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


@dataclasses.dataclass(frozen=True)
class SplitReader:
    """Reads the examples of a prepared split; an error names the split and the example."""

    source: Any
    name: str

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int, decode: Callable[[Any], Example]) -> Example:
        """Returns what `decode` makes of a record; raises `RecordError` if it is corrupt."""
        try:
            return decode(self.source[index])
        except (DataError, MemoryError):
            raise
        except Exception as error:  # of many types: Pillow, TFDS and protobuf do not wrap theirs
            raise RecordError(
                f"example {index} of {self.name} must be one that can be read, got {error}: repair "
                "the data set, or prepare it again."
            ) from error

    def read_all(self, decode: Callable[[Any], Example]) -> Iterator[Example]:
        """Yields `decode(record)` for all records."""
        return (self.read(index, decode) for index in range(len(self)))

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Returns int32 labels."""
        return np.array([self.source[index]["label"] for index in indices.tolist()], np.int32)


def decode_image(crop: Callable[[Image.Image], np.ndarray], record: Any) -> ImageExample:
    """Returns the image of a record, cropped, with its label."""
    with Image.open(io.BytesIO(record["image"])) as image:
        return crop(image), int(record["label"])
