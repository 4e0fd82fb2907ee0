"""Figures on the disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.plots import COLORS
from experiments.report.section import Figure

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
