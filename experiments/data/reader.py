"""Reading and decoding the images of a prepared split, of which some may be corrupt."""

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from experiments.data.local import RecordError
from gossipjax.processes import local_nodes, put, to_host

Example = tuple[np.ndarray, int]
"""An image, uint8 `[H, W, 3]`, and its label."""


class CorruptImages:
    """What was found to be corrupt: named on stderr once, and counted up to a limit.

    Args:
        limit: number of corrupt images that a process goes on with.

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
    """The images of one split.

    Args:
        source: the examples, whose `image` is not decoded.
        name: the split and where it is, for messages.
        classes: number of classes.
        corrupt: where corrupt images are noted.

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

    def decode(self, index: int, crop: Callable[[Image.Image], np.ndarray]) -> Example | None:
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
