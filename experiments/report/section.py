"""What a section of the report is: its runs, and the claims that it judges by them.

A claim is data: rows, each an estimate with its limits, and a bound that all of them must keep.
`judge` is the only function that says whether a claim holds.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.estimates import Estimate
from experiments.runner import Result, Run

Verdict = Literal["agrees", "agrees in part", "disagrees", "not judged"]
MAX_ROWS = 8  # of exact figures that a claim lists one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the runs are, and where their data are.

    Attributes:
      is_quick: whether the whole report must end within ten minutes on two cores.
      fashion_mnist: the folder of the four files of Fashion-MNIST; None: 5,000 MNIST digits, which
        are installed, take its place.
      speech: the folder of `speech_languages.npz`; None leaves out what needs it.
      translation: the folder of the pairs of sentences; None leaves out what needs them.
    """

    is_quick: bool = False
    fashion_mnist: Path | None = None
    speech: Path | None = None
    translation: Path | None = None


Results = Mapping[str, Result]
"""The name of a run -> how it ended."""


class Claim(NamedTuple):
    """A statement of the paper: all rows are between two bounds.

    Attributes:
      statement: a sentence that is true or false, with the bounds.
      paper: the paper's figures.
      rows: title -> what was measured, with its limits; empty if a run is missing.
      at_least, at_most: the bounds; without any, rows are shown and not judged.
      spec: how rows are formatted.
      is_modelled: whether rows are of a model or a simulation, not of a measurement.
      if_not: what is known of the cause, shown where the claim does not hold.
    """

    statement: str
    paper: str
    rows: Mapping[str, Estimate]
    at_least: float = -math.inf
    at_most: float = math.inf
    spec: str = "+.2f"
    is_modelled: bool = False
    if_not: str = ""

    @property
    def ours(self) -> str:
        """The rows as text.

        >>> Claim("", "", {"4 nodes": Estimate(0.25, -0.25, 0.75)}).ours
        '4 nodes +0.25 ± 0.50'
        """
        rows = self.rows
        if len(rows) > MAX_ROWS and all(row.low == row.high for row in rows.values()):
            values = [row.value for row in rows.values()]
            lowest, highest = (format(value, self.spec) for value in (min(values), max(values)))
            return f"{lowest} to {highest} in {len(rows)} rows"
        texts = [f"{title} {row:{self.spec}}".strip() for title, row in rows.items()]
        return "; ".join(texts) or "-"


def judge(claim: Claim) -> bool | None:
    """Returns whether a claim holds; None if the limits of a row, or a missing run, leave it open.

    A row keeps a bound if all between its limits does, and misses it if nothing does.

    >>> rows = {"a": Estimate(1.2, 0.9, 1.5), "b": Estimate(0.5, 0.4, 0.6)}
    >>> [judge(Claim("", "", rows, at_least=bound)) for bound in (0.3, 0.5, 0.7)]
    [True, None, False]
    """
    low, high = claim.at_least, claim.at_most
    if math.isinf(low) and math.isinf(high):
        return None
    rows = claim.rows.values()
    if any(row.low > high or row.high < low for row in rows):
        return False
    return True if rows and all(low <= row.low and row.high <= high for row in rows) else None


class Table(NamedTuple):
    """A table: a title, columns with units, rows of as many texts, and a note below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


class Figure(NamedTuple):
    """A figure: the name of its files, a caption, and what draws into an empty figure."""

    name: str
    caption: str
    draw: Callable[[MatplotlibFigure], None]


class Findings(NamedTuple):
    """What a section finds in its runs."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether the claims hold: all that can be judged, some of them, or none.

        Where fewer than half can be judged, nothing is said of all.

        >>> rows = {"a": Estimate(1.0, 1.0, 1.0)}
        >>> holds, fails = (Claim("", "", rows, at_least=bound) for bound in (0.0, 2.0))
        >>> [Findings([holds, *rest]).verdict for rest in ([], [fails], [Claim("", "", {})] * 2)]
        ['agrees', 'agrees in part', 'agrees in part']
        >>> Findings([fails]).verdict, Findings([fails, *[Claim("", "", {})] * 2]).verdict
        ('disagrees', 'not judged')
        """
        verdicts = list(map(judge, self.claims))
        judged = [holds for holds in verdicts if holds is not None]
        are_most = 2 * len(judged) >= len(verdicts)
        if True in judged:
            return "agrees" if are_most and False not in judged else "agrees in part"
        return "disagrees" if judged and are_most else "not judged"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report: a table or figure of a paper, or a question.

    Attributes:
      name: by which `--section` chooses it.
      title: its heading.
      source: paper and table, `SGP-19, Table 1 and Figure 1`; with authors, year and arXiv number
        if it is the paper's only section.
      text: what the paper did, and what is done here; names in braces are keys of `find_numbers`.
      list_runs: what must be run at a scale; nothing if data that it needs are not there.
      find: reads the runs; those that failed or are missing leave gaps, never errors.
      find_numbers: the numbers of the text at a scale.
      needs: the fields of `Scale` without which there is nothing to find.
    """

    name: str
    title: str
    source: str
    text: str
    list_runs: Callable[[Scale], Sequence[Run]]
    find: Callable[[Scale, Results], Findings]
    find_numbers: Callable[[Scale], Mapping[str, object]] = lambda _: {}
    needs: tuple[Literal["speech", "translation"], ...] = ()

    @property
    def place(self) -> str:
        """The source without authors and title of the paper."""
        return self.source.partition(": ")[0]

    def write_text(self, scale: Scale) -> str:
        """Returns the text with the numbers of a scale."""
        return " ".join(self.text.format_map(self.find_numbers(scale)).split())
