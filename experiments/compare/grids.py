"""Grids: methods by settings by seeds; published tables, and small ones, have names."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.presets.preset import Paper, Program
from experiments.presets.relaysgd import METHODS, RELAYSGD, RESULTS
from experiments.tuning import bracket

RATE = "--learning-rate"


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
    rate: float | None = None  # the learning rate; None where the grid does not choose it

    @property
    def name(self) -> str:
        """A name for its folder; other cells of the grid have other ones.

        >>> Cell("sgp@ring, mixed", "Dirichlet 0.1", 2, ()).name
        'sgp-ring-mixed--Dirichlet-0.1--2'
        """
        rate = () if self.rate is None else (f"{self.rate:g}",)
        titles = (self.row, self.column, *rate, f"{self.seed}")
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
    # Row's title -> learning rates: each of its cells takes the one that is best at the first seed.
    rates: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    metric: str | None = None  # of the table; None is the first that the program has
    paper: Paper | None = None  # that published the figures
    place: str | None = None  # the table of the paper
    # The paper's figures, in per cent.
    figures: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def list_cells(self, chosen: Mapping[tuple[str, str], float] | None = None) -> Iterator[Cell]:
        """Yields every run, seed after seed, so that a part of a grid is a small grid.

        Where rates are to be chosen, only cells in `chosen`, at these; all if it is None.
        """
        for seed, row, column in itertools.product(self.seeds, self.rows, self.columns):
            rates = self.rates.get(row.title)
            if rates is None or chosen is None:
                yield self._make_cell(row, column, seed, rates[0] if rates else None)
            elif (row.title, column.title) in chosen:
                yield self._make_cell(row, column, seed, chosen[row.title, column.title])

    def list_trials(self) -> Iterator[Cell]:
        """Yields the runs by which rates are chosen: each rate, at the first seed."""
        for row, column in itertools.product(self.rows, self.columns):
            for rate in self.rates.get(row.title, ()):
                yield self._make_cell(row, column, self.seeds[0], rate)

    def _make_cell(self, row: Line, column: Line, seed: int, rate: float | None) -> Cell:
        key = (row.title, column.title)
        own = self.cells.get(key, ())
        if rate is not None:
            own = (*own, RATE, f"{rate!r}")
        arguments = (*self.arguments, *row.arguments, *column.arguments, *own)
        return Cell(*key, seed, (*arguments, "--seed", f"{seed}"), rate)


ALPHAS = (1, 0.1, 0.01)


def title_of(row: str, optimizer: str) -> str:
    """The title of a row of RelaySGD's table."""
    _, title = METHODS[row]
    return f"{title}, momentum" if optimizer == "nesterov" and row != "qg" else title


def column_of(alpha: float) -> str:
    """The title of its column."""
    return f"Dirichlet {alpha:g}"


FIGURES = {
    (title_of(row, optimizer), column_of(alpha)): accuracy
    for (row, optimizer), columns in RESULTS.items()
    for alpha, (_, accuracy) in columns.items()
}

RELAYSGD_TABLE_2 = Grid(
    title="RelaySGD, Table 2: CIFAR-10, VGG-11, 16 nodes",
    program="image",
    rows=tuple(Line(title_of(*key), ()) for key in RESULTS),
    columns=tuple(Line(column_of(alpha), ()) for alpha in ALPHAS),
    seeds=(1, 2, 3),
    cells={
        (title_of(row, optimizer), column_of(alpha)): (
            "--preset",
            f"relaysgd-table2-{row}{'-m' if optimizer == 'nesterov' else ''}-{alpha:g}",
        )
        for (row, optimizer), columns in RESULTS.items()
        for alpha in columns
    },
    metric="accuracy",
    paper=RELAYSGD,
    place="Table 2",
    figures=FIGURES,
)


def make_methods_mini() -> Grid:
    """Methods at rates chosen by one rule, with AdamW and with Muon.

    The middle rates were found by doubling and halving one until it was the best of three.
    """
    every = 20
    local = ("--algorithm", "local", "--outer-every", f"{every}")
    nesterov = ("--outer-rate", "0.7", "--outer-momentum", "0.9", "--outer-nesterov")
    sparse = ("--outer-wire", "block_top_k", "--outer-error-feedback", "0.95")
    pairs = ("--outer-average", "neighbours@random_pairs", "--outer-pull", f"{1 / 0.7:.4f}")
    tracking = ("--outer-average", "gradient-tracking@random_peer_exponential")
    sgp = ("--algorithm", "sgp@one_peer_exponential")
    noloco = (*local, "--outer-rate", "0.7", "--outer-momentum", "0.5", *pairs)
    methods = {  # and their middle rates with AdamW and Muon
        "AllReduce": (("--algorithm", "allreduce"), 0.004, 0.032),
        "D-PSGD": (("--algorithm", "dpsgd@ring"), 0.004, 0.064),
        "SGP": (sgp, 0.004, 0.128),
        f"SGP, every {every} steps": ((*sgp, "--local-steps", f"{every}"), 0.002, 0.008),
        "push-sum outer": ((*local, *nesterov, *tracking), 0.002, 0.008),
        "NoLoCo": (noloco, 0.001, 0.008),
        "DiLoCo": ((*local, *nesterov), 0.008, 0.016),
        "SparseLoCo": ((*local, "--outer-rate", "0.8", *sparse), 0.064, 0.032),
    }
    rows = {}
    for title, (arguments, adam, muon) in methods.items():
        rows[Line(f"{title}, AdamW", (*arguments, "--optimizer", "adam"))] = adam
        rows[Line(f"{title}, Muon", (*arguments, "--optimizer", "muon"))] = muon
    return Grid(
        title="Methods at their best rates: a small Transformer, 16 nodes",
        program="language",
        arguments=(
            *("--nodes", "16", "--placement", "vmap", "--model", "pico"),
            *("--vocabulary-size", "512", "--sequence-length", "32", "--batch-size-per-node", "2"),
            *("--epochs", "1", "--warmup-steps", "20", "--lr-schedule", "cosine"),
        ),
        rows=tuple(rows),
        columns=(Line("loss", ()),),
        seeds=(0, 1, 2, 3, 4),
        rates={row.title: bracket(rate) for row, rate in rows.items()},
        metric="loss",
    )


GRIDS = {
    "relaysgd-table2": RELAYSGD_TABLE_2,
    "methods-mini": make_methods_mini(),
}
