"""A call of a program, and how it ended."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

from experiments.results import Record

Status = Literal["finished", "diverged", "failed", "missing"]


class Run(NamedTuple):
    """A call of a program.

    Attributes:
      name: of its folder; letters, digits, dots and dashes. Other runs have other names, and those
        of several sections that are the same call have the same one.
      program: `python -m experiments.PROGRAM`; or `gossipjax.launch`, with its whole name.
      arguments: without `--out`, which comes after them.
      is_alone: whether it measures time, so that nothing else may run beside it.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    is_alone: bool = False

    @property
    def module(self) -> str:
        """What `python -m` runs.

        >>> Run("a", "speed", ("network",)).module, Run("b", "gossipjax.launch", ()).module
        ('experiments.speed', 'gossipjax.launch')
        """
        is_whole = self.program.startswith("gossipjax.")
        return self.program if is_whole else f"experiments.{self.program}"

    @property
    def command(self) -> str:
        """The command line.

        >>> Run("averaging", "averaging", ("--nodes", "8")).command
        'python -m experiments.averaging --nodes 8'
        """
        return " ".join(["python -m", self.module, *self.arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Attributes:
      status: diverged is a loss that is not finite; failed is any other error; missing is a run
        that was not begun or was interrupted.
      folder: the results of the program; None of a missing run.
      summary: of its `summary.json`; `{}` unless it has finished.
      error: the last lines of its output, if it has not finished.
      seconds: that it took.
      code, machine: the commit and the processor that it ran on; "" if they are not known.
    """

    status: Status
    folder: Path | None = None
    summary: Record = dataclasses.field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    code: str = ""
    machine: str = ""

    @property
    def runs(self) -> list[Record]:
        """The entries of `summary.json`; none unless the run has finished."""
        return self.summary.get("runs", [])
