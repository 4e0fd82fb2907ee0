"""The figures of the report, as PNG and as SVG; the same figures make the same files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import Figure

SIZE = (7.0, 4.2)  # inches
DPI = 130  # of PNG files
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "gossipjax",  # ids in SVG files are random otherwise
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=matplotlib.color_sequences["petroff10"]),
    "legend.frameon": False,
}


class Drawing(NamedTuple):
    """A figure on the disk.

    Attributes:
      caption: below it.
      png, svg: its files.
    """

    caption: str
    png: Path
    svg: Path


def draw_figures(section: str, figures: Sequence[Figure], folder: Path) -> tuple[Drawing, ...]:
    """Draws figures into `FOLDER/SECTION-NAME.png` and `.svg`."""
    drawings = []
    for figure in figures:
        prefix = "" if figure.name.startswith(section) else f"{section}-"
        stem = f"{prefix}{figure.name}"
        drawing = Drawing(figure.caption, folder / f"{stem}.png", folder / f"{stem}.svg")
        with matplotlib.rc_context(STYLE):
            canvas = MatplotlibFigure(figsize=SIZE, layout="constrained")
            figure.draw(canvas)
            canvas.savefig(drawing.png, dpi=DPI)
            canvas.savefig(drawing.svg, metadata={"Date": None})
        drawings.append(drawing)
    return tuple(drawings)
