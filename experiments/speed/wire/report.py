"""Tables and plots of measurements on a wire, made from the files that they wrote.

python -m experiments.speed.wire.report OUT
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.plots import COLORS
from experiments.program import exit_on_error
from experiments.results import Record

MARKERS = "os^xvD*P<"
LINE_STYLES = {"float32": "-", "bfloat16": "--", "int8": "-.", "int4": ":"}
SPARSE_STYLE = (0, (1, 3))
MEGA = 1e6
SPACES = str.maketrans("@_", "  ")


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
ALGORITHMS_PER_ROW = 3  # of a legend


class Axis(NamedTuple):
    """The horizontal axis of a plot over configurations.

    Attributes:
      label: below the axis.
      value: position of a configuration.
      panel: title of the panel that shows a configuration.
    """

    label: str
    value: Callable[[Record], float]
    panel: Callable[[Record], str]


def make_table(configuration: Record, runs: Sequence[Record]) -> Table:
    """The rows of one number of hosts and bandwidth."""
    table = Table(
        title=f"{configuration['hosts']} hosts, {name_link(configuration)}, "
        f"{4 * configuration['parameters'] / MEGA:.3g} MB of parameters",
        box=SIMPLE_HEAD,
        padding=0,
        min_width=72,
    )
    table.add_column("algorithm")
    table.add_column("wire", no_wrap=True)
    for header in (
        "seconds per\niteration",
        "MB\nsent",
        "MB\non NIC",
        "sum\n(s)",
        "max\n(s)",
        "x\nbound",
        "x\nmodel",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        nic_bytes = run["nic_bytes"]
        algorithm = run["algorithm"].translate(SPACES)
        table.add_row(
            algorithm + ("*" if run["overlaps"] else ""),
            run["wire"],
            format_spread(run, "seconds"),
            f"{run['sent_bytes'] / MEGA:.2f}",
            "-" if nic_bytes is None else f"{nic_bytes / MEGA:.2f}",
            f"{run['limit_sum_seconds']:.3f}",
            f"{run['limit_max_seconds']:.3f}",
            f"{run['ratio_to_limit']:.2f}",
            format_ratio(run["modelled_ratio"]),
        )
    return table


def list_bytes_by_round(runs: Sequence[Record]) -> list[str]:
    """A line for each row whose rounds send different numbers of bytes."""
    lines = []
    for run in runs:
        sent_bytes = run["sent_bytes_by_round"]
        nic_bytes = run["nic_bytes_by_round"] or {}
        if len(set(sent_bytes.values())) > 1:
            rounds = ", ".join(
                f"{round_}: {size / MEGA:.2f}"
                + (f" ({nic_bytes[round_] / MEGA:.2f} on NIC)" if nic_bytes else "")
                for round_, size in sent_bytes.items()
            )
            lines.append(f"{name_row(run)}: MB sent from step {rounds}")
    return lines


def make_legend(configuration: Record) -> str:
    """Text below the table: the meaning of its columns, and the parts of the lower bounds."""
    seconds = format_spread(configuration, "computation_seconds")
    examples = configuration["examples_per_host"]
    all_links = configuration["goodput_all_links"] / MEGA
    one_link = configuration["goodput_one_link"] / MEGA
    return (
        f"computation without exchange {seconds} s ({examples} examples per host)\n"
        f"plain TCP stream {all_links:.3g} MB/s on all links at once, {one_link:.3g} on one\n"
        "seconds: median of the slowest host (async: mean over hosts and iterations), 10-90 %\n"
        "MB: of the host that sends most\n"
        "sum: computation + bytes / faster stream; max: the larger of the two\n"
        "x bound: seconds / sum; seconds / max with *, where the exchange can overlap\n"
        "x model: seconds / those of the cost model, with the processor time measured here"
    )


def format_ratio(modelled_ratio: float | None) -> str:
    """Measured over modelled seconds; - of what is not modelled.

    >>> format_ratio(0.8), format_ratio(None)
    ('1.25', '-')
    """
    return "-" if modelled_ratio is None else f"{1 / modelled_ratio:.2f}"


def format_spread(record: Record, name: str) -> str:
    """A median with its quantiles 0.1 and 0.9."""
    return f"{record[name]:.3f} [{record[f'{name}_p10']:.2f}-{record[f'{name}_p90']:.2f}]"


def name_link(record: Record) -> str:
    """Name of the links of a configuration or run."""
    return record["bandwidth"] or "loopback"


def name_row(run: Record) -> str:
    """Name of a row in plots."""
    return run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else "")


def select_runs(runs: Sequence[Record], configuration: Record) -> list[Record]:
    """The runs of one configuration."""
    fields = ("hosts", "bandwidth")
    return [run for run in runs if all(run[name] == configuration[name] for name in fields)]


def plot_rows(configurations: Sequence[Record], runs: Sequence[Record], path: Path) -> None:
    """Plots the seconds of every row and its lower bound, a panel per configuration, as a PNG."""
    rows = list(dict.fromkeys(name_row(run) for run in runs))
    height = 1.2 + (0.9 + 0.24 * len(rows)) * len(configurations)
    figure = Figure((8, height), dpi=120, layout="constrained")
    figure.suptitle("Time per iteration, and its lower bound")
    panels = figure.subplots(len(configurations), 1, squeeze=False)[:, 0]
    for axes, configuration in zip(panels, configurations, strict=True):
        _draw_bars(axes, configuration, select_runs(runs, configuration))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)


def _draw_bars(axes: Axes, configuration: Record, runs: Sequence[Record]) -> None:
    seconds = [run["seconds"] for run in runs]
    spread = [
        [max(0.0, run["seconds"] - run["seconds_p10"]) for run in runs],
        [max(0.0, run["seconds_p90"] - run["seconds"]) for run in runs],
    ]
    positions = range(len(runs))
    axes.barh(positions, seconds, xerr=spread, color=COLORS[0], label="measured (10-90 %)")
    limits = [run["limit_seconds"] for run in runs]
    axes.plot(
        limits, positions, "|", color="black", markersize=12, markeredgewidth=2, label="lower bound"
    )
    axes.axvline(
        configuration["computation_seconds"], color=COLORS[1], linestyle=":", label="computation"
    )
    axes.set_yticks(positions, [name_row(run) for run in runs], fontsize="small")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.set(title=f"{configuration['hosts']} hosts, {name_link(configuration)}")
    axes.set_xlabel("seconds per iteration (median of the slowest host; async: mean)")


def plot_over(
    configurations: Sequence[Record], runs: Sequence[Record], path: Path, title: str, axis: Axis
) -> None:
    """Plots the seconds per iteration over `axis`, a line per row, as a PNG."""
    titles = list(dict.fromkeys(map(axis.panel, configurations)))
    rows = list(dict.fromkeys(name_row(run) for run in runs))
    height = 5 + 0.2 * -(-(len(rows) + 1) // 2)
    figure = Figure((2 + 5 * len(titles), height), dpi=120, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    panels[0].set_ylabel("seconds per iteration (median; async: mean; 10-90 %)")
    for axes, panel_title in zip(panels, titles, strict=True):
        shown = [c for c in configurations if axis.panel(c) == panel_title]
        _draw_lines(axes, sorted(shown, key=axis.value), runs, axis)
        axes.set(title=panel_title)
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small"
    )
    figure.savefig(path)


def _draw_lines(
    axes: Axes, configurations: Sequence[Record], runs: Sequence[Record], axis: Axis
) -> None:
    algorithms = list(dict.fromkeys(run["algorithm"] for run in runs))
    lines: dict[str, list[tuple[float, Record]]] = {name_row(run): [] for run in runs}
    for configuration in configurations:
        for run in select_runs(runs, configuration):
            lines[name_row(run)].append((axis.value(configuration), run))
    for row, points in lines.items():
        if points:
            _draw_line(axes, row, points, algorithms.index(points[0][1]["algorithm"]))
    xs = [axis.value(configuration) for configuration in configurations]
    computation = [configuration["computation_seconds"] for configuration in configurations]
    axes.plot(xs, computation, ":", color="black", label="computation")
    axes.set(xlabel=axis.label, xscale="log")
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_line(axes: Axes, row: str, points: Sequence[tuple[float, Record]], index: int) -> None:
    xs = [x for x, _ in points]
    color = COLORS[index % len(COLORS)]
    low = [run["seconds_p10"] for _, run in points]
    high = [run["seconds_p90"] for _, run in points]
    axes.fill_between(xs, low, high, alpha=0.15, linewidth=0, color=color)
    axes.plot(
        xs,
        [run["seconds"] for _, run in points],
        label=row,
        color=color,
        marker=MARKERS[index % len(MARKERS)],
        linestyle=LINE_STYLES.get(points[0][1]["wire"], SPARSE_STYLE),
        markersize=4,
        linewidth=1.2,
    )


OVER_HOSTS = Axis("hosts", lambda configuration: configuration["hosts"], name_link)
OVER_BANDWIDTH = Axis(
    "bandwidth of every link (Mbit/s)",
    lambda configuration: configuration["bits_per_second"] / MEGA,
    lambda configuration: f"{configuration['hosts']} hosts",
)


def make_straggler_table(runs: Sequence[Record]) -> Table:
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
        for run in select_records(runs, "slowness", name):
            table.add_row(
                name,
                run["algorithm"],
                f"{run['examples_per_second']:,.0f}",
                format_factor(run["ratio_to_none"]),
                format_factor(run["ratio_to_ideal"]),
                format_factor(run["ratio_to_limit"]),
                format_factor(1 / run["modelled_ratio"] if run["modelled_ratio"] else None),
                f"{run['steps_min']}",
                f"{run['steps_median']:g}",
                f"{run['loss']:.3f}",
            )
        table.add_section()
    return table


def format_factor(ratio: float | None) -> str:
    """A ratio in a table; - without one."""
    return "-" if ratio is None else f"{ratio:.3f}"


def list_names(records: Sequence[Record], field: str) -> list[str]:
    """The different values of a field, in order."""
    return list(dict.fromkeys(record[field] for record in records))


def select_records(records: Sequence[Record], field: str, name: str) -> list[Record]:
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
                for line in select_records(lines, "slowness", name)
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


def write_report(folder: Path, console: Console) -> None:
    """Reads the files of a measurement, prints its tables and writes its plots into its folder.

    Of `wire` they are `seconds_per_iteration.png`; for several numbers of hosts
    `time_over_hosts.png` (as in Figure 1 of "Stochastic Gradient Push for Distributed Deep
    Learning", arXiv:1811.10792); and for several bandwidths `time_over_bandwidth.png` (as in Figure
    2 of "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv:1705.09056). Of
    `stragglers` it is `loss_over_seconds.png`.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is not JSON or of another program.
    """
    summary = json.loads((folder / "summary.json").read_text())
    runs = summary["runs"]
    if "configurations" in summary:
        report_rows(folder, summary, console)
    elif runs and "slowness" in runs[0]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        title = f"{runs[0]['nodes']} nodes, computation {runs[0]['compute_seconds']:g} s"
        plot_losses(lines, title, folder / "loss_over_seconds.png")
        console.print(make_straggler_table(runs))
    else:
        raise ValueError(
            f"{folder} must hold a run of experiments.speed wire or stragglers, got another one."
        )


def report_rows(folder: Path, summary: Record, console: Console) -> None:
    """Prints the tables of the rows and writes their plots."""
    configurations = summary["configurations"]
    runs = summary["runs"]
    plot_rows(configurations, runs, folder / "seconds_per_iteration.png")
    if len({configuration["hosts"] for configuration in configurations}) > 1:
        path = folder / "time_over_hosts.png"
        plot_over(configurations, runs, path, "Time per iteration over hosts", OVER_HOSTS)
    if len({configuration["bandwidth"] for configuration in configurations}) > 1:
        path = folder / "time_over_bandwidth.png"
        plot_over(configurations, runs, path, "Time per iteration over bandwidth", OVER_BANDWIDTH)
    for configuration in configurations:
        selected = select_runs(runs, configuration)
        console.print(make_table(configuration, selected))
        console.print("\n".join([make_legend(configuration), *list_bytes_by_round(selected)]))
    for nodes, reasons in summary["left_out"].items():
        for name, reason in reasons.items():
            console.print(f"left out ({nodes}): {name}: {reason}", soft_wrap=True)


def main(out: tyro.conf.Positional[Path]) -> None:
    """Prints the tables and writes the plots of a finished measurement again.

    Args:
      out: the folder that the measurement wrote (its --out).
    """
    with exit_on_error():
        write_report(out, Console())


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.speed.wire.report")
