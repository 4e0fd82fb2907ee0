"""What the rows of a comparison cost: their learning rates, chosen by one rule, and their bytes."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.compare.grids import Cell, Grid
from experiments.compare.table import find_metric, format_entry, is_falling, summarize
from experiments.markdown import format_table
from experiments.results import LOSS, Record, metric_fields, read_runs
from experiments.runner import Result
from experiments.tuning import choose_rate

SENT = "sent_bytes_per_step"
MEGA = 1e6
ROUNDING = 1e-9


class Cost(NamedTuple):
    """What a cell of the table costs, over its seeds."""

    final: str  # as in the table
    rate: float | None  # the chosen one; None if there is no choice, or every run has diverged
    rates: tuple[float, ...] = ()  # to choose from
    sent_bytes: float | None = None  # of a node in a whole run; None if it is not known
    equal_bytes: float | None = None  # the fewest that a row sends
    at_equal_bytes: float | None = None  # the training loss then; None if no line is that early

    @property
    def is_end(self) -> bool:
        """Whether the chosen rate is the smallest or the largest, so that others may be better."""
        return len(self.rates) > 1 and self.rate in (min(self.rates), max(self.rates))

    def describe(self) -> Record:
        """The fields of `summary.json`."""
        names = ("rate", "rates", "sent_bytes", "equal_bytes", "at_equal_bytes")
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
    finished = {
        key: [outcome for _, outcome in group if outcome.runs] for key, group in groups.items()
    }
    sent = {
        key: statistics.fmean(run[SENT] * run["steps"] for run in runs)
        for key, results in finished.items()
        if (runs := [result.runs[0] for result in results if SENT in result.runs[0]])
    }
    fewest = min((size for size in sent.values() if size > 0), default=None)
    costs = {}
    for key, group in groups.items():
        early = None
        if fewest is not None and key in sent:
            losses = [find_loss(result, fewest) for result in finished[key]]
            early = average(losses)
        costs[key] = Cost(
            final=format_entry(entries.get(key), digits=3) if group else "diverged",
            rate=group[0][0].rate if group else None,
            rates=grid.rates.get(key[0], ()),
            sent_bytes=sent.get(key),
            equal_bytes=fewest,
            at_equal_bytes=early,
        )
    return costs


def average(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if there are none, or one is None.

    >>> average([1.0, 2.0]), average([1.0, None]), average([])
    (1.5, None, None)
    """
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def find_loss(result: Result, size: float) -> float | None:
    """Returns the last training loss of a run before it has sent more than `size` bytes."""
    assert result.folder is not None
    ((lines,),) = read_runs(result.folder)[1].values()
    per_step = result.runs[0][SENT]
    early = [
        line[LOSS]
        for line in lines
        if LOSS in line and line["step"] * per_step <= size * (1 + ROUNDING)
    ]
    return early[-1] if early else None


def format_costs(costs: Costs, metric: str) -> str:
    """Returns a table of costs as Markdown, the sentence below it too; "" if nothing is known."""
    has_rates = any(cost.rates for cost in costs.values())
    sizes = [cost.equal_bytes for cost in costs.values() if cost.equal_bytes is not None]
    if not has_rates and not sizes:
        return ""
    columns = {column for _, column in costs}
    headers = ["", metric, "rate", "MB sent per node"]
    notes = []
    if sizes:
        headers.append(f"training loss at {sizes[0] / MEGA:.3g} MB")
        notes.append("Bytes are counted, on a ring for exact averages, not measured.")
    rows = []
    for (row, column), cost in costs.items():
        title = f"{row}, {column}" if len(columns) > 1 else row
        cells = [title, cost.final, format_rate(cost)]
        cells.append(format_number(cost.sent_bytes, ".3g", MEGA))
        rows.append([*cells, *([format_number(cost.at_equal_bytes, ".3f")] if sizes else [])])
    if has_rates:
        notes.append("Rates are the best of their brackets at the first seed.")
        if any(cost.is_end for cost in costs.values()):
            notes.append("Where one is an end of its bracket, widen it.")
    return f"{format_table(headers, rows)}\n\n{' '.join(notes)}\n"


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


def format_number(value: Any, form: str, unit: float = 1.0) -> str:
    """Returns a number of that form; "-" without one."""
    return "-" if value is None else f"{value / unit:{form}}"
