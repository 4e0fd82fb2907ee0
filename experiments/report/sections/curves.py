"""Figures that several sections draw: values of methods side by side, and metrics over steps."""

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

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


def draw_bars(panels: Sequence[Panel], figure: Figure, columns: int = 1) -> None:
    """Draws panels whose methods are points with error bars from top to bottom.

    A panel has one setting.

    Args:
      panels: row by row; those of a row have the same methods.
      figure: is drawn into.
      columns: panels side by side, a colour for each column.
    """
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [1 + max(len(panel.lines) for panel in row) for row in rows]
    width = 6.6 if columns == 1 else 4.2 * columns
    figure.set_size_inches(width, 0.6 + sum(0.6 + 0.3 * height for height in heights))
    grid = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(grid[index])
        color = COLORS[index % columns]
        for position, points in enumerate(panel.lines.values()):
            for value, spread in points:
                axes.errorbar(value, position, xerr=spread, fmt="o", capsize=3, color=color)
        label_axes(axes, panel.title, panel.x_label, panel.y_label)
        axes.set_yticks(range(len(panel.lines)), list(panel.lines))
        axes.tick_params(labelleft=index % columns == 0)
        axes.set_ylim(len(panel.lines) - 0.5, -0.5)


def draw_curves(
    curves: Mapping[str, Sequence[Curve]], y_label: str, scale: str, figure: Figure
) -> None:
    """Draws metrics over steps: a colour for each method, a line for each seed.

    Args:
      curves: title of a method -> one for each seed; a value is the mean of the steps since the
        last.
      y_label: the metric, with its unit.
      scale: of the vertical axis, `linear` or `log`.
      figure: is drawn into.
    """
    figure.set_size_inches(7.0, 4.0)
    axes = figure.add_subplot()
    for number, (title, seeds) in enumerate(curves.items()):
        for index, curve in enumerate(map(merge_short, seeds)):
            axes.plot(
                curve.steps,
                curve.values,
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                label=None if index else title,
            )
    if scale == "log":
        use_log_scale(axes)
    label_axes(axes, "", "step (updates per node)", y_label)
    if axes.get_lines():
        axes.legend(fontsize=8)


def merge_short(curve: Curve) -> Curve:
    """Joins the points of few steps with others: a mean over a step or two is noise.

    A value is the mean of the steps since the last. A point of less than half as many steps as
    most is joined with the next one, and the last point with the one before.

    >>> merge_short(Curve((10, 20, 21, 30), (4.0, 3.0, 12.0, 2.0)))
    Curve(steps=(10, 20, 30), values=(4.0, 3.0, 3.0))
    >>> merge_short(Curve((10, 20, 22), (4.0, 3.0, 9.0)))
    Curve(steps=(10, 22), values=(4.0, 4.0))
    """
    if not curve.steps:
        return curve
    lengths = [end - begin for begin, end in itertools.pairwise((0.0, *curve.steps))]
    short = statistics.median(lengths) / 2
    merged: list[tuple[float, float, float]] = []  # last step, steps, sum of their values
    for step, length, value in zip(curve.steps, lengths, curve.values, strict=True):
        is_last = step == curve.steps[-1]
        if merged and (merged[-1][1] < short or (is_last and length < short)):
            _, count, total = merged.pop()
            merged.append((step, count + length, total + length * value))
        else:
            merged.append((step, length, length * value))
    return Curve(
        tuple(step for step, _, _ in merged), tuple(total / count for _, count, total in merged)
    )


def use_log_scale(axes: Axes) -> None:
    """Makes the vertical axis logarithmic, with plain numbers at 1, 2, 3 and 5 of each decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


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
    points = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be cut short
            line = json.loads(text)
            if line["run"] == run["run"] and field in line:
                points.append((line["step"], line[field]))
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))
