"""Tables and the plot of the averaging experiment, made from the files that it wrote.

python -m experiments.averaging_report OUT
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.report import COLOURS

Record = dict[str, Any]

MARKS, MARKED = "os^xvD*P<", 5  # every fifth round is marked
ROUNDING = 1e-15  # below it an error is nothing but float64 rounding


def plot(lines: Sequence[Record], path: Path) -> None:
    """The lines of `metrics.jsonl`, a panel per number of nodes, as a PNG."""
    sizes = list(dict.fromkeys(line["nodes"] for line in lines))
    names = list(dict.fromkeys(line["topology"] for line in lines))
    columns = min(3, len(sizes))
    rows = math.ceil(len(sizes) / columns)
    beside = 2 * columns  # names in a row of the legend
    height = 4 * rows + 0.9 + 0.2 * math.ceil(len(names) / beside)
    figure = Figure((2.5 + 4.5 * columns, height), dpi=120, layout="constrained")
    figure.suptitle("Averaging error over rounds")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(sizes) :]:
        axes.set_axis_off()
    for axes in panels[::columns]:
        axes.set_ylabel("error relative to the start\n(median, and 10-90 % of the seeds)")
    bottom = max(ROUNDING, min(line["error_10"] for line in lines))
    rounds = max(line["round"] for line in lines)
    for axes, size in zip(panels, sizes, strict=False):
        axes.set(title=f"{size} nodes", xlabel="rounds of averaging", yscale="log")
        axes.set(xlim=(0, rounds), ylim=(bottom / 3, 2))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if bottom == ROUNDING:
            axes.axhline(ROUNDING, color="black", linestyle=":", linewidth=1)
            axes.text(rounds, ROUNDING / 1.2, "exact ", ha="right", va="top", fontsize="small")
        for index, name in enumerate(names):
            own = [line for line in lines if (line["topology"], line["nodes"]) == (name, size)]
            low, median, high = (
                [max(ROUNDING, line[field]) for line in own]
                for field in ("error_10", "error_median", "error_90")
            )
            look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)]}
            steps = [line["round"] for line in own]
            axes.fill_between(steps, low, high, alpha=0.2, linewidth=0, **look)
            # Exact topologies lie on each other: marks at different rounds show all of them.
            every = (index % MARKED, MARKED)
            look |= {"marker": MARKS[index % len(MARKS)], "markevery": every, "markersize": 4}
            axes.plot(steps, median, label=name, linewidth=1.2, **look)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=beside, fontsize="small")
    figure.savefig(path)


def sgp18_table(factors: Sequence[Record]) -> Table:
    """The list `sgp18_appendix_a` of `summary.json`."""
    nodes, rounds = factors[0]["nodes"], factors[0]["rounds"]
    result = _table(
        f"sigma_2 squared, {nodes} nodes, {rounds} rounds",
        "SGP-18: appendix A; a bound on the squared error. ±: standard deviation over the seeds",
    )
    result.add_column("the peer of a round", no_wrap=True)
    result.add_column("ours", justify="right")
    result.add_column("SGP-18", justify="right")
    for record in factors:
        result.add_row(record["words"], _mean(record, "{:.3f}"), record["paper"])
    return result


def rand20_table(rings: Sequence[Record]) -> Table:
    """The list `rand20_rings` of `summary.json`."""
    k = rings[0]["rounds"]
    result = _table(
        f"Rings, distance to the exact average after {k} rounds",
        "RAND-20: eqs. 6, 5, 12. ±: standard deviation over seeds",
    )
    for header in (
        "nodes",
        "ring:\nlambda_2",
        "\nRAND-20",
        "ring:\ndistance",
        "\nRAND-20",
        "randomized:\ndistance",
        "at most\n(RAND-20)",
    ):
        result.add_column(header, justify="right", no_wrap=True)
    for record in rings:
        result.add_row(
            f"{record['nodes']}",
            f"{record['second_eigenvalue']:.4f}",
            f"{record['paper_second_eigenvalue']:.4f}",
            f"{record['ring']:.4f}",
            f"{record['paper_ring']:.4f}",
            _mean(record, "{:.4f}"),
            f"{record['paper_bound']:.4f}",
        )
    return result


def topology_table(runs: Sequence[Record]) -> Table:
    """The list `runs` of `summary.json`."""
    result = _table(
        "Topologies",
        "errors: median over the seeds; cycle, gap, exact: first seed's",
    )
    result.add_column("topology", overflow="fold")
    for header in (
        "\nnodes",
        "\npeers",
        "\ncycle",
        "gap of\ncycle",
        "exact\nafter",
        f"error\nafter {runs[0]['early_round']}",
        "error at\nthe end",
    ):
        result.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        result.add_row(
            run["topology"],
            *(f"{run[name]}" for name in ("nodes", "peers_per_round", "rounds_of_a_cycle")),
            f"{run['spectral_gap_of_a_cycle']:.4f}",
            f"{run['rounds_to_exact_average'] or 'never'}",
            *(_error(run[name]) for name in ("error_at_early_round", "error_at_the_end")),
        )
    return result


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, min_width=64)


def _error(value: float) -> str:
    return f"{value:.1e}" if value > ROUNDING else f"<{ROUNDING:.0e}"


def _mean(record: Record, form: str) -> str:
    mean, deviation = form.format(record["mean"]), record["standard_deviation"]
    if 0 <= record["mean"] < 1e-12:
        mean = "<1e-12"
    return mean if deviation is None else f"{mean} ±{form.format(deviation)}"


def write_report(folder: Path, console: Console) -> None:
    """Reads a finished run's folder, prints its tables, and writes `averaging_error.png` into it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not JSON, or is of another program.
    """
    summary = json.loads((folder / "summary.json").read_text())
    if "sgp18_appendix_a" not in summary:
        raise ValueError(f"{folder} holds no run of experiments.averaging.")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plot(lines, folder / "averaging_error.png")
    console.print(sgp18_table(summary["sgp18_appendix_a"]))
    console.print(rand20_table(summary["rand20_rings"]))
    console.print(topology_table(summary["runs"]))


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes the tables and the plot of an averaging experiment again, from its folder.

    Args:
        out: the folder that the experiment wrote (its --out).
    """
    try:
        write_report(out, Console())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.averaging_report")
