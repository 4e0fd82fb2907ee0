"""Tables and the plot of the averaging experiment."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.plots import COLORS
from experiments.results import Record

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


def make_sgp18_table(factors: Sequence[Record]) -> Table:
    """Makes a table of the list `sgp18_appendix_a` of `summary.json`."""
    table = make_table(
        f"sigma_2 squared, {factors[0]['nodes']} nodes, {factors[0]['rounds']} rounds",
        "SGP-18: appendix A; a bound on the squared error. ±: standard deviation over the seeds",
        ("peer in each round", "ours", "SGP-18"),
    )
    for record in factors:
        table.add_row(record["label"], _format_mean(record, "{:.3f}"), record["paper"])
    return table


def make_rand20_table(rings: Sequence[Record]) -> Table:
    """Makes a table of the list `rand20_rings` of `summary.json`."""
    headers = ("nodes", "ring:\nlambda_2", "\nRAND-20", "ring:\ndistance", "\nRAND-20")
    table = make_table(
        f"Rings, distance to the exact average after {rings[0]['rounds']} rounds",
        "RAND-20: eqs. 6, 5, 12. ±: standard deviation over seeds",
        (*headers, "randomized:\ndistance", "bound\n(RAND-20)"),
    )
    for record in rings:
        table.add_row(
            f"{record['nodes']}",
            f"{record['second_eigenvalue']:.4f}",
            f"{record['paper_second_eigenvalue']:.4f}",
            f"{record['ring_distance']:.4f}",
            f"{record['paper_ring_distance']:.4f}",
            _format_mean(record, "{:.4f}"),
            f"{record['paper_bound']:.4f}",
        )
    return table


def make_topology_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the list `runs` of `summary.json`."""
    headers = ("topology", "\nnodes", "\npeers", "\nperiod", "spectral\ngap", "exact\nafter")
    table = make_table(
        "Topologies",
        "errors: medians over the seeds; all others: seed 0",
        (*headers, "error\nafter 5", "final\nerror"),
    )
    for run in runs:
        table.add_row(
            run["topology"],
            f"{run['nodes']}",
            f"{run['peers_per_round']}",
            f"{run['period']}",
            f"{run['spectral_gap']:.4f}",
            f"{run['rounds_to_exact_average'] or 'never'}",
            _format_error(run["error_after_5_rounds"]),
            _format_error(run["final_error"]),
        )
    return table


def make_table(title: str, caption: str, headers: Sequence[str], is_wrapped: bool = False) -> Table:
    """An empty table: the first column has text, the others numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, min_width=64)
    table.add_column(headers[0], overflow="fold", min_width=12)
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=not is_wrapped)
    return table


def _format_error(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" if error > ROUNDING_ERROR else f"<{ROUNDING_ERROR:.0e}"


def _format_mean(record: Record, number_format: str) -> str:
    mean = number_format.format(record["mean"])
    if 0 <= record["mean"] < 1e-12:
        mean = "<1e-12"
    deviation = record["standard_deviation"]
    return mean if deviation is None else f"{mean} ±{number_format.format(deviation)}"


def write_report(
    folder: Path,
    console: Console,
    lines: Sequence[Record],
    runs: Sequence[Record],
    factors: Sequence[Record],
    rings: Sequence[Record],
) -> None:
    """Prints the tables, and writes `averaging_error.png`; `lines` are those of `metrics.jsonl`."""
    plot_errors(lines, folder / "averaging_error.png")
    console.print(make_sgp18_table(factors))
    console.print(make_rand20_table(rings))
    console.print(make_topology_table(runs))
