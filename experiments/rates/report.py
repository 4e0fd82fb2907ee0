"""Tables of the rates."""

import math
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.rates.fits import (
    Estimate,
    fit_both_slopes,
    fit_slope,
    is_in_regime,
    select_points,
    select_regime,
)
from experiments.results import Record, describe_orders
from experiments.tables import Cell, make_table

MIN_DISTANCE = 1e-9  # squared; a smaller one is only float32 rounding
CAPTION = "*: K < n^3, not in the regime of the theorems, and in no slope"


def find_slopes(runs: Sequence[Record]) -> list[Record]:
    """Fits the slopes of each method in the regime."""
    records = []
    for label in dict.fromkeys(run["label"] for run in runs):
        points = select_regime(select_points(runs, label, "squared_gradient"))
        in_steps, in_nodes = fit_both_slopes(points)
        estimates = {
            "nodes_times_steps": fit_slope(points),
            "steps": in_steps,
            "nodes": in_nodes,
        }
        found = {
            name: None if math.isnan(estimate.value) else list(estimate)
            for name, estimate in estimates.items()
        }
        records.append({"label": label, **found})
    return records


def make_rate_table(runs: Sequence[Record], field: str, title: str) -> Table:
    """Makes a table of one quantity: a row for each method and n, a column for each K."""
    cells: dict[tuple[str, int], Record] = {}
    for run in runs:
        mean = np.mean(run[field])
        text = f"{mean:.3g}" if mean > MIN_DISTANCE else "0"
        text += "*" * (not is_in_regime(run["nodes"], run["steps"]))
        cells.setdefault((run["label"], run["nodes"]), {})[f"K = {run['steps']}"] = text
    steps = (f"K = {number}" for number in sorted({run["steps"] for run in runs}))
    columns = {name: _show(name) for name in ("method", "n", *steps)}
    rows = [{"method": label, "n": nodes} | row for (label, nodes), row in cells.items()]
    orders = describe_orders(run["algorithm"] for run in runs)
    return make_table(title, " ".join(filter(None, [CAPTION, orders])), columns, rows)


def _show(name: str) -> Cell:
    """A cell with a field of a record; - where it has none."""
    return lambda record: f"{record.get(name) or '-'}"


def make_slope_table(slopes: Sequence[Record]) -> Table:
    """Makes a table of what `find_slopes` returns."""
    names = {"method": "label", "in nK": "nodes_times_steps", "in K": "steps", "in n": "nodes"}
    rows = [
        {name: Estimate(*x) if isinstance(x, list) else x for name, x in record.items()}
        for record in slopes
    ]
    return make_table(
        "Slopes of the squared gradient, in logarithms (theorem 1: -1/2)",
        "in brackets: 95 % of the bootstrap over the seeds",
        {title: _show(name) for title, name in names.items()},
        rows,
        texts=4,  # which break where they are too long
    )


def print_report(console: Console, runs: Sequence[Record], slopes: Sequence[Record]) -> None:
    """Prints the tables."""
    title = "Squared gradient at the mean, mean over the steps"
    console.print(make_rate_table(runs, "squared_gradient", title))
    title = "Squared distance to the mean, mean over nodes and steps"
    console.print(make_rate_table(runs, "squared_distance", title))
    console.print(make_slope_table(slopes))
