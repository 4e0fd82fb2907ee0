"""Mean and spread over the seeds of a cell of the table."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.compare.grid import Cell, Grid
from experiments.program import FatalError
from experiments.results import find_metrics, metric_fields
from experiments.runner import Result

FALLING = ("loss", "perplexity", "error")  # metrics of which less is better
FRACTIONS = ("accuracy",)  # shown in per cent


class Entry(NamedTuple):
    """A cell of the table, over its seeds.

    Attributes:
      values: of the runs that finished, as tables show them.
      diverged, failed: numbers of runs.
      runs: how many the grid has, one for each seed; after Ctrl-C some have not ended.
      is_best: whether its mean is the best of the column, of cells all of whose runs finished.
      figure: that of the paper; "" if there is none.
    """

    values: tuple[float, ...]
    diverged: int
    failed: int
    runs: int
    is_best: bool = False
    figure: str = ""

    @property
    def mean(self) -> float:
        """The mean; nan without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """The standard deviation of a sample; None of one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def is_whole(self) -> bool:
        """Whether all runs finished."""
        return len(self.values) == self.runs


def find_metric(grid: Grid, outcomes: Mapping[Cell, Result]) -> str:
    """Returns the metric of the table: that of the grid, or the first of the runs.

    Raises:
      FatalError: if the runs do not have that of the grid.
    """
    runs = [outcome.runs[0] for outcome in outcomes.values() if outcome.runs]
    metrics = find_metrics(runs)
    if grid.metric is None:
        return metrics[0] if metrics else "accuracy"
    if metrics and grid.metric not in metrics:
        raise FatalError(f"--metric must be one of {', '.join(metrics)}, got {grid.metric!r}.")
    return grid.metric


def is_falling(metric: str) -> bool:
    """Whether less is better.

    >>> is_falling("valid_loss"), is_falling("accuracy")
    (True, False)
    """
    return any(name in metric for name in FALLING)


def is_fraction(metric: str) -> bool:
    """Whether the metric is shown in per cent."""
    return any(name in metric for name in FRACTIONS)


def summarize(
    grid: Grid, outcomes: Mapping[Cell, Result], metric: str
) -> dict[tuple[str, str], Entry]:
    """Returns `(row's title, column's title) -> entry`, for those with an outcome.

    The best of each column is marked, if it has two entries or more.
    """
    scale = 100.0 if is_fraction(metric) else 1.0
    field, _ = metric_fields(metric)
    by_key: dict[tuple[str, str], list[Result]] = {}
    for cell, outcome in outcomes.items():
        by_key.setdefault((cell.row, cell.column), []).append(outcome)
    entries = {}
    for key, group in by_key.items():
        values = tuple(scale * outcome.runs[0][field] for outcome in group if outcome.runs)
        diverged = sum(outcome.status == "diverged" for outcome in group)
        failed = sum(outcome.status == "failed" for outcome in group)
        entries[key] = Entry(
            values, diverged, failed, len(grid.seeds), figure=grid.figures.get(key, "")
        )
    for column in grid.columns:
        mark_best(entries, [(row.title, column.title) for row in grid.rows], is_falling(metric))
    return entries


def mark_best(
    entries: dict[tuple[str, str], Entry], keys: Sequence[tuple[str, str]], falls: bool
) -> None:
    """Marks the best of some entries, all of those that are equal; none where only one is whole."""
    whole = [key for key in keys if key in entries and entries[key].is_whole]
    if len(whole) < 2:
        return
    best = (min if falls else max)(entries[key].mean for key in whole)
    for key in whole:
        if entries[key].mean == best:
            entries[key] = entries[key]._replace(is_best=True)
