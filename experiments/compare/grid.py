"""Grids: methods by settings by seeds, and the command line of every cell."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.presets.preset import Paper, Program


class Line(NamedTuple):
    """A row or a column of a grid.

    Attributes:
      title: as tables name it.
      arguments: the options of the program that make it.
    """

    title: str
    arguments: tuple[str, ...]


class Cell(NamedTuple):
    """A run.

    Attributes:
      row, column: their titles.
      seed: of the run.
      arguments: those of `python -m experiments.PROGRAM`, without `--out`.
    """

    row: str
    column: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name for its folder; other cells of the grid have other ones.

        >>> Cell("sgp@ring, mixed", "Dirichlet 0.1", 2, ()).name
        'sgp-ring-mixed--Dirichlet-0.1--2'
        """
        titles = (self.row, self.column, f"{self.seed}")
        return "--".join(re.sub(r"[^\w.]+", "-", title).strip("-") for title in titles)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows by columns by seeds.

    Attributes:
      title: what is compared, for the head of the table.
      program: `experiments.PROGRAM` runs every cell.
      arguments: those that all cells have.
      rows, columns: as tables have them.
      seeds: of the runs of a cell of the table.
      cells: `(row's title, column's title) -> arguments` that this cell alone has, such as a rate.
      left_out: pairs of titles that the grid does not have.
      metric: that of the table; None is the first that the program has.
      paper: that published the figures.
      place: the table of the paper.
      figures: `(row's title, column's title) -> figure` of the paper, in per cent.
      note: a sentence for the table's caption.
    """

    title: str
    program: Program
    arguments: tuple[str, ...] = ()
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    cells: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    left_out: frozenset[tuple[str, str]] = frozenset()
    metric: str | None = None
    paper: Paper | None = None
    place: str | None = None
    figures: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def list_cells(self) -> Iterator[Cell]:
        """Yields every run, seed after seed, so that a part of a grid is a small grid."""
        for seed, row, column in itertools.product(self.seeds, self.rows, self.columns):
            key = (row.title, column.title)
            if key in self.left_out:
                continue
            own = self.cells.get(key, ())
            arguments = (*self.arguments, *row.arguments, *column.arguments, *own)
            yield Cell(*key, seed, (*arguments, "--seed", f"{seed}"))
