"""Tables and plots of measurements on a wire, made from the files that they wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from experiments.plots import COLORS
from experiments.results import Record
from experiments.speed.harness import Cell, make_table, scale

MEGA = 1e6

ROW_COLUMNS: dict[str, Cell] = {
    "algorithm": lambda run: (
        run["algorithm"].replace("@", " ").replace("_", " ") + "*" * run["overlaps"]
    ),
    "wire": "{wire}",
    "seconds per\niteration": "{seconds:.3f} [{seconds_p10:.2f}-{seconds_p90:.2f}]",
    "MB\nsent": scale("sent_bytes", MEGA, ".2f"),
    "MB\non NIC": scale("nic_bytes", MEGA, ".2f"),
    "sum\n(s)": "{limit_sum_seconds:.3f}",
    "max\n(s)": "{limit_max_seconds:.3f}",
    "x\nbound": "{ratio_to_limit:.2f}",
    "x\nmodel": lambda run: format_inverse(run["modelled_ratio"], ".2f"),
}
ROW_LEGEND = (
    "computation without exchange {computation_seconds:.3f} "
    "[{computation_seconds_p10:.2f}-{computation_seconds_p90:.2f}] s "
    "({examples_per_host} examples per host)\n"
    "plain TCP stream {all_links:.3g} MB/s on all links at once, {one_link:.3g} on one\n"
    "seconds: median of the slowest host (async: mean over hosts and iterations), 10-90 %\n"
    "MB: of the host that sends most\n"
    "sum: computation + bytes / faster stream; max: the larger of the two\n"
    "x bound: seconds / sum; seconds / max with *, where the exchange can overlap\n"
    "x model: seconds / those of the cost model, with the processor time measured here"
)
STRAGGLER_COLUMNS: dict[str, Cell] = {
    "slowness": "{slowness}",
    "algorithm": "{algorithm}",
    "examples\n/s": "{examples_per_second:,.0f}",
    "x\nnone": scale("ratio_to_none", 1, ".3f"),
    "x\nideal": scale("ratio_to_ideal", 1, ".3f"),
    "x\nbound": scale("ratio_to_limit", 1, ".3f"),
    "x\nmodel": lambda run: format_inverse(run["modelled_ratio"], ".3f"),
    "steps of\nslowest": "{steps_min}",
    "steps,\nmedian": "{steps_median:g}",
}
STRAGGLER_CAPTION = (
    "Computation is a sleep of {compute_seconds:g} s per step, as of a device that does not share "
    "these cores. examples/s: in lockstep, until all have ended; "
    "async-, each node's until its last step ended, summed. x none: over those of the "
    "algorithm without slow nodes. x ideal: that ratio over what it is if only computation takes "
    "time. x bound: examples/s over those if only computation takes time. x model: over those of a "
    "simulation with the same factors."
)


def format_inverse(ratio: float | None, digits: str) -> str:
    """Measured over modelled, from modelled over measured; - of what is not modelled.

    >>> format_inverse(0.8, ".2f"), format_inverse(None, ".2f")
    ('1.25', '-')
    """
    return "-" if ratio is None else f"{1 / ratio:{digits}}"


def name_link(record: Record) -> str:
    """Name of the links of a configuration or run."""
    return record["bandwidth"] or "loopback"


def name_configuration(record: Record) -> str:
    """Name of a table: how many hosts, on which links, and what computation is."""
    return f"{record['hosts']} hosts, {name_link(record)}, computation {record['computation']}"


def name_row(run: Record) -> str:
    """Name of a row in plots."""
    return run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else "")


def select(records: Sequence[Record], **fields: Any) -> list[Record]:
    """The records that have these values."""
    return [r for r in records if all(r[name] == value for name, value in fields.items())]


def select_runs(runs: Sequence[Record], configuration: Record) -> list[Record]:
    """The runs of one configuration."""
    fields = ("hosts", "bandwidth", "computation")
    return select(runs, **{field: configuration[field] for field in fields})


def make_row_table(configuration: Record, runs: Sequence[Record]) -> Table:
    """The rows of one number of hosts and bandwidth."""
    megabytes = 4 * configuration["parameters"] / MEGA
    title = f"{name_configuration(configuration)}, "
    return make_table(f"{title}{megabytes:.3g} MB of parameters", "", ROW_COLUMNS, runs)


def plot_rows(configurations: Sequence[Record], runs: Sequence[Record], path: Path) -> None:
    """Plots the seconds of every row and its lower bound, a panel per configuration."""
    count = len({name_row(run) for run in runs})
    height = 1.2 + (0.9 + 0.24 * count) * len(configurations)
    figure = Figure((8, height), dpi=120, layout="constrained")
    figure.suptitle("Time per iteration, and its lower bound")
    panels = figure.subplots(len(configurations), 1, squeeze=False)[:, 0]
    for axes, configuration in zip(panels, configurations, strict=True):
        shown = select_runs(runs, configuration)
        positions = range(len(shown))
        seconds = [run["seconds"] for run in shown]
        spread = [
            [max(0.0, run["seconds"] - run["seconds_p10"]) for run in shown],
            [max(0.0, run["seconds_p90"] - run["seconds"]) for run in shown],
        ]
        axes.barh(positions, seconds, xerr=spread, color=COLORS[0], label="measured (10-90 %)")
        limits = [run["limit_seconds"] for run in shown]
        bar = {"color": "black", "markersize": 12, "markeredgewidth": 2}
        axes.plot(limits, positions, "|", label="lower bound", **bar)
        computation = configuration["computation_seconds"]
        axes.axvline(computation, color=COLORS[1], linestyle=":", label="computation")
        axes.set_yticks(positions, [name_row(run) for run in shown], fontsize="small")
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set(title=name_configuration(configuration))
        axes.set_xlabel("seconds per iteration (median of the slowest host; async: mean)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)


def report_rows(folder: Path, summary: Record, console: Console) -> None:
    """Prints the tables of the rows and writes their plots."""
    configurations = summary["configurations"]
    runs = summary["runs"]
    plot_rows(configurations, runs, folder / "seconds_per_iteration.png")
    for configuration in configurations:
        selected = select_runs(runs, configuration)
        console.print(make_row_table(configuration, selected))
        goodputs = {
            name: configuration[f"goodput_{name}"] / MEGA for name in ("all_links", "one_link")
        }
        console.print(ROW_LEGEND.format(**configuration, **goodputs))
    for nodes, reasons in summary["left_out"].items():
        for name, reason in reasons.items():
            console.print(f"left out ({nodes}): {name}: {reason}", soft_wrap=True)


def report_stragglers(runs: Sequence[Record], console: Console) -> None:
    """Prints the table of slow nodes."""
    first = runs[0]
    order = list(dict.fromkeys(run["slowness"] for run in runs))
    rows = sorted(runs, key=lambda run: order.index(run["slowness"]))
    title = f"{first['nodes']} nodes, {first['steps']} steps of each on average"
    caption = STRAGGLER_CAPTION.format(**first)
    console.print(make_table(title, caption, STRAGGLER_COLUMNS, rows, texts=2))


def write_report(folder: Path, console: Console) -> None:
    """Reads the summary of a measurement and prints its tables; of `wire` it draws a plot, too."""
    summary = json.loads((folder / "summary.json").read_text())
    if "configurations" in summary:
        report_rows(folder, summary, console)
    else:
        report_stragglers(summary["runs"], console)
