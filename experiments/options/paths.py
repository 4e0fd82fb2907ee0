"""Paths as options of a program."""

from pathlib import Path
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec


def parse_path(arguments: list[str]) -> Path:
    """Returns the path that a command line gives.

    Raises:
      ValueError: for an empty one, which `Path` would read as the current folder.

    >>> parse_path(["runs/7"])
    PosixPath('runs/7')
    """
    (text,) = arguments
    if not text:
        raise ValueError("a path must not be empty, got '': write . for the current folder.")
    return Path(text)


OptionalPath = Annotated[
    Path | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=parse_path,
        is_instance=lambda value: value is None or isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]
