"""Grids: methods by settings by seeds; published tables, and small ones, have names."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from experiments.options import option_name
from experiments.presets.preset import Paper, Program
from experiments.presets.relaysgd import METHODS, RELAYSGD, RESULTS
from experiments.presets.slowmo import (
    BASELINES,
    EVERY,
    SLOW_MOMENTUM,
    SLOWMO,
    UNITS,
    WITH_SLOWMO,
)

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
    note: str = ""  # a sentence for the table's caption

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
MINI = (
    *("--dataset", "fashion_mnist", "--model", "mlp", "--nodes", "16"),
    *("--batch-size-per-node", "32", "--epochs", "6", "--log-every", "50"),
)
NESTEROV = ("--optimizer", "nesterov")
SGD = ("--optimizer", "sgd")


def title_of(row: str, optimizer: str) -> str:
    """The title of a row of RelaySGD's table."""
    _, title = METHODS[row]
    return f"{title}, momentum" if optimizer == "nesterov" and row != "qg" else title


def column_of(alpha: float) -> str:
    """The title of its column."""
    return f"Dirichlet {alpha:g}"


# What is not in the paper's table, and the row that is, whose rates it has. Those of D-PSGD with
# local momentum are the authors', too, who left it out.
LOCAL_MOMENTUM_RATES = {1: (0.1,), 0.1: (0.05,), 0.01: (0.0125,)}
# Without the authors' warm-up, and with another model, these diverge in miniature at their rates.
SMALLER_RATES = {"dpsgd": 0.5, "relay-chain": 0.25, "relay-tree": 0.25}
OTHERS = {
    Line("gradient tracking on the ring", ("--algorithm", "gradient-tracking")): "dpsgd",
    Line("SGP on the Base-2 graph", ("--algorithm", "sgp@base_graph")): "sgp",
    Line("D-PSGD on the ring", ("--algorithm", METHODS["dpsgd"][0])): "dpsgd",
}
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


def make_relaysgd_mini() -> Grid:
    """The same on Fashion-MNIST, mostly at the authors' rates, with five rows more."""
    rows = []
    cells = {}
    for (row, optimizer), columns in RESULTS.items():
        title = title_of(row, optimizer)
        algorithm, _ = METHODS[row]
        kind = NESTEROV if optimizer == "nesterov" else SGD
        momentum = ("--momentum", "quasi-global") if row == "qg" else ()
        rows.append(Line(title, ("--algorithm", algorithm, *kind, *momentum)))
        for alpha, (rate, _) in columns.items():
            rate *= SMALLER_RATES.get(row, 1.0)
            cells[title, column_of(alpha)] = ("--learning-rate", f"{rate}")
    for line, like in OTHERS.items():
        for optimizer, kind in (("sgd", SGD), ("nesterov", NESTEROV)):
            title = f"{line.title}, momentum" if optimizer == "nesterov" else line.title
            if title in [row.title for row in rows]:
                continue
            rows.append(Line(title, (*line.arguments, *kind)))
            rates = RESULTS.get((like, optimizer), LOCAL_MOMENTUM_RATES)
            for alpha in ALPHAS:
                cells[title, column_of(alpha)] = ("--learning-rate", f"{rates[alpha][0]}")
    return Grid(
        title="RelaySGD, Table 2 in miniature: Fashion-MNIST, a perceptron, 16 nodes",
        program="image",
        arguments=MINI,
        rows=tuple(rows),
        columns=tuple(
            Line(column_of(alpha), ("--dirichlet-alpha", f"{float(alpha)!r}")) for alpha in ALPHAS
        ),
        cells=cells,
        metric="accuracy",
        paper=RELAYSGD,
        place="Table 2 (CIFAR-10, VGG-11)",
        note="Rates are the authors', but half of it for D-PSGD, a quarter of it for RelaySGD.",
        figures=FIGURES,
    )


def list_arguments(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options of a preset as on the command line.

    >>> list(list_arguments({"outer_every": 12, "outer_reset": True}))
    ['--outer-every', '12', '--outer-reset']
    """
    for name, value in options.items():
        yield option_name(name)
        if value is not True:
            yield f"{value}"


def make_slowmo_mini() -> Grid:
    """SlowMo around SGP, 1-OSGP and Local SGD, on Fashion-MNIST."""
    column = Line("top-1", ())
    rows = []
    figures = {}
    for row, (algorithm, options, title, published) in BASELINES.items():
        rows.append(Line(title, ("--algorithm", algorithm, *list_arguments(options))))
        figures[title, column.title] = published["top-1"].rstrip("%")
        if row in WITH_SLOWMO:
            slow = list_arguments({"outer_every": EVERY[row]} | SLOW_MOMENTUM)
            rows.append(Line(f"{title}, with SlowMo", ("--algorithm", algorithm, *slow)))
            figures[rows[-1].title, column.title] = WITH_SLOWMO[row]["top-1"].rstrip("%")
    return Grid(
        title="SlowMo, Table 1 in miniature: Fashion-MNIST, a perceptron, 16 nodes",
        program="image",
        arguments=(*MINI, "--learning-rate", "0.05"),
        rows=tuple(rows),
        columns=(column,),
        metric="accuracy",
        paper=SLOWMO,
        place="Table 1 (ImageNet, ResNet-50, 32 nodes)",
        note=UNITS,
        figures=figures,
    )


def make_diloco_mini() -> Grid:
    """DiLoCo and its kin, at as many steps as AllReduce."""
    diloco = (
        *("--algorithm", "local", "--outer-every", "20"),
        *("--outer-momentum", "0.9", "--outer-nesterov", "--outer-rate"),
    )
    streaming = (*diloco, "0.4", "--outer-fragments", "4", "--outer-delay", "2")
    streaming = (*streaming, "--outer-mix", "0.5")
    sparse = ("--algorithm", "local", "--outer-every", "20", "--outer-rate", "0.8")
    sparse = (*sparse, "--outer-wire", "block_top_k", "--outer-error-feedback", "0.95")
    senders = ("--outer-mean-over", "senders")
    muon = ("--optimizer", "muon")
    return Grid(
        title="DiLoCo and its kin: a small Transformer, 8 nodes",
        program="language",
        arguments=(
            *("--nodes", "8", "--batch-size-per-node", "2", "--sequence-length", "64"),
            *("--epochs", "4", "--warmup-steps", "40", "--learning-rate", "0.001"),
        ),
        rows=(
            Line("AllReduce", ("--algorithm", "allreduce")),
            Line("Local Adam", ("--algorithm", "local", "--outer-every", "20")),
            Line("DiLoCo", (*diloco, "0.7")),
            Line("Streaming DiLoCo", streaming),
            Line("Streaming DiLoCo, int4", (*streaming, "--outer-wire", "int4")),
            Line("SparseLoCo", sparse),
            Line("SparseLoCo, mean over senders", (*sparse, *senders)),
            Line("Muon, AllReduce", ("--algorithm", "allreduce", *muon)),
            Line("MuLoCo", (*diloco, "0.7", *muon)),
        ),
        columns=(Line("loss", ()),),
        metric="loss",
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
        rates={row.title: (rate / 2, rate, 2 * rate) for row, rate in rows.items()},
        metric="loss",
    )


GRIDS = {
    "relaysgd-table2": RELAYSGD_TABLE_2,
    "relaysgd-table2-mini": make_relaysgd_mini(),
    "slowmo-table1-mini": make_slowmo_mini(),
    "diloco-mini": make_diloco_mini(),
    "methods-mini": make_methods_mini(),
}
