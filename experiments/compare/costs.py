"""The second table of a comparison: models of nodes, bytes, and rates chosen by one rule."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.compare.grids import Cell, Grid
from experiments.compare.table import find_metric, format_entry, is_falling, is_fraction, summarize
from experiments.markdown import format_table
from experiments.results import Record, metric_fields, read_runs
from experiments.runner import Result
from experiments.tuning import choose_rate

SENT = "sent_bytes_per_step"
MEGA = 1e6


class Column(NamedTuple):
    """A column of the table of costs."""

    title: str
    digits: str
    unit: float = 1.0

    def format(self, values: Sequence[float]) -> str:
        """Returns the mean over the seeds, and the spread if it is not 0; "-" without values.

        >>> Column("best", ".1f").format([2.0, 4.0]), Column("MB", ".3g", 1e6).format([2e6, 2e6])
        ('3.0 ± 1.4', '2')
        """
        if not values:
            return "-"
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        numbers = [statistics.fmean(values), *[spread] * bool(spread)]
        return " ± ".join(f"{number / self.unit:{self.digits}}" for number in numbers)


# Of a run's model, or of a node in a whole run, by its name in `summary.json`.
COLUMNS = {
    "average_best": Column("best", ".3f"),
    "nodes_mean": Column("mean of nodes", ".3f"),
    "nodes_mean_best": Column("best mean", ".3f"),
    "nodes_worst": Column("worst node", ".3f"),
    "nodes_worst_best": Column("best worst", ".3f"),
    "consensus_distance": Column("distance", ".2g"),
    "sharpness": Column("sharpness", ".3g"),
    "spectral_gap": Column("gap per step", ".3g"),
    "gradients_per_node": Column("gradients", ".0f"),
    "sent_bytes": Column("MB sent per node", ".3g", MEGA),
}


class Cost(NamedTuple):
    """What a cell of the table costs, over its seeds."""

    final: str  # as in the table
    rate: float | None  # the chosen one; None if there is no choice, or every run has diverged
    rates: tuple[float, ...] = ()  # to choose from
    measured: Mapping[str, Sequence[float]] = {}  # by the names of COLUMNS, of each seed

    @property
    def is_end(self) -> bool:
        """Whether the chosen rate is the smallest or the largest, so that others may be better."""
        return len(self.rates) > 1 and self.rate in (min(self.rates), max(self.rates))

    def describe(self) -> Record:
        """The fields of `summary.json`."""
        means = {name: statistics.fmean(seeds) for name, seeds in self.measured.items() if seeds}
        rates = {"rate": self.rate, "rates": self.rates, "rate_is_end": self.is_end}
        return dict.fromkeys(self.measured) | means | rates | {"seeds": self.measured}


Costs = dict[tuple[str, str], Cost]
"""(row's title, column's title) -> cost, for the cells with an outcome."""


def choose_rates(grid: Grid, trials: Mapping[Cell, Result]) -> dict[tuple[str, str], float]:
    """Returns the rate of the best final metric, where all trials of a cell have ended.

    A run that has diverged or failed is never the best; a cell with no other is left out.
    """
    if not trials:
        return {}
    metric = find_metric(grid, list(trials.values()))
    field, _ = metric_fields(metric)
    sign = -1 if is_falling(metric) else 1
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in grid.list_trials():
        groups.setdefault((cell.row, cell.column), []).append(cell)
    chosen = {}
    for key, cells in groups.items():
        scores = {
            cell.rate or 0.0: sign * trials[cell].runs[0][field]
            for cell in cells
            if cell in trials and trials[cell].runs
        }
        best = choose_rate(scores)
        if best is not None and all(cell in trials for cell in cells):
            chosen[key] = best
    return chosen


def find_costs(
    grid: Grid, outcomes: Mapping[Cell, Result], trials: Mapping[Cell, Result], metric: str
) -> Costs:
    """Returns the costs of all cells that have a run."""
    entries = summarize(grid, outcomes, metric)
    groups: dict[tuple[str, str], list[tuple[Cell, Result]]] = {}
    for cell, outcome in {**trials, **outcomes}.items():
        group = groups.setdefault((cell.row, cell.column), [])
        if cell in outcomes:
            group.append((cell, outcome))
    costs = {}
    for key, group in groups.items():
        measured = [measure_run(outcome, metric) for _, outcome in group if outcome.runs]
        costs[key] = Cost(
            final=format_entry(entries.get(key), digits=3) if group else "diverged",
            rate=group[0][0].rate if group else None,
            rates=grid.rates.get(key[0], ()),
            measured={name: [run[name] for run in measured if name in run] for name in COLUMNS},
        )
    return costs


def measure_run(outcome: Result, metric: str) -> Mapping[str, float]:
    """Returns what is known of a run, by the names in `COLUMNS`."""
    (run,) = outcome.runs
    lines = read_curve(outcome)
    average, nodes = metric_fields(metric)
    best, worst = (min, max) if is_falling(metric) else (max, min)
    scale = 100.0 if is_fraction(metric) else 1.0
    found = {}
    for name, field, reduce in (
        ("average", average, float),
        ("nodes_mean", nodes, statistics.fmean),
        ("nodes_worst", nodes, worst),
    ):
        curve = [scale * reduce(line[field]) for line in lines if line.get(field) is not None]
        found[name] = None if run.get(field) is None else scale * reduce(run[field])
        found[f"{name}_best"] = best(curve) if curve else None
    found |= {name: run[name] for name in COLUMNS if name in run}
    if SENT in run:
        found["sent_bytes"] = run[SENT] * run["steps"]
    return {name: value for name, value in found.items() if value is not None}


def read_curve(outcome: Result) -> list[Record]:
    """Returns the lines of a run, none if it has no folder."""
    if outcome.folder is None:
        return []
    ((lines,),) = read_runs(outcome.folder)[1].values()
    return lines


def format_costs(costs: Costs, metric: str) -> str:
    """Returns a table of costs as Markdown, with the sentences below it.

    A column of which nothing is known is left out.
    """
    names = [name for name in COLUMNS if any(cost.measured[name] for cost in costs.values())]
    has_rates = any(cost.rates for cost in costs.values())
    columns = {column for _, column in costs}
    rows = []
    for (row, column), cost in costs.items():
        title = f"{row}, {column}" if len(columns) > 1 else row
        numbers = [COLUMNS[name].format(cost.measured[name]) for name in names]
        rows.append([title, cost.final, *[format_rate(cost)] * has_rates, *numbers])
    notes = []
    if "sent_bytes" in names:
        notes.append("Bytes are counted, on a ring for exact averages, not measured.")
    if has_rates:
        notes.append("Rates are the best of their brackets at the first seed.")
        if any(cost.is_end for cost in costs.values()):
            notes.append("Where one is an end of its bracket, widen it.")
    headers = [COLUMNS[name].title for name in names]
    table = format_table(["", metric, *["rate"] * has_rates, *headers], rows)
    return "\n\n".join(filter(None, [table, " ".join(notes)])) + "\n"


def format_rate(cost: Cost) -> str:
    """Returns the chosen rate, and whether it is an end of its bracket.

    >>> rates = (0.1, 0.2, 0.4)
    >>> [format_rate(Cost("", rate, rates)) for rate in (0.1, 0.2, 0.4, None)]
    ['0.1 (smallest)', '0.2', '0.4 (largest)', 'none of 3']
    """
    if not cost.rates:
        return "-"
    if cost.rate is None:
        return f"none of {len(cost.rates)}"
    end = "smallest" if cost.rate == min(cost.rates) else "largest"
    return f"{cost.rate:g} ({end})" if cost.is_end else f"{cost.rate:g}"
