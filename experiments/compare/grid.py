"""Grids: methods by settings by seeds, and the command line of every cell."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.presets.preset import Paper, Program


class Line(NamedTuple):
    """A row or a column of a grid."""

    title: str  # as tables name it
    arguments: tuple[str, ...]  # the options of the program that make it


class Cell(NamedTuple):
    """A run."""

    row: str  # its title
    column: str  # its title
    seed: int
    arguments: tuple[str, ...]  # of `python -m experiments.PROGRAM`, without `--out`

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
    """Rows by columns by seeds; a key of a mapping is `(row's title, column's title)`."""

    title: str  # what is compared, for the head of the table
    program: Program  # `experiments.PROGRAM` runs every cell
    arguments: tuple[str, ...] = ()  # of all cells
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    # Arguments of one cell, such as a rate.
    cells: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    metric: str | None = None  # of the table; None is the first that the program has
    paper: Paper | None = None  # that published the figures
    place: str | None = None  # the table of the paper
    # The paper's figures, in per cent.
    figures: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    note: str = ""  # a sentence for the table's caption

    def list_cells(self) -> Iterator[Cell]:
        """Yields every run, seed after seed, so that a part of a grid is a small grid."""
        for seed, row, column in itertools.product(self.seeds, self.rows, self.columns):
            key = (row.title, column.title)
            own = self.cells.get(key, ())
            arguments = (*self.arguments, *row.arguments, *column.arguments, *own)
            yield Cell(*key, seed, (*arguments, "--seed", f"{seed}"))
