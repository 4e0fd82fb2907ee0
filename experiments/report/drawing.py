"""Figures: methods side by side, metrics over steps, bars."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from experiments.plots import COLORS, choose_colors, find_color
from experiments.report.section import Figure, Place, Results, Sample
from experiments.results import Record

SIZE = (7.0, 4.2)  # inches
DPI = 130
MAX_TICKS = 6  # of a panel of pairs, whose figures have many digits
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLORS),
    "legend.frameon": False,
}


class Drawing(NamedTuple):
    """A figure on the disk."""

    caption: str
    path: Path


def draw_figures(section: str, figures: Sequence[Figure], folder: Path) -> tuple[Drawing, ...]:
    """Draws figures into `FOLDER/SECTION-NAME.png`; none that would be empty."""
    drawings = []
    for figure in figures:
        prefix = "" if figure.name.startswith(section) else f"{section}-"
        drawing = Drawing(figure.caption, folder / f"{prefix}{figure.name}.png")
        with matplotlib.rc_context(STYLE):
            canvas = MatplotlibFigure(figsize=SIZE, layout="constrained")
            figure.draw(canvas)
            if not canvas.axes:
                continue
            canvas.savefig(drawing.path, dpi=DPI)
        drawings.append(drawing)
    return tuple(drawings)


class Panel(NamedTuple):
    """A part of a figure: methods, with a sample for each setting.

    A published figure is a sample of one value.
    """

    title: str
    x_label: str
    y_label: str
    ticks: Sequence[object]
    lines: Mapping[str, Sequence[Sample]]


def draw_panels(panels: Sequence[Panel], figure: MatplotlibFigure) -> None:
    """Draws panels of the same methods side by side, with one legend; none without a value."""
    panels = [panel for panel in panels if any(s.values for x in panel.lines.values() for s in x)]
    titles = list(dict.fromkeys(title for panel in panels for title in panel.lines))
    colors = choose_colors(titles)
    figure.set_size_inches(4.2 * len(panels) + 2.4, 3.8)
    for index, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), index)
        for title, samples in panel.lines.items():
            number = titles.index(title)
            axes.errorbar(
                range(len(samples)),
                [sample.mean for sample in samples],
                yerr=[sample.spread for sample in samples],
                color=colors[title],
                marker=MARKERS[number % len(MARKERS)],
                markersize=5,
                capsize=3,
                label=title,
            )
        label_axes(axes, panel.title, panel.x_label, panel.y_label)
        axes.set_xticks(range(len(panel.ticks)), list(map(str, panel.ticks)))
        if index == len(panels):
            axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8)


class Pair(NamedTuple):
    """Methods here and in the paper: title -> a sample, and title -> a figure."""

    titles: tuple[str, str]
    unit: str
    ours: Mapping[str, Sample]
    paper: Mapping[str, float]


def draw_pairs(pairs: Sequence[Pair], figure: MatplotlibFigure) -> None:
    """Draws methods from top to bottom with error bars: ours left, the paper's right.

    Variants of a method, such as "SGP" and "SGP, with SlowMo", have its color.
    """
    pairs = [pair for pair in pairs if any(sample.values for sample in pair.ours.values())]
    if not pairs:
        return
    heights = [1 + len(pair.ours) for pair in pairs]
    figure.set_size_inches(8.4, 0.6 + sum(0.6 + 0.3 * height for height in heights))
    grid = figure.subplots(len(pairs), 2, height_ratios=heights, squeeze=False)
    for row, pair in zip(grid, pairs, strict=True):
        paper = {title: Sample((pair.paper[title],)) for title in pair.ours}
        for index, samples in enumerate((pair.ours, paper)):
            for position, (title, sample) in enumerate(samples.items()):
                number = find_color(title)
                bar = {"fmt": "o", "capsize": 3}
                bar["color"] = "black" if number is None else COLORS[number]
                row[index].errorbar(sample.mean, position, xerr=sample.spread, **bar)
            row[index].xaxis.set_major_locator(MaxNLocator(MAX_TICKS, steps=[1, 2, 2.5, 5, 10]))
            label_axes(row[index], pair.titles[index], pair.unit, "")
            row[index].set_yticks(range(len(samples)), list(samples))
            row[index].tick_params(labelleft=index == 0)
            row[index].set_ylim(len(samples) - 0.5, -0.5)


class Curve(NamedTuple):
    """A metric over the steps of a run; a value is the mean of the steps since the last."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def read_lines(folder: Path | None) -> list[Record]:
    """Reads `metrics.jsonl`; the last line may be cut short, and there may be no file."""
    path = folder / "metrics.jsonl" if folder is not None else None
    lines = []
    for text in path.read_text().splitlines() if path is not None and path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def read_curves(results: Results, place: Place, field: str) -> list[Curve]:
    """Reads a metric of each seed of a method; no curve of a run that is missing.

    Of a list, a value per node, it is the mean.
    """
    if place.run not in results:
        return []
    lines = read_lines(results[place.run].folder)
    curves = []
    for run in results[place.run].runs:
        if run["algorithm"] == place.algorithm and place.topology in (None, run["topology"]):
            points = [
                (line["step"], float(np.mean(line[field])))
                for line in lines
                if line["run"] == run["run"] and field in line
            ]
            curves.append(Curve(tuple(x for x, _ in points), tuple(y for _, y in points)))
    return curves


def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    y_label: str,
    scale: str,
    figure: MatplotlibFigure,
) -> None:
    """Draws metrics over steps: a colour for each method, a line for each seed.

    Panels are title -> method -> a curve for each seed. A point of less than half as many steps as
    most is left out: a mean over a step or two is noise. A panel without a curve is not drawn.
    """
    panels = {
        title: methods
        for title, methods in panels.items()
        if any(curve.steps for seeds in methods.values() for curve in seeds)
    }
    if not panels:
        return
    colors = choose_colors(list(dict.fromkeys(name for x in panels.values() for name in x)))
    figure.set_size_inches(max(7.0, 3.2 * len(panels)), 3.8)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, methods) in zip(row, panels.items(), strict=True):
        for name, seeds in methods.items():
            for index, curve in enumerate(curve for curve in seeds if curve.steps):
                lengths = np.diff(curve.steps, prepend=0)
                shown = lengths >= np.median(lengths) / 2
                x, y = (np.asarray(values)[shown] for values in curve)
                axes.plot(x, y, color=colors[name], label=None if index else name, lw=1.2)
        if scale == "log":
            use_log_scale(axes)
        label_axes(axes, title, "step (updates per node)", y_label if axes is row[0] else "")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)


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
