"""The rows of the tables: a call or a command line, and the error that it must end in."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a public function.

    Attributes:
      id: names the row.
      call: makes the call.
      message: a part of the error's message.
    """

    id: str
    call: Callable[[], Any]
    message: str


class Line(NamedTuple):
    """A command line.

    Attributes:
      program: its name in `test_bad_input.PROGRAMS`.
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


def calls(name: str, function: Callable[[Any], Any], values: list[Any], message: str) -> list[Call]:
    """Returns a row for each bad value of one argument."""

    def make(number: int, value: Any) -> Call:
        return Call(f"{name} {number}: {str(value)[:20]!r}", lambda: function(value), message)

    return [make(number, value) for number, value in enumerate(values)]
