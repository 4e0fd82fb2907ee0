"""The builder of TensorFlow Datasets that writes a data set, without network or TensorFlow."""

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.local import DataError

Examples = Iterator[tuple[int | str, dict[str, Any]]]
"""Pairs of a key, which decides on the order in the files, and the features of an example."""


class Original(NamedTuple):
    """The original files of a data set.

    Attributes:
        name: that of the data set in TensorFlow Datasets.
        version: the version there that has the same form.
        features: by name.
        splits: name -> function that reads the examples.
    """

    name: str
    version: str
    features: Mapping[str, Any]
    splits: Mapping[str, Callable[[], Examples]]


def to_png(pixels: np.ndarray) -> io.BytesIO:
    """Returns an image, uint8 `[H, W]` or `[H, W, 3]`, as the bytes of a PNG file."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    png.seek(0)
    return png


def prepare(original: Original, data_dir: Path) -> Path:
    """Writes a data set into DATA_DIR/NAME/VERSION, in array_record, with progress bars.

    The folder appears when all of it is written. `tfds.data_source(NAME, data_dir=DATA_DIR)` reads
    it like one that TensorFlow Datasets has downloaded and prepared.

    Returns:
        The new folder.

    Raises:
        DataError: if there is one, which is never overwritten, or the files have no examples.
    """
    folder = data_dir / original.name / original.version
    if folder.exists():
        raise DataError(
            f"--data-dir must be a folder without {original.name} {original.version}, got "
            f"{data_dir}, which has {folder}: remove that one, or choose another --data-dir."
        )
    builder = make_builder(original, data_dir)
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it says that it downloads
            builder.download_and_prepare(download_config=config)
    except AssertionError as error:  # "No examples were yielded."
        raise DataError(
            f"{original.name}: {error} Give the folder of the original files."
        ) from error
    return folder


def make_builder(original: Original, data_dir: Path) -> Any:
    """Returns the builder, which is named like the official one of the data set."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = original.name
        VERSION = tfds.core.Version(original.version)

        def _info(self) -> Any:
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(dict(original.features)),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager: object) -> Any:
            return {name: read() for name, read in original.splits.items()}

        def _generate_examples(self) -> Any:
            raise NotImplementedError  # the splits have their own

    builder: Any = Builder
    return builder(data_dir=data_dir, file_format="array_record")
