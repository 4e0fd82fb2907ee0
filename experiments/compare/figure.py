"""The curves of a comparison: loss and metric against steps, over the seeds."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.compare.grids import Cell, Grid
from experiments.compare.table import is_fraction
from experiments.plots import AXIS_LABELS, choose_looks
from experiments.results import LOSS, Record, metric_fields, read_runs
from experiments.runner import Result


def plot_curves(grid: Grid, outcomes: Mapping[Cell, Result], metric: str, path: Path) -> None:
    """Draws the runs that finished, as a PNG: a panel per column, a colour per row.

    A line is the mean over the seeds, its band one standard deviation to each side.
    """
    lines: dict[tuple[str, str], list[list[Record]]] = {}
    for cell, outcome in outcomes.items():
        if outcome.runs and outcome.folder is not None:
            ((run,),) = read_runs(outcome.folder)[1].values()
            lines.setdefault((cell.row, cell.column), []).append(run)
    field, _ = metric_fields(metric)
    name = field.removesuffix("_average_model").replace("_", " ")
    unit, scale = (" (%)", 100.0) if is_fraction(metric) else ("", 1.0)
    height = 7.5 + 0.2 * math.ceil(len(grid.rows) / len(grid.columns))
    figure = Figure((2 + 5 * len(grid.columns), height), dpi=120, layout="constrained")
    figure.suptitle(f"{grid.title}: mean ± standard deviation over {len(grid.seeds)} seed(s)")
    panels = figure.subplots(2, len(grid.columns), squeeze=False)
    looks = choose_looks([row.title for row in grid.rows])
    for row_of_panels, (quantity, label, factor) in zip(
        panels,
        (
            (LOSS, "training loss (mean over the nodes)", 1.0),
            (field, f"{name} of the average model{unit}", scale),
        ),
        strict=True,
    ):
        for column, axes in zip(grid.columns, row_of_panels, strict=True):
            axes.set(title=column.title, xlabel=AXIS_LABELS["step"], ylabel=label)
            axes.grid(alpha=0.3)
            for row, look in looks.items():
                runs = lines.get((row, column.title), [])
                _draw_band(axes, summarize_runs(runs, quantity, factor), look)
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
