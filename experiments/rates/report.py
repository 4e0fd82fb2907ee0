"""Tables of the rates."""

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.averaging.report import make_table
from experiments.rates.fits import (
    Estimate,
    fit_both_slopes,
    fit_slope,
    is_in_regime,
    select_points,
    select_regime,
)
from experiments.results import Record

MIN_DISTANCE = 1e-9  # squared; a smaller one is only float32 rounding
CAPTION = "*: K < n^3, not in the regime of the theorems, and in no slope"


def list_labels(runs: Sequence[Record]) -> list[str]:
    """Returns the methods, in order of appearance."""
    return list(dict.fromkeys(run["label"] for run in runs))


def find_slopes(runs: Sequence[Record]) -> list[Record]:
    """Fits the slopes of each method in the regime."""
    records = []
    for label in list_labels(runs):
        points = select_regime(select_points(runs, label, "squared_gradient"))
        in_steps, in_nodes = fit_both_slopes(points)
        estimates = {
            "nodes_times_steps": fit_slope(points),
            "steps": in_steps,
            "nodes": in_nodes,
        }
        found = {name: _make_list(estimate) for name, estimate in estimates.items()}
        records.append({"label": label, **found})
    return records


def _make_list(estimate: Estimate) -> list[float] | None:
    return None if math.isnan(estimate.value) else list(estimate)


def make_rate_table(runs: Sequence[Record], field: str, title: str) -> Table:
    """Makes a table of one quantity: a row for each method and n, a column for each K."""
    steps = sorted({run["steps"] for run in runs})
    table = make_table(title, CAPTION, ("method", "n", *(f"K = {number}" for number in steps)))
    found = {(run["label"], run["nodes"], run["steps"]): run for run in runs}
    for label, nodes in dict.fromkeys((run["label"], run["nodes"]) for run in runs):
        cells = [_format_cell(found.get((label, nodes, number)), field) for number in steps]
        table.add_row(label, f"{nodes}", *cells)
    return table


def _format_cell(run: Record | None, field: str) -> str:
    if run is None:
        return "-"
    mean = np.mean(run[field])
    text = f"{mean:.3g}" if mean > MIN_DISTANCE else "0"
    return text if is_in_regime(run["nodes"], run["steps"]) else f"{text}*"


def make_slope_table(slopes: Sequence[Record]) -> Table:
    """Makes a table of what `find_slopes` returns."""
    table = make_table(
        "Slopes of the squared gradient, in logarithms (theorem 1: -1/2)",
        "in brackets: 95 % of the bootstrap over the seeds",
        ("method", "in nK", "in K", "in n"),
        is_wrapped=True,
    )
    for record in slopes:
        values = [record[name] for name in ("nodes_times_steps", "steps", "nodes")]
        cells = ["-" if value is None else f"{Estimate(*value)}" for value in values]
        table.add_row(record["label"], *cells)
    return table


def print_report(console: Console, runs: Sequence[Record], slopes: Sequence[Record]) -> None:
    """Prints the tables."""
    title = "Squared gradient at the mean, mean over the steps"
    console.print(make_rate_table(runs, "squared_gradient", title))
    title = "Squared distance to the mean, mean over nodes and steps"
    console.print(make_rate_table(runs, "squared_distance", title))
    console.print(make_slope_table(slopes))
