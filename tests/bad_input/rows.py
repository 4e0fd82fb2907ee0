"""The rows of the tables: a call or a command line, and the error that it must end in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Call = tuple[Callable[[], Any], str]  # of a public function, and a part of the error's message


class Line(NamedTuple):
    """A command line.

    Attributes:
      program: its name, after `python -m experiments.` or `gossipjax.`
      arguments: in which `OUT` is an empty folder, one per row.
      message: a part of what is printed.
      write: writes files into the folder first.
      status: the exit status.
      parsed: whether the parser of the command line refuses it, in its own words.
    """

    program: str
    arguments: str
    message: str
    write: Callable[[Path], object] = lambda folder: None
    status: int = 2
    parsed: bool = False

    @property
    def id(self) -> str:
        return f"{self.program} {self.arguments} {self.message}"[:90]


def each(function: Callable[[Any], Any], message: str, *values: Any) -> list[Call]:
    """Returns a row for each bad value of one argument."""
    return [(lambda value=value: function(value), message) for value in values]
