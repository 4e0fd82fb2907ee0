"""What the rows of a comparison cost: their learning rates, chosen by one rule, and their bytes."""

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from experiments.compare.grids import Cell, Grid
from experiments.compare.table import find_metric, format_entry, is_falling, summarize
from experiments.markdown import format_table
from experiments.results import Record, metric_fields
from experiments.runner import Result
from experiments.tuning import choose_rate

SENT = "sent_bytes_per_step"
MEGA = 1e6


class Cost(NamedTuple):
    """What a cell of the table costs, over its seeds."""

    final: str  # as in the table
    rate: float | None  # the chosen one; None if there is no choice, or every run has diverged
    rates: tuple[float, ...] = ()  # to choose from
    sent_bytes: float | None = None  # of a node in a whole run; None if it is not known

    @property
    def is_end(self) -> bool:
        """Whether the chosen rate is the smallest or the largest, so that others may be better."""
        return len(self.rates) > 1 and self.rate in (min(self.rates), max(self.rates))

    def describe(self) -> Record:
        """The fields of `summary.json`."""
        names = ("rate", "rates", "sent_bytes")
        return {name: getattr(self, name) for name in names} | {"rate_is_end": self.is_end}


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
        runs = [outcome.runs[0] for _, outcome in group if outcome.runs]
        sent = [run[SENT] * run["steps"] for run in runs if SENT in run]
        costs[key] = Cost(
            final=format_entry(entries.get(key), digits=3) if group else "diverged",
            rate=group[0][0].rate if group else None,
            rates=grid.rates.get(key[0], ()),
            sent_bytes=statistics.fmean(sent) if sent else None,
        )
    return costs


def format_costs(costs: Costs, metric: str) -> str:
    """Returns a table of costs as Markdown, the sentence below it too; "" if nothing is known."""
    has_rates = any(cost.rates for cost in costs.values())
    has_bytes = any(cost.sent_bytes for cost in costs.values())
    if not has_rates and not has_bytes:
        return ""
    columns = {column for _, column in costs}
    notes = []
    if has_bytes:
        notes.append("Bytes are counted, on a ring for exact averages, not measured.")
    rows = []
    for (row, column), cost in costs.items():
        title = f"{row}, {column}" if len(columns) > 1 else row
        sent = "-" if cost.sent_bytes is None else f"{cost.sent_bytes / MEGA:.3g}"
        rows.append([title, cost.final, format_rate(cost), sent])
    if has_rates:
        notes.append("Rates are the best of their brackets at the first seed.")
        if any(cost.is_end for cost in costs.values()):
            notes.append("Where one is an end of its bracket, widen it.")
    table = format_table(["", metric, "rate", "MB sent per node"], rows)
    return f"{table}\n\n{' '.join(notes)}\n"


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
