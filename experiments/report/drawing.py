"""Figures on the disk, and metrics over the steps of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.plots import COLORS
from experiments.report.section import Figure, Place, Results
from experiments.results import read_lines

SIZE = (7.0, 4.2)  # inches
DPI = 130
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


class Curve(NamedTuple):
    """A metric over the steps of a run; a value is the mean of the steps since the last."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


def read_curves(results: Results, place: Place, field: str) -> list[Curve]:
    """Reads a metric of each seed of a method; no curve of a run that is missing.

    Of a list, a value per node, it is the mean.
    """
    folder = results[place.run].folder if place.run in results else None
    if folder is None or not (folder / "metrics.jsonl").is_file():
        return []
    lines = read_lines(folder / "metrics.jsonl")
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
