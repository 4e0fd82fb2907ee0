"""The curves of a comparison over the seeds: loss and metric over steps, metric over bytes."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from experiments.compare.costs import MEGA, SENT, read_curve
from experiments.compare.grids import Cell, Grid
from experiments.compare.table import is_fraction
from experiments.plots import AXIS_LABELS, choose_looks
from experiments.results import LOSS, Record, metric_fields
from experiments.runner import Result


def plot_curves(grid: Grid, outcomes: Mapping[Cell, Result], metric: str, path: Path) -> None:
    """Draws the runs that finished, as a PNG: a panel per column, a colour per row.

    A line is the mean over the seeds, its band one standard deviation to each side. Bytes are the
    mean of a step, times the steps; a method that sends none has no line over them.
    """
    lines: dict[tuple[str, str], list[list[Record]]] = {}
    sent: dict[tuple[str, str], list[float]] = {}  # MB of a node and step
    for cell, outcome in outcomes.items():
        if outcome.runs and (curve := read_curve(outcome)):
            lines.setdefault((cell.row, cell.column), []).append(curve)
            if outcome.runs[0].get(SENT):
                sent.setdefault((cell.row, cell.column), []).append(outcome.runs[0][SENT] / MEGA)
    field, _ = metric_fields(metric)
    name = field.removesuffix("_average_model").replace("_", " ")
    unit, scale = (" (%)", 100.0) if is_fraction(metric) else ("", 1.0)
    height = (11 if sent else 7.5) + 0.2 * math.ceil(len(grid.rows) / len(grid.columns))
    figure = Figure((2 + 5 * len(grid.columns), height), dpi=120, layout="constrained")
    figure.suptitle(f"{grid.title}: mean ± standard deviation over {len(grid.seeds)} seed(s)")
    panels = figure.subplots(3 if sent else 2, len(grid.columns), squeeze=False)
    looks = choose_looks([row.title for row in grid.rows])
    of_metric = (field, f"{name} of the average model{unit}", scale)
    quantities = [
        (LOSS, "training loss (mean over the nodes)", 1.0, AXIS_LABELS["step"]),
        (*of_metric, AXIS_LABELS["step"]),
        (*of_metric, "MB that a node has sent"),
    ]
    # zip: the last panels are drawn where bytes are known
    for index, (row_of_panels, quantity) in enumerate(zip(panels, quantities, strict=False)):
        by_bytes = index == 2
        for column, axes in zip(grid.columns, row_of_panels, strict=True):
            axes.set(title=column.title, xlabel=quantity[3], ylabel=quantity[1])
            axes.grid(alpha=0.3)
            if by_bytes:
                axes.set_xscale("log", subs=())
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
            for row, look in looks.items():
                key = (row, column.title)
                points = summarize_runs(lines.get(key, []), quantity[0], quantity[2])
                if by_bytes:
                    unit_of_x = statistics.fmean(sent.get(key, [0.0]))
                    points = [(unit_of_x * step, *rest) for step, *rest in points if unit_of_x]
                _draw_band(axes, points, look)
    handles = [
        Line2D([], [], label=title, **look)
        for title, look in looks.items()
        if any(key[0] == title for key in lines)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path)


def summarize_runs(
    runs: Sequence[Sequence[Record]], field: str, scale: float
) -> list[tuple[int, float, float]]:
    """Returns `(step, mean, standard deviation)` of the steps at which all runs have the field.

    >>> summarize_runs([[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
    ...                 [{"step": 1, "loss": 4.0}]], "loss", 1.0)
    [(1, 3.0, 1.4142135623730951)]
    """
    values: dict[int, list[float]] = {}
    for line in itertools.chain.from_iterable(runs):
        if field in line:
            values.setdefault(line["step"], []).append(scale * line[field])
    return [
        (step, statistics.fmean(at), statistics.stdev(at) if len(at) > 1 else 0.0)
        for step, at in sorted(values.items())
        if len(at) == len(runs)
    ]


def _draw_band(
    axes: Axes, points: Sequence[tuple[float, float, float]], look: Mapping[str, Any]
) -> None:
    if not points:
        return
    steps, means, _ = zip(*points, strict=True)
    if len(points) == 1:  # a line of one point is invisible
        look = {**look, "marker": "o", "markevery": 1}
    axes.plot(steps, means, **look)
    low, high = ([m + sign * s for _, m, s in points] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=look["color"], alpha=0.2, linewidth=0)
