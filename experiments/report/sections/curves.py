"""Figures that several sections draw: values of methods side by side, and metrics over steps."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report.sections.samples import Sample
from experiments.results import Record

COLORS = matplotlib.color_sequences["petroff10"]
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">")
NO_SPREAD = 0.0  # of a single seed: no error bar


class Panel(NamedTuple):
    """A part of a figure.

    Attributes:
      title: above it.
      x_label, y_label: quantities, with units.
      ticks: the settings, from left to right.
      lines: title of a method -> a value and a standard deviation for each setting; not a number
        where there is none.
    """

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[str]
    lines: Mapping[str, Sequence[tuple[float, float]]]


class Curve(NamedTuple):
    """A metric over the steps of a run.

    Attributes:
      steps: at which it was measured.
      values: of the metric.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]


def make_point(sample: Sample) -> tuple[float, float]:
    """The mean and the standard deviation of a sample.

    >>> make_point(Sample((1.0,))), make_point(Sample())
    ((1.0, 0.0), (nan, 0.0))
    """
    if not sample.values:
        return math.nan, NO_SPREAD
    several = len(sample.values) > 1
    return sample.mean, statistics.stdev(sample.values) if several else NO_SPREAD


def draw_panels(panels: Sequence[Panel], figure: Figure) -> None:
    """Draws panels side by side, the legend, which is that of all, beside the last.

    All have the same methods."""
    titles = list(dict.fromkeys(title for panel in panels for title in panel.lines))
    figure.set_size_inches(4.2 * len(panels) + 2.4, 3.8)
    for index, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), index)
        for title, points in panel.lines.items():
            number = titles.index(title)
            axes.errorbar(
                range(len(points)),
                [value for value, _ in points],
                yerr=[spread for _, spread in points],
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=5,
                capsize=3,
                label=title,
            )
        label_axes(axes, panel.title, panel.x_label, panel.y_label)
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        if index == len(panels):
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8)


def draw_bars(panels: Sequence[Panel], figure: Figure) -> None:
    """Draws panels above one another, whose methods are points with error bars from top to bottom.

    A panel has one setting.
    """
    figure.set_size_inches(6.6, 0.6 + sum(0.9 + 0.3 * len(panel.lines) for panel in panels))
    heights = [1 + len(panel.lines) for panel in panels]
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(grid[index])
        for position, points in enumerate(panel.lines.values()):
            for value, spread in points:
                axes.errorbar(value, position, xerr=spread, fmt="o", capsize=3, color=COLORS[index])
        label_axes(axes, panel.title, panel.x_label, panel.y_label)
        axes.set_yticks(range(len(panel.lines)), list(panel.lines))
        axes.set_ylim(len(panel.lines) - 0.5, -0.5)


def draw_curves(
    curves: Mapping[str, Sequence[Curve]], y_label: str, scale: str, figure: Figure
) -> None:
    """Draws metrics over steps: a colour for each method, a line for each seed.

    Args:
      curves: title of a method -> one for each seed.
      y_label: the metric, with its unit.
      scale: of the vertical axis, `linear` or `log`.
      figure: is drawn into.
    """
    figure.set_size_inches(7.0, 4.0)
    axes = figure.add_subplot()
    for number, (title, seeds) in enumerate(curves.items()):
        for index, curve in enumerate(seeds):
            axes.plot(
                curve.steps,
                curve.values,
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                label=None if index else title,
            )
    axes.set_yscale(scale)
    label_axes(axes, "", "step (updates per node)", y_label)
    if axes.get_lines():
        axes.legend(fontsize=8)


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Writes the titles, and draws a faint grid."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)


def read_curves(folder: Path | None, run: Record, field: str) -> Curve:
    """Reads a metric of a run from `metrics.jsonl`; an empty curve if it is not there."""
    path = folder / "metrics.jsonl" if folder is not None else None
    if path is None or not path.is_file():
        return Curve((), ())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    points = [
        (line["step"], line[field]) for line in lines if line["run"] == run["run"] and field in line
    ]
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))
