"""SGP-19, Tables 1, 3, 4 and 5: accuracy over nodes, messages and epochs.

As in the paper, the batch of a node and the epochs are those of every number of nodes: twice the
nodes make half the steps, with twice the batch and twice the learning rate.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.presets import sgp19 as presets
from experiments.report.section import (
    MISSING,
    TEXTS,
    Claim,
    Estimate,
    Findings,
    Place,
    Results,
    Sample,
    Scale,
    Table,
    compare,
    make_claim,
    read_sample,
    read_section,
    read_table,
)
from experiments.report.sections.images import DIGITS_EPOCHS, PARAMETERS, list_data, list_seeds
from experiments.results import Record, read_lines
from experiments.runner import Run

FIELD = "test_accuracy_average_model"
STALENESS = 0.1
"""Steps that the gradients of the simulated AD-PSGD are old, on average: about those of the real
one, whose age Table 1's section shows."""
PROGRAM = "experiments.fault_injection.slow image"
ALWAYS_STABLE = ("ar", "2p", "ar-1p", "2p-1p")
REAL = "async-adpsgd@bipartite"
SLEEPS = {4: 0.02, 8: 0.04}
"""Nodes -> seconds of a step of asynchronous nodes: they sleep for longer than they compute, so
that they do not compete for the cores of this machine."""
LINES = 20  # of `metrics.jsonl` in a run, about
LONG = 3  # times the epochs, of Table 5
MORE = "sgp19-32-more-epochs"
HALF_RATE = "sgp19-32-half-rate"
LARGE_BATCH = "sgp19-{}-large-batch"
BATCHES = 4  # times the images of a node, at the same steps and rate of a step
MORE_ROWS = ("ar", "sgp", "2p")  # over the most nodes, with as many steps as 8 nodes have
LARGE_ROWS = {"table3": MORE_ROWS, "table4": ("sgp", "1-osgp")}
"""Table -> what is run with more images of a node, over the most nodes of the table. The last is
compared with the first."""
SMALL = 8  # nodes up to which the paper's methods are equal
GOSSIP = ("dpsgd", "sgp")
NAMES = {
    "ar": "AllReduce",
    "dpsgd": "D-PSGD",
    "adpsgd": "AD-PSGD",
    "sgp": "SGP",
    "2p": "2P-SGP",
    "ar-1p": "AR/1P-SGP",
    "2p-1p": "2P/1P-SGP",
    "biased-1-osgp": "biased 1-OSGP",
    "1-osgp": "1-OSGP",
}
ADPSGD = {4: ("76.07", ""), 8: ("75.96", ""), 16: ("75.51", ""), 32: ("74.98", "")}
"""Of SGP-18, Table 1."""
PAPER: dict[str, dict[str, dict[int, tuple[str, ...]]]] = {
    "table1": presets.TABLE_1 | {"adpsgd": ADPSGD},
    "table3": {"sgp" if row == "1p" else row: x for row, x in presets.TABLE_3.items()},
    "table4": {row: {16: (x[1], x[2], x[0])} for row, x in presets.TABLE_4.items()},
    "table5": {row: {32: (x[1], x[2], x[0])} for row, x in presets.TABLE_5.items()},
}
"""Table -> row -> nodes -> accuracy in per cent, hours, accuracy on the training set."""


class Sizes(NamedTuple):
    """How large the runs are."""

    nodes: tuple[int, ...] = (4, 8, 16, 32)  # of Tables 1 and 3
    hybrid: tuple[int, ...] = (16, 32)
    overlap: int = 16  # nodes of Table 4
    budget: int = 32  # nodes of Table 5
    real: int = 8  # the most nodes of an AD-PSGD that is real: asynchronous processes
    batch: int = 16  # examples per node and step
    rate: float = 0.05  # learning rate per 256 examples, of all methods
    can_diverge: bool = True  # whether some methods are near the largest stable rate
    epochs: int = 2  # of all runs but the long ones
    seeds: int = 3  # of most runs
    overlap_seeds: int = 9  # over the nodes of Table 4, whose differences are small
    examples: int = 60_000  # in the training set
    test_examples: int = 10_000
    equal: float = 0.5  # points of accuracy within which methods count as equal
    spread: float = 0.3  # standard deviation of a seed, in points, where there is one
    data: str = "Fashion-MNIST"  # the title of the data set

    def count_steps(self, nodes: int, epochs: int) -> int:
        """Returns the steps of a run."""
        return round(epochs * self.examples / (nodes * self.batch))


class Cell(NamedTuple):
    """A method over some nodes: a key of `METHODS`, how many, and whether it runs 3x as long."""

    row: str
    nodes: int
    is_long: bool = False


FULL = Sizes()
DIGITS = FULL._replace(
    epochs=DIGITS_EPOCHS * FULL.epochs,
    examples=4_000,
    test_examples=1_000,
    data="4,000 of the digits of MNIST",
)
QUICK = DIGITS._replace(
    nodes=(4, 8),
    hybrid=(8,),
    overlap=8,
    budget=8,
    real=4,
    batch=8,
    rate=0.2,
    can_diverge=False,
    epochs=4,
    seeds=1,
    overlap_seeds=1,
    spread=0.8,
)


def find_sizes(scale: Scale) -> Sizes:
    """Returns the sizes of a scale; without Fashion-MNIST they are more epochs of the digits."""
    if scale.is_quick:
        return QUICK
    return DIGITS if scale.fashion_mnist is None else FULL


def find_numbers(scale: Scale) -> dict[str, object]:
    """Returns the numbers of the sections' texts."""
    sizes = find_sizes(scale)
    steps = [sizes.count_steps(n, sizes.epochs) for n in (min(sizes.nodes), max(sizes.nodes))]
    return sizes._asdict() | {
        "nodes": ", ".join(map(str, sizes.nodes)),
        "hybrid": ", ".join(map(str, sizes.hybrid)),
        "parameters": PARAMETERS,
        "most_steps": steps[0],
        "fewest_steps": steps[1],
    }


def list_cells(scale: Scale) -> dict[str, list[Cell]]:
    """Returns the methods of each table, by the table's name."""
    sizes = find_sizes(scale)
    table3 = ("ar", "2p", "sgp", "ar-1p", "2p-1p")
    long = [Cell(row, sizes.budget, True) for row in ("adpsgd", "sgp", "1-osgp")]
    return {
        "table1": [Cell(row, n) for row in ("ar", "dpsgd", "adpsgd", "sgp") for n in sizes.nodes],
        "table3": [Cell(row, n) for row in table3 for n in sizes.hybrid],
        "table4": [Cell(row, sizes.overlap) for row in presets.TABLE_4],
        "table5": [Cell("ar", sizes.budget), *long],
    }


def name_call(cell: Cell, sizes: Sizes) -> str:
    """Returns the name of the call that a method is in.

    What may diverge is apart from what cannot: one that does ends the others of its call. The real
    AD-PSGD is a call of the launcher.
    """
    if cell.is_long:
        return f"sgp19-{cell.nodes}{f'-{cell.row}' if sizes.can_diverge else ''}-long"
    if cell.row == "adpsgd" and cell.nodes <= sizes.real:
        return f"sgp19-{cell.nodes}-adpsgd"
    if cell.row in ("adpsgd", "biased-1-osgp") and sizes.can_diverge:
        return f"sgp19-{cell.nodes}-{cell.row}"
    is_stable = cell.row in ALWAYS_STABLE or cell.nodes < max(FULL.nodes)
    return f"sgp19-{cell.nodes}" if is_stable else f"sgp19-{cell.nodes}-one-peer"


def is_real(cell: Cell, scale: Scale) -> bool:
    """Whether AD-PSGD is the real one of Table 1: asynchronous processes."""
    return cell.row == "adpsgd" and cell.nodes <= find_sizes(scale).real and not cell.is_long


def list_runs(scale: Scale, table: str) -> list[Run]:
    """Returns the calls that a table needs; each has all methods of all tables that share it."""
    sizes = find_sizes(scale)
    cells = list_cells(scale)
    calls: dict[str, list[Cell]] = {}
    for cell in [cell for cells_of_table in cells.values() for cell in cells_of_table]:
        calls.setdefault(name_call(cell, sizes), []).append(cell)
    names = dict.fromkeys(name_call(cell, sizes) for cell in cells[table])
    runs = [make_run(name, calls[name], scale) for name in names]
    return runs if scale.is_quick else [*runs, *list_cause_runs(scale, table)]


def list_cause_runs(scale: Scale, table: str) -> list[Run]:
    """Returns calls that show whether steps, a lower rate or more images of a node are the cause.

    All are over the most nodes of the table: with the steps of 8 nodes; at half the rate; and with
    more images of a node, in as many steps of the same rate.
    """
    sizes = find_sizes(scale)
    most = max(cell.nodes for cell in list_cells(scale)[table])
    rate = sizes.rate / BATCHES  # for 256 images
    batch = sizes.batch * BATCHES
    more = MORE, MORE_ROWS, list_size(scale, most, sizes.epochs * most // SMALL)
    slow = HALF_RATE, MORE_ROWS, list_size(scale, most, sizes.epochs, sizes.rate / 2)
    size = list_size(scale, most, sizes.epochs * BATCHES, rate, batch)
    large = LARGE_BATCH.format(most), LARGE_ROWS.get(table, ()), size
    calls = {"table1": [more], "table3": [more, slow, large], "table4": [large]}
    runs = []
    for name, rows, size in calls.get(table, ()):
        algorithms = [presets.METHODS[row][0] for row in rows]
        rest = ("--placement", "vmap", *list_seeds(sizes.seeds))
        runs.append(Run(name, "image", ("--algorithm", *algorithms, *size, *rest)))
    return runs


def read_cause(
    name: str, nodes: int, rows: Sequence[str], scale: Scale, results: Results
) -> dict[str, Sample]:
    """Returns the accuracies of such a call, by row."""
    places = {row: find_place(Cell(row, nodes), scale)._replace(run=name) for row in rows}
    return {row: read_sample(results, place, FIELD, 100.0) for row, place in places.items()}


def make_run(name: str, cells: Sequence[Cell], scale: Scale) -> Run:
    """Returns the call of some methods that have the same nodes and epochs."""
    sizes = find_sizes(scale)
    cell = cells[0]
    size = list_size(scale, cell.nodes, sizes.epochs * (LONG if cell.is_long else 1))
    if is_real(cell, scale):
        launch = f"--asynchronous --processes {cell.nodes} -- python -m {PROGRAM}".split()
        sleep = ("--step-seconds", f"{SLEEPS[cell.nodes]}", *list_seeds(sizes.seeds))
        return Run(name, "gossipjax.launch", (*launch, "--algorithm", REAL, *size, *sleep))
    algorithms = dict.fromkeys(presets.METHODS[cell.row][0] for cell in cells)
    rest = ("--staleness", f"{STALENESS}") if "adpsgd" in algorithms else ()
    seeds = sizes.overlap_seeds if cell.nodes == sizes.overlap else sizes.seeds
    rest += ("--placement", "vmap", *list_seeds(seeds))
    return Run(name, "image", ("--algorithm", *algorithms, *size, *rest))


def list_size(
    scale: Scale,
    nodes: int,
    epochs: int,
    rate: float | None = None,
    batch: int | None = None,
) -> tuple[str, ...]:
    """Returns the options that say what is trained, how, and how long; `rate` per 256 images."""
    sizes = find_sizes(scale)
    batch = batch or sizes.batch
    every = max(1, round(epochs * sizes.examples / (nodes * batch) / LINES))
    options = f"""--nodes {nodes} --epochs {epochs} --batch-size-per-node {batch}
    --learning-rate {rate or sizes.rate} --lr-schedule step --log-every {every}"""
    return (*list_data(scale), *options.split())


def find_place(cell: Cell, scale: Scale) -> Place:
    """Returns where the figures of a method are."""
    name = name_call(cell, find_sizes(scale))
    if is_real(cell, scale):
        return Place(name, REAL)
    algorithm, _, topology = presets.METHODS[cell.row][0].partition("@")
    if algorithm == "sgp" and not topology:
        topology = "one_peer_exponential"
    return Place(name, algorithm, topology or None)


class Accuracies(NamedTuple):
    """The accuracies of a table, here and in the paper, in per cent."""

    ours: Mapping[Cell, Sample]
    paper: Mapping[str, Mapping[int, tuple[str, ...]]]
    scale: Scale

    @property
    def nodes(self) -> list[int]:
        """The numbers of nodes, in order."""
        return sorted({cell.nodes for cell in self.ours})

    def find_published(self, cell: Cell) -> tuple[int, tuple[str, ...]]:
        """Returns the paper's nodes and figures; Tables 4 and 5 have one number of nodes."""
        figures = self.paper[cell.row]
        nodes = next(iter(figures)) if len(figures) == 1 else cell.nodes
        return nodes, figures.get(nodes, ())

    def find_cell(self, row: str, nodes: int) -> Cell:
        """Returns the method of a row, as this table has it; of `ROW@first` over the fewest."""
        row, _, first = row.partition("@")
        nodes = self.nodes[0] if first else nodes
        return next(cell for cell in self.ours if cell[:2] == (row, nodes))

    def compare(self, entry: Record, numbers: Mapping[str, object]) -> Claim:
        """Returns a claim on `pairs` of rows, of which the second is subtracted from the first."""
        nodes = self.nodes
        few = [n for n in nodes if n <= SMALL]
        parts = {"few": few, "more": nodes[1:], "most": nodes[-1:], "all": nodes}
        rows = {}
        published = []
        is_modelled = False
        for pair in entry["pairs"]:
            for n in parts[entry.get("over", "all")]:
                cells = first, second = [self.find_cell(row, n) for row in pair]
                title = f"{NAMES[first.row]} less {NAMES[second.row]}, {n} nodes"
                if first.nodes != second.nodes:
                    title = f"{first.nodes} less {second.nodes} nodes"
                rows[title] = self.ours[first] - self.ours[second]
                figures = [self.find_published(cell)[1] for cell in cells]
                if all(figures):
                    difference = float(figures[0][0]) - float(figures[1][0])
                    published.append(f"{title} {difference:+.1f}")
                is_modelled |= any(
                    cell.row == "adpsgd" and not is_real(cell, self.scale) for cell in cells
                )
        paper = "; ".join(published) or "-"
        rest = {"rows": "pairs", "paper": paper, "is_modelled": is_modelled}
        return make_claim(entry | rest, {"pairs": rows}, numbers)


def read(scale: Scale, results: Results, table: str) -> tuple[Accuracies, Table]:
    """Reads the accuracies of a table; returns them, and the table with the training losses."""
    spread = find_sizes(scale).spread
    ours = {
        cell: read_sample(results, find_place(cell, scale), FIELD, 100.0, spread)
        for cell in list_cells(scale)[table]
    }
    accuracies = Accuracies(ours, PAPER[table], scale)
    rows = []
    for cell, accuracy in ours.items():
        loss = accuracy._replace(values=tuple(read_losses(results, find_place(cell, scale))))
        nodes, figures = accuracies.find_published(cell)
        published, hours, *train = figures or ("-", "")
        title = f"{NAMES[cell.row]}{', 3x the epochs' * cell.is_long}"
        paper = (f"{nodes}", published, *(train or ["-"]), hours or "-")
        rows.append((title, f"{cell.nodes}", f"{loss:.3f}", f"{accuracy:.2f}", *paper))
    return accuracies, read_table("sgp19-table1", rows)


def read_losses(results: Results, place: Place) -> Iterator[float]:
    """Yields the training loss of each seed of a method over the last tenth of its steps."""
    folder = results[place.run].folder if place.run in results else None
    if folder is None or not (folder / "metrics.jsonl").is_file():
        return
    lines = read_lines(folder / "metrics.jsonl")
    for run in place.find_runs(results):
        points = [
            (line["step"], float(np.mean(line["loss"])))
            for line in lines
            if line["run"] == run["run"] and "loss" in line
        ]
        if points:
            yield average_end(points)


def average_end(points: Sequence[tuple[int, float]]) -> float:
    """Returns the mean over the last tenth; a value is the mean of the steps since the last.

    >>> average_end([(85, 9.0), (95, 2.0), (100, 5.0)])
    3.0
    """
    steps, values = map(np.array, zip(*points, strict=True))
    is_last = steps > 0.9 * steps[-1]
    return float(np.average(values[is_last], weights=np.diff(steps, prepend=0)[is_last]))


def find(scale: Scale, results: Results, table: str) -> Findings:
    """Compares the methods of a table; at the full scale also with more steps, or more images."""
    name = f"sgp19-{table}"
    accuracies, shown = read(scale, results, table)
    figures: dict[str, Any] = {}
    entries = TEXTS[name]["claims"]
    tables = [shown, tabulate_delays(scale, results)] if table == "table1" else [shown]
    if not scale.is_quick:
        most = accuracies.nodes[-1]
        entries = [*entries, *TEXTS[name].get("full", ())]
        rows = LARGE_ROWS.get(table, ())
        large = read_cause(LARGE_BATCH.format(most), most, rows, scale, results)
        figures |= {f"large {row}": sample for row, sample in large.items()}
        if table == "table1":
            ours = accuracies.ours
            figures["ar"] = ours[Cell("ar", accuracies.nodes[0])]
            figures["more ar"] = read_cause(MORE, most, ["ar"], scale, results)["ar"]
            figures["losses"] = {NAMES[row]: compare_losses(ours, row, most) for row in GOSSIP}
        elif table == "table3":
            tables = [shown._replace(note=f"{shown.note} {describe_others(scale, results)}")]
    numbers = find_numbers(scale)
    claims = [
        accuracies.compare(entry, numbers)
        if "pairs" in entry
        else make_claim(entry, figures, numbers)
        for entry in entries
    ]
    return Findings(claims, tables)


def compare_losses(ours: Mapping[Cell, Sample], row: str, most: int) -> Estimate:
    """Returns by how much more a method loses against AllReduce over the most nodes.

    Losses are differences of the same seed; there is none if a method has fewer seeds.
    """
    losses = []
    for nodes in (most, SMALL):
        best, other = (ours[Cell(name, nodes)].values for name in ("ar", row))
        if len(best) != len(other):
            return MISSING
        losses.append([a - b for a, b in zip(best, other, strict=True)])
    over_most, over_few = losses
    return compare(over_most, over_few, ours[Cell(row, most)].single_spread)


def tabulate_delays(scale: Scale, results: Results) -> Table:
    """Returns how old AD-PSGD's gradients are: measured where it is real, else an option."""
    rows = []
    for n in find_sizes(scale).nodes:
        cell = Cell("adpsgd", n)
        if not is_real(cell, scale):
            rows.append((f"{n}", "simulated", f"{STALENESS}"))
            continue
        delay = read_sample(results, find_place(cell, scale), "gradient_delay")
        rows.append((f"{n}", "real", f"{delay:.2f}"))
    return Table("Steps that the gradients of AD-PSGD are old", ("nodes", "", "steps, mean"), rows)


def describe_others(scale: Scale, results: Results) -> str:
    """Returns what does not bring two peers nearer to AllReduce."""
    most = max(find_sizes(scale).nodes)
    texts = []
    for title, run in {"the steps of 8 nodes": MORE, "half the rate": HALF_RATE}.items():
        samples = read_cause(run, most, MORE_ROWS, scale, results)
        texts.append(f"{samples['ar'] - samples['2p']:+.2f} with {title}")
    return f"AllReduce less 2P-SGP over {most} nodes: {', '.join(texts)}."


SECTIONS = {
    table: read_section(
        name=f"sgp19-{table}",
        find_numbers=find_numbers,
        list_runs=partial(list_runs, table=table),
        find=partial(find, table=table),
    )
    for table in PAPER
}
