"""Prepares data sets for the training programs.

    python -m experiments.data prepare cifar10 --from FOLDER

Writes the original files of a data set in the form of TensorFlow Datasets (array_record), without
network and without TensorFlow.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from experiments.data.local import find_folder
from experiments.options import OptionalPath, check_fields, parse_arguments
from experiments.program import exit_on_error

Name = Literal["cifar10", "imagenet2012"]


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Writes the original files of a data set in the form of TensorFlow Datasets."""

    command: tyro.conf.Positional[Literal["prepare"]]
    """What to do."""
    name: tyro.conf.Positional[Name]
    """cifar10: cifar-10-python.tar.gz, or its folder. imagenet2012: a folder with train/CLASS/ and
    val/CLASS/."""
    source: Annotated[OptionalPath, tyro.conf.arg(name="from")] = None
    """The original files."""
    data_dir: OptionalPath = None
    """Folder to write NAME/VERSION into; by default as for TensorFlow Datasets."""
    overwrite: bool = False
    """Replace the data set if it is there, once the new one is written."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.source is None:
            raise ValueError(f"--from must be the original files of {self.name}, got none.")
        if not self.source.exists():
            raise FileNotFoundError(f"--from must be a file or folder, got {self.source}.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, and writes the data set."""
    with exit_on_error():
        options = parse_arguments(PrepareOptions, "experiments.data", arguments)
        from experiments.data.originals import ORIGINALS  # here: it imports TensorFlow Datasets
        from experiments.data.preparation import prepare

        assert options.source is not None
        original = ORIGINALS[options.name](options.source)
        folder = prepare(original, find_folder(options.data_dir), options.overwrite)
        print(f"{options.name} is in {folder}")


if __name__ == "__main__":
    main()
