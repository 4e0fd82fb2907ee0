"""The table and the plot of the averaging experiment."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from experiments.plots import COLORS
from experiments.results import Record
from experiments.tables import Cell, make_table

MARKERS = "os^xvD*P<"
MARKER_INTERVAL = 5  # rounds
ROUNDING_ERROR = 1e-15  # a smaller error is only float64 rounding


def plot_errors(lines: Sequence[Record], path: Path) -> None:
    """Plots the lines of `metrics.jsonl`, a panel per number of nodes, as a PNG."""
    sizes = list(dict.fromkeys(line["nodes"] for line in lines))
    topologies = list(dict.fromkeys(line["topology"] for line in lines))
    columns = min(3, len(sizes))
    rows = math.ceil(len(sizes) / columns)
    legend_columns = 2 * columns
    height = 4 * rows + 0.9 + 0.2 * math.ceil(len(topologies) / legend_columns)
    figure = Figure((2.5 + 4.5 * columns, height), dpi=120, layout="constrained")
    figure.suptitle("Averaging error over rounds")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(sizes) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("error relative to the start\n(median, and 10-90 % of the seeds)")
    bottom = max(ROUNDING_ERROR, min(line["error_p10"] for line in lines))
    rounds = max(line["round"] for line in lines)
    for axes, size in zip(panels, sizes, strict=False):
        axes.set(title=f"{size} nodes", xlabel="rounds of averaging", yscale="log")
        axes.set(xlim=(0, rounds), ylim=(bottom / 3, 2))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if bottom == ROUNDING_ERROR:
            axes.axhline(bottom, color="black", linestyle=":", linewidth=1)
            axes.text(rounds, bottom / 1.2, "exact ", ha="right", va="top", fontsize="small")
        for index, topology in enumerate(topologies):
            shown = [x for x in lines if x["topology"] == topology and x["nodes"] == size]
            _draw_curve(axes, shown, topology, index)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=legend_columns, fontsize="small"
    )
    figure.savefig(path)


def _draw_curve(axes: Axes, lines: Sequence[Record], label: str, index: int) -> None:
    look: dict[str, Any] = {"color": COLORS[index % len(COLORS)]}
    rounds = [line["round"] for line in lines]
    low, median, high = (
        np.maximum(ROUNDING_ERROR, [line[field] for line in lines])
        for field in ("error_p10", "error_median", "error_p90")
    )
    axes.fill_between(rounds, low, high, alpha=0.2, linewidth=0, **look)
    # Curves of exact topologies coincide: markers at different rounds show all of them.
    look |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 4}
    look["markevery"] = (index % MARKER_INTERVAL, MARKER_INTERVAL)
    axes.plot(rounds, median, label=label, linewidth=1.2, **look)


def make_topology_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the list `runs` of `summary.json`."""
    columns: dict[str, Cell] = {
        "topology": "{topology}",
        "\nnodes": "{nodes}",
        "\npeers": "{peers_per_round}",
        "\nperiod": "{period}",
        "gap per\nround": "{spectral_gap_per_round:.4f}",
        "exact\nafter": lambda run: f"{run['rounds_to_exact_average'] or 'never'}",
        "error\nafter 5": lambda run: _format_error(run["error_after_5_rounds"]),
        "final\nerror": lambda run: _format_error(run["final_error"]),
    }
    caption = "errors: medians over the seeds; all others: seed 0"
    return make_table("Topologies", caption, columns, runs)


def _format_error(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" if error > ROUNDING_ERROR else f"<{ROUNDING_ERROR:.0e}"


def write_report(
    folder: Path, console: Console, lines: Sequence[Record], runs: Sequence[Record]
) -> None:
    """Prints the table, and writes `averaging_error.png`; `lines` are those of `metrics.jsonl`."""
    plot_errors(lines, folder / "averaging_error.png")
    console.print(make_topology_table(runs))
