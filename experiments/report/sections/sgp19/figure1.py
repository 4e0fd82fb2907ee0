"""SGP-19, Figure 1a: training loss over the steps, for each number of nodes."""

from collections.abc import Collection, Iterable, Mapping

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import Results, Scale
from experiments.report.sections.curves import COLORS, Curve, label_axes, merge_short, use_log_scale
from experiments.report.sections.sgp19 import grid
from experiments.report.sections.sgp19.grid import Cell
from experiments.report.sections.sgp19.readings import NAMES, read_losses


def read_all_losses(
    scale: Scale, results: Results, nodes: Iterable[int], rows: Collection[str]
) -> dict[int, dict[str, list[Curve]]]:
    """Number of nodes -> method -> training loss over the steps, for each seed."""
    return {
        n: {NAMES[row]: read_losses(results, grid.find_place(Cell(row, n), scale)) for row in rows}
        for n in nodes
    }


def draw_losses(losses: Mapping[int, Mapping[str, list[Curve]]], figure: MatplotlibFigure) -> None:
    """Draws a panel for each number of nodes, a colour for each method."""
    figure.set_size_inches(3.2 * len(losses), 3.6)
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for axes, (nodes, methods) in zip(panels, losses.items(), strict=True):
        for number, (name, curves) in enumerate(methods.items()):
            for index, curve in enumerate(map(merge_short, curves)):
                label = None if index else name
                axes.plot(curve.steps, curve.values, color=COLORS[number], label=label, lw=1)
        use_log_scale(axes)
        label_axes(axes, f"{nodes} nodes", "step (updates per node)", "")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    panels[0].set_ylabel("training loss, nats")
