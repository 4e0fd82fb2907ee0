"""Table and plots of the measurement of slow nodes, made from the files that it wrote.

python -m experiments.speed.stragglers.report OUT
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.plots import COLORS
from experiments.program import exit_on_error
from experiments.results import Record

CAPTION = (
    "Computation is a sleep of {seconds:g} s per step, as of a device that does not share these "
    "cores. examples/s: in lockstep, until all have ended; "
    "async-, each node's until its last step ended, summed. x none: over those of the "
    "algorithm without slow nodes. x ideal: that ratio over what it is if only computation takes "
    "time. x bound: examples/s over those if only computation takes time. x model: over those of a "
    "simulation with the same factors."
)
HEADERS = (
    "examples\n/s",
    "x\nnone",
    "x\nideal",
    "x\nbound",
    "x\nmodel",
    "steps of\nslowest",
    "steps,\nmedian",
    "final\nloss",
)
BAR_WIDTH = 0.8  # of a group of bars
ALGORITHMS_PER_ROW = 3  # of a legend


def make_table(runs: Sequence[Record]) -> Table:
    """A row per slowness and algorithm."""
    first = runs[0]
    table = Table(
        title=f"{first['nodes']} nodes, {first['steps']} steps of each on average",
        caption=CAPTION.format(seconds=first["compute_seconds"]),
        box=SIMPLE_HEAD,
        padding=0,
        min_width=72,
    )
    table.add_column("slowness", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for name in list_names(runs, "slowness"):
        for run in select_runs(runs, "slowness", name):
            table.add_row(
                name,
                run["algorithm"],
                f"{run['examples_per_second']:,.0f}",
                format_ratio(run["ratio_to_none"]),
                format_ratio(run["ratio_to_ideal"]),
                format_ratio(run["ratio_to_limit"]),
                format_ratio(1 / run["modelled_ratio"] if run["modelled_ratio"] else None),
                f"{run['steps_min']}",
                f"{run['steps_median']:g}",
                f"{run['loss']:.3f}",
            )
        table.add_section()
    return table


def format_ratio(ratio: float | None) -> str:
    """A ratio in a table; - without one."""
    return "-" if ratio is None else f"{ratio:.3f}"


def list_names(records: Sequence[Record], field: str) -> list[str]:
    """The different values of a field, in order."""
    return list(dict.fromkeys(record[field] for record in records))


def select_runs(records: Sequence[Record], field: str, name: str) -> list[Record]:
    """Runs, or lines, with one value of a field."""
    return [record for record in records if record[field] == name]


def plot_losses(lines: Sequence[Record], title: str, path: Path) -> None:
    """Plots the training loss over seconds, a panel per slowness and a line per algorithm."""
    slowness = list_names(lines, "slowness")
    algorithms = list_names(lines, "algorithm")
    figure = Figure((2 + 4.5 * len(slowness), 5), dpi=120, layout="constrained")
    figure.suptitle(f"Training loss over time, {title}")
    panels = figure.subplots(1, len(slowness), squeeze=False, sharey=True)[0]
    panels[0].set_ylabel("training loss (mean over N steps' batches)")
    for axes, name in zip(panels, slowness, strict=True):
        for index, algorithm in enumerate(algorithms):
            points = [
                line
                for line in select_runs(lines, "slowness", name)
                if line["algorithm"] == algorithm
            ]
            axes.plot(
                [line["seconds"] for line in points],
                [line["loss"] for line in points],
                color=COLORS[index % len(COLORS)],
                label=algorithm,
                linewidth=1.2,
            )
        axes.set(title=f"slowness: {name}", xlabel="seconds", yscale="log")
        axes.grid(alpha=0.3, which="both")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = ALGORITHMS_PER_ROW * len(slowness)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")
    figure.savefig(path)


def plot_rates(runs: Sequence[Record], title: str, path: Path) -> None:
    """Plots the examples per second as bars, a group per slowness, with their upper bounds."""
    slowness = list_names(runs, "slowness")
    algorithms = list_names(runs, "algorithm")
    figure = Figure((3 + 0.35 * len(runs), 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    width = BAR_WIDTH / len(algorithms)
    for index, algorithm in enumerate(algorithms):
        chosen = select_runs(runs, "algorithm", algorithm)
        positions = [
            slowness.index(run["slowness"]) + (index - (len(algorithms) - 1) / 2) * width
            for run in chosen
        ]
        rates = [run["examples_per_second"] for run in chosen]
        limits = [run["limit_examples_per_second"] for run in chosen]
        axes.bar(positions, rates, 0.9 * width, color=COLORS[index % len(COLORS)], label=algorithm)
        axes.hlines(
            limits,
            np.subtract(positions, width / 2),
            np.add(positions, width / 2),
            color="black",
            label="_" if index else "if only computation takes time",
        )
    axes.set(title=f"Examples per second, {title}", ylabel="examples per second, all nodes")
    axes.set_xlabel("slowness")
    axes.set_xticks(range(len(slowness)), slowness)
    axes.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside lower center", ncols=ALGORITHMS_PER_ROW, fontsize="small")
    figure.savefig(path)


def write_report(folder: Path, console: Console) -> None:
    """Reads the files of a measurement, prints its table and writes its plots into its folder.

    The plots are `loss_over_seconds.png` and `examples_per_second.png`.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is not JSON or of another program.
    """
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    if not runs or "slowness" not in runs[0]:
        raise ValueError(
            f"{folder} must hold a run of experiments.speed stragglers, got another one."
        )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    title = f"{runs[0]['nodes']} nodes, computation {runs[0]['compute_seconds']:g} s"
    plot_losses(lines, title, folder / "loss_over_seconds.png")
    plot_rates(runs, title, folder / "examples_per_second.png")
    console.print(make_table(runs))


def main(out: tyro.conf.Positional[Path]) -> None:
    """Prints the table and writes the plots of a finished measurement of slow nodes again.

    Args:
      out: the folder that the measurement wrote (its --out).
    """
    with exit_on_error():
        write_report(out, Console())


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.speed.stragglers.report")
