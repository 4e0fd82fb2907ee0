"""What a section of the report is: the runs that it needs, and what it then finds."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.runner import Result, Run, Status

__all__ = [
    "GAPS",
    "Claim",
    "Figure",
    "Findings",
    "Result",
    "Results",
    "Run",
    "Scale",
    "Section",
    "Status",
    "Table",
    "Verdict",
]

Verdict = Literal["agrees", "agrees in part", "disagrees", "not judged"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the grid is, and where its data are.

    Attributes:
      is_quick: whether the whole grid must end within ten minutes on two cores.
      fashion_mnist: the folder of the four files of Fashion-MNIST; None: 5,000 MNIST digits, which
        are installed, take its place.
      speech: the folder of `speech_languages.npz`; None leaves out what needs it.
      translation: the folder of the pairs of sentences; None leaves out what needs them.
    """

    is_quick: bool = False
    fashion_mnist: Path | None = None
    speech: Path | None = None
    translation: Path | None = None


GAPS: Mapping[Status, str] = {
    "diverged": "diverged",
    "failed": "failed",
    "missing": "-",
    "finished": "-",
}
"""What stands in a table for a figure that a run should have given, by how the run ended."""

Results = Mapping[str, Result]
"""The name of a run -> how it ended; every run of the section is there."""


class Table(NamedTuple):
    """A table.

    Attributes:
      title: above it.
      columns: their titles, with units.
      rows: texts, as many as columns; ours and the paper's figures side by side.
      note: a sentence below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class Figure(NamedTuple):
    """A figure.

    Attributes:
      name: of its files; letters, digits and dashes.
      caption: below it.
      draw: draws into an empty figure.
    """

    name: str
    caption: str
    draw: Callable[[MatplotlibFigure], None]


class Claim(NamedTuple):
    """A statement of the paper, and whether it holds here.

    Attributes:
      statement: in a sentence, so that it is true or false.
      paper: the paper's figures for it.
      ours: those of the runs.
      holds: None: cannot be judged, as a run is missing or the seeds differ too much.
      is_modelled: whether ours are of a model or of a simulation, not of a measurement.
    """

    statement: str
    paper: str
    ours: str
    holds: bool | None
    is_modelled: bool = False


class Findings(NamedTuple):
    """What a section says.

    Attributes:
      claims: those that were looked at.
      sentence: what agrees, what does not, and why; honest, in a sentence or two.
      tables, figures: what is shown.
    """

    claims: Sequence[Claim]
    sentence: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether the claims hold: all that can be judged, some or none of them.

        Where fewer than half can be judged, nothing is said of all.

        >>> Findings([Claim("a", "1", "1", True), Claim("b", "1", "2", False)], "").verdict
        'agrees in part'
        >>> Findings([Claim("a", "1", "1", True), *[Claim("b", "1", "", None)] * 2], "").verdict
        'agrees in part'
        >>> Findings([Claim("a", "1", "1", False), *[Claim("b", "1", "", None)] * 2], "").verdict
        'not judged'
        """
        judged = [claim.holds for claim in self.claims if claim.holds is not None]
        are_most = 2 * len(judged) >= len(self.claims)
        if True in judged:
            return "agrees" if are_most and False not in judged else "agrees in part"
        return "disagrees" if judged and are_most else "not judged"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report: a table or figure of a paper, or a question.

    Attributes:
      name: by which `--section` chooses it.
      title: its head.
      source: paper and table, `SGP-19, Table 1 and Figure 1`; with authors, year and arXiv number
        if it is the paper's only section.
      write_text: one paragraph: what the paper did, and what is done at a scale, with its sizes.
      list_runs: what must be run at a scale; nothing if data that it needs are not there.
      find: reads the runs; those that failed or are missing leave gaps, never errors.
      needs: the fields of `Scale` without which there is nothing to find.
    """

    name: str
    title: str
    source: str
    write_text: Callable[[Scale], str]
    list_runs: Callable[[Scale], Sequence[Run]]
    find: Callable[[Scale, Results], Findings]
    needs: tuple[Literal["speech", "translation"], ...] = ()

    @property
    def place(self) -> str:
        """The source without authors and title of the paper."""
        return self.source.partition(": ")[0]
