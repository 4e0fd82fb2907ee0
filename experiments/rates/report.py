"""Tables and the plot of the rates."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from experiments.plots import choose_colors
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

MARKERS = "os^Dv*P<"  # numbers of nodes
MIN_DISTANCE = 1e-9  # squared; a smaller one is only float32 rounding
CAPTION = "*: K < n^3, not in the regime of the theorems, and in no slope"


def list_labels(runs: Sequence[Record]) -> list[str]:
    """Returns the methods, in order of appearance."""
    return list(dict.fromkeys(run["label"] for run in runs))


def draw_rates(runs: Sequence[Record], figure: Figure) -> None:
    """Draws two panels: the mean squared gradient over nK, the distance to the mean over K."""
    gradients, distances = figure.subplots(1, 2)
    products = np.array([run["nodes"] * run["steps"] for run in runs])
    steps = np.array([run["steps"] for run in runs])
    _draw_points(gradients, runs, "squared_gradient", products)
    is_drawn = _draw_points(distances, runs, "squared_distance", steps)
    gradients.set(title="Theorem 1", xlabel="nodes times steps, nK")
    gradients.set_ylabel("squared gradient at the mean,\nmean over the steps")
    distances.set(title="Theorem 2", xlabel="steps, K")
    distances.set_ylabel("squared distance to the mean,\nmean over nodes and steps")
    level = np.mean(runs[int(products.argmin())]["squared_gradient"]) * math.sqrt(products.min())
    x = np.unique(products)
    references = gradients.plot(x, level / np.sqrt(x), "k--", linewidth=1, label="slope -1/2")
    if is_drawn:
        level = max(np.mean(run["squared_distance"]) for run in runs) * steps.min()
        x = np.unique(steps)
        references += distances.plot(x, level / x, "k:", linewidth=1, label="slope -1")
    else:
        distances.text(0.5, 0.5, "all models are equal", transform=distances.transAxes, ha="center")
    for axes in (gradients, distances):
        axes.set(xscale="log", yscale="log" if is_drawn or axes is gradients else "linear")
        axes.grid(alpha=0.3)
    lines = [
        Line2D([], [], color=color, label=label)
        for label, color in choose_colors(list_labels(runs)).items()
    ]
    lines += [
        Line2D([], [], color="black", linestyle="", marker=marker, label=f"{size} nodes")
        for size, marker in _mark(runs).items()
    ]
    figure.legend(
        handles=[*lines, *references],
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        title="hollow: K < n^3, not in the regime of the theorems",
        title_fontsize="small",
    )


def _mark(runs: Sequence[Record]) -> dict[int, str]:
    """Number of nodes -> its marker."""
    sizes = sorted({run["nodes"] for run in runs})
    return dict(zip(sizes, itertools.cycle(MARKERS), strict=False))


def _draw_points(axes: Axes, runs: Sequence[Record], field: str, x: np.ndarray) -> bool:
    """A curve for each method and number of nodes; returns whether there is a point.

    What is 0 but for rounding is left out.
    """
    y = np.array([np.mean(run[field]) for run in runs])
    order = [int(k) for k in np.argsort(x, kind="stable") if y[k] > MIN_DISTANCE]
    for label, color in choose_colors(list_labels(runs)).items():
        for size, marker in _mark(runs).items():
            curve = [k for k in order if (runs[k]["label"], runs[k]["nodes"]) == (label, size)]
            axes.plot(x[curve], y[curve], color=color, linewidth=0.8)
            for k in curve:
                style = "full" if is_in_regime(size, runs[k]["steps"]) else "none"
                axes.plot(x[k], y[k], marker, color=color, fillstyle=style, markersize=5)
    return bool(order)


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


def write_report(
    folder: Path, console: Console, runs: Sequence[Record], slopes: Sequence[Record]
) -> None:
    """Prints the tables, and writes `rates.png` into the folder."""
    figure = Figure((11, 5.2), dpi=120, layout="constrained")
    draw_rates(runs, figure)
    figure.savefig(folder / "rates.png")
    title = "Squared gradient at the mean, mean over the steps"
    console.print(make_rate_table(runs, "squared_gradient", title))
    title = "Squared distance to the mean, mean over nodes and steps"
    console.print(make_rate_table(runs, "squared_distance", title))
    console.print(make_slope_table(slopes))
