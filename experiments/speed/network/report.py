"""Tables and plots of the network measurement, made from the `summary.json` that it wrote.

python -m experiments.speed.network.report OUT
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


def write_report(folder: Path, console: Console) -> None:
    """Reads a run's `summary.json`, prints its tables and writes its plots into the same folder.

    The plots are `seconds_per_iteration.png`; for several numbers of hosts `time_over_hosts.png`
    (as in Figure 1 of "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792);
    and for several bandwidths `time_over_bandwidth.png` (as in Figure 2 of "Can Decentralized
    Algorithms Outperform Centralized Algorithms?", arXiv:1705.09056).

    Raises:
      FileNotFoundError: if the file is missing.
      ValueError: if the file is not JSON or of another program.
    """
    summary = json.loads((folder / "summary.json").read_text())
    if "configurations" not in summary:
        raise ValueError(f"{folder} must hold a run of experiments.speed network, got another one.")
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
    """Prints the tables and writes the plots of a finished network measurement again.

    Args:
      out: the folder that the measurement wrote (its --out).
    """
    with exit_on_error():
        write_report(out, Console())


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.speed.network.report")
