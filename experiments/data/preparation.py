"""Writes a data set in the form of TensorFlow Datasets, without network or TensorFlow."""

import contextlib
import dataclasses
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.local import FILE_FORMAT, DataError

KeyedExamples = Iterator[tuple[int | str, dict[str, Any]]]
"""Pairs of a key, which decides on the order in the files, and the features of an example."""


@dataclasses.dataclass(frozen=True)
class Examples(Iterable[tuple[int | str, dict[str, Any]]]):
    """The examples of a split; the progress bar of TensorFlow Datasets asks for their number."""

    read: Callable[[], KeyedExamples]
    size: int  # those that are corrupt are left out

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> KeyedExamples:
        return self.read()


class Original(NamedTuple):
    """The original files of a data set."""

    name: str  # in TensorFlow Datasets
    version: str  # the version there that has the same form
    features: Mapping[str, Any]
    splits: Mapping[str, Examples]


def to_png(pixels: np.ndarray) -> io.BytesIO:
    """Returns an image, uint8 `[H, W]` or `[H, W, 3]`, as the bytes of a PNG file."""
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    png.seek(0)
    return png


def prepare(original: Original, data_dir: Path, overwrite: bool = False) -> Path:
    """Writes a data set into DATA_DIR/NAME/VERSION, in array_record, with progress bars.

    The folder appears when all of it is written: before, it is in DATA_DIR/NAME.incomplete-... and
    is not read by anything. `tfds.data_source(NAME, data_dir=DATA_DIR)` reads it like one that
    TensorFlow Datasets has downloaded and prepared. Returns the folder.
    """
    folder = data_dir / original.name / original.version
    if folder.exists() and not overwrite:
        raise DataError(
            f"--data-dir must be a folder without {original.name} {original.version}, got "
            f"{data_dir}, which has {folder}: pass --overwrite to replace it, or choose another "
            "--data-dir."
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{original.name}.incomplete-", dir=data_dir
    ) as scratch:
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it says that it downloads
                make_builder(original, Path(scratch)).download_and_prepare(download_config=config)
        except AssertionError as error:  # "No examples were yielded."
            raise DataError(
                f"{original.name}: {error} Give the folder of the original files."
            ) from error
        folder.parent.mkdir(exist_ok=True)
        if folder.exists():
            folder.rename(Path(scratch) / "replaced")
        (Path(scratch) / original.name / original.version).rename(folder)
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
            return dict(original.splits)

        def _generate_examples(self) -> Any:
            raise NotImplementedError  # the splits have their own

    builder: Any = Builder
    return builder(data_dir=data_dir, file_format=FILE_FORMAT)
