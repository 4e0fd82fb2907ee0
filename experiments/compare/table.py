"""The table of a grid: mean and spread over the seeds; in the terminal, and as Markdown."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.compare.grids import Cell, Grid
from experiments.markdown import format_table
from experiments.program import FatalError
from experiments.results import find_metrics, metric_fields
from experiments.runner import Result

FALLING = ("loss", "perplexity", "error")  # metrics of which less is better
FRACTIONS = ("accuracy",)  # shown in per cent
MAX_TITLE = 32  # characters of a row's title on a line of the terminal
ANY_WIDTH = 1000


class Entry(NamedTuple):
    """A cell of the table, over its seeds."""

    values: tuple[float, ...]  # of the runs that finished, as tables show them
    diverged: int  # number of runs
    failed: int  # number of runs
    runs: int  # of the grid, one for each seed; after Ctrl-C some have not ended
    is_best: bool = False  # of the column, among the cells whose runs all finished
    figure: str = ""  # the paper's; "" if there is none

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


Entries = dict[tuple[str, str], Entry]
"""(row's title, column's title) -> entry, for the cells with an outcome."""


def find_metric(grid: Grid, outcomes: Sequence[Result]) -> str:
    """Returns the metric of the table: the grid's, or the first of the runs."""
    runs = [outcome.runs[0] for outcome in outcomes if outcome.runs]
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


def summarize(grid: Grid, outcomes: Mapping[Cell, Result], metric: str) -> Entries:
    """Returns the entries; the best of each column is marked, if it has two or more."""
    scale = 100.0 if is_fraction(metric) else 1.0
    field, _ = metric_fields(metric)
    by_key: dict[tuple[str, str], list[Result]] = {}
    for cell, outcome in outcomes.items():
        by_key.setdefault((cell.row, cell.column), []).append(outcome)
    entries = {}
    for key, group in by_key.items():
        values = tuple(scale * outcome.runs[0][field] for outcome in group if outcome.runs)
        statuses = Counter(outcome.status for outcome in group)
        counts = (statuses["diverged"], statuses["failed"], len(grid.seeds))
        entries[key] = Entry(values, *counts, figure=grid.figures.get(key, ""))
    for column in grid.columns:
        mark_best(entries, [(row.title, column.title) for row in grid.rows], is_falling(metric))
    return entries


def mark_best(entries: Entries, keys: Sequence[tuple[str, str]], falls: bool) -> None:
    """Marks the best of some entries, all of those that are equal; none where only one is whole."""
    whole = [key for key in keys if key in entries and entries[key].is_whole]
    if len(whole) < 2:
        return
    best = (min if falls else max)(entries[key].mean for key in whole)
    for key in whole:
        if entries[key].mean == best:
            entries[key] = entries[key]._replace(is_best=True)


def format_entry(entry: Entry | None, digits: int = 2) -> str:
    """Returns mean and spread, and what did not finish.

    >>> format_entry(Entry((84.0, 86.0), 0, 0, 2)), format_entry(Entry((84.0,), 1, 0, 3))
    ('85.00 ± 1.41', '84.00 (1 of 3, 1 diverged)')
    >>> format_entry(Entry((), 3, 0, 3)), format_entry(Entry((), 1, 1, 3)), format_entry(None)
    ('diverged', '0 of 3, 1 diverged, 1 failed', '-')
    """
    if entry is None:
        return "-"
    if entry.runs in (entry.diverged, entry.failed):
        return "diverged" if entry.diverged else "failed"
    notes = [f"{len(entry.values)} of {entry.runs}"]
    notes += [f"{entry.diverged} diverged"] * bool(entry.diverged)
    notes += [f"{entry.failed} failed"] * bool(entry.failed)
    if not entry.values:
        return ", ".join(notes)
    spread = "" if entry.spread is None else f" ± {entry.spread:.{digits}f}"
    return f"{entry.mean:.{digits}f}{spread}" + ("" if entry.is_whole else f" ({', '.join(notes)})")


def list_rows(grid: Grid, entries: Entries) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Returns the headers, and the rows: each cell's text, and whether it is the column's best.

    A column of ours is followed by the paper's, if the paper has figures in it.
    """
    headers = [""]
    rows = [[(row.title, False)] for row in grid.rows]
    for column in grid.columns:
        has_figures = any(key[1] == column.title for key in grid.figures)
        headers += [column.title, "paper"] if has_figures else [column.title]
        for row, cells in zip(grid.rows, rows, strict=True):
            key = (row.title, column.title)
            entry = entries.get(key)
            cells.append((format_entry(entry), entry is not None and entry.is_best))
            if has_figures:
                cells.append((grid.figures.get(key, "-"), False))
    return headers, rows


def format_markdown(grid: Grid, entries: Entries, caption: str) -> str:
    """Returns the table as Markdown; the best of a column is bold."""
    headers, rows = list_rows(grid, entries)
    bold = [[f"**{text}**" if best else text for text, best in cells] for cells in rows]
    return f"**{grid.title}**\n\n{format_table(headers, bold)}\n\n{caption}\n"


def print_table(grid: Grid, entries: Entries, caption: str, console: Console) -> None:
    """Prints the table; the best of a column is bold.

    Numbers stay whole: a table that is too wide for the terminal is wrapped by it.
    """
    headers, rows = list_rows(grid, entries)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=grid.title, caption=caption)
    table.add_column("", max_width=MAX_TITLE)
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*(Text(text, "bold green" if best else "") for text, best in cells))
    console.print(table, crop=False, width=ANY_WIDTH)
