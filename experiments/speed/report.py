"""Tables and plots of the network measurement, made from the `summary.json` that it wrote.

python -m experiments.speed_report OUT
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.report import COLOURS

Record = dict[str, Any]

MARKS = "os^xvD*P<"
DASHES = {"float32": "-", "bfloat16": "--"}
MEGA = 1e6


def table(configuration: Record, runs: Sequence[Record]) -> Table:
    """The rows of one number of hosts and bandwidth."""
    result = Table(
        title=f"{configuration['hosts']} hosts, {_link(configuration)}, "
        f"{4 * configuration['parameters'] / MEGA:.3g} MB of parameters",
        box=SIMPLE_HEAD,
        padding=0,
        min_width=72,
    )
    result.add_column("algorithm")
    result.add_column("wire", no_wrap=True)
    for header in (
        "seconds per\niteration",
        "less com-\nputation",
        "MB\nsent",
        "MB\ncounted",
        "limit\n(s)",
        "ratio",
    ):
        result.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        counted = run["counted_bytes"]
        result.add_row(
            _words(run) + ("*" if run["overlaps"] else ""),
            run["wire"],
            _spread(run, "seconds"),
            f"{run['seconds'] - run['computation_seconds']:.3f}",
            f"{run['sent_bytes'] / MEGA:.2f}",
            "-" if counted is None else f"{counted / MEGA:.2f}",
            f"{run['limit_seconds']:.3f}",
            f"{run['ratio_to_limit']:.2f}",
        )
    return result


def legend(configuration: Record) -> str:
    """What the columns of the table mean, and what the limits are made of."""
    seconds = _spread(configuration, "computation_seconds")
    ring, alone = configuration["goodput_all_links"], configuration["goodput_one_link"]
    return (
        f"computation alone {seconds} s ({configuration['examples_per_host']} examples per host)\n"
        f"plain TCP stream {ring / MEGA:.3g} MB/s on all links at once, {alone / MEGA:.3g} on one\n"
        "seconds: median of the slowest host, 10-90 %; MB: of the host that sends most\n"
        "limit: computation + bytes / faster stream; with *, which overlaps, the larger"
    )


def _words(run: Record) -> str:
    return run["algorithm"].replace("@", " ").replace("_", " ")


def _spread(record: Record, name: str) -> str:
    return f"{record[name]:.3f} [{record[f'{name}_10']:.2f}-{record[f'{name}_90']:.2f}]"


def _link(record: Record) -> str:
    return record["bandwidth"] or "loopback"


def plot_rows(configurations: Sequence[Record], runs: Sequence[Record], path: Path) -> None:
    """A panel per configuration: the seconds of every row, and its limit, as a PNG."""
    names = list(dict.fromkeys(_label(run) for run in runs))
    height = 1.2 + (0.9 + 0.24 * len(names)) * len(configurations)
    figure = Figure((8, height), dpi=120, layout="constrained")
    figure.suptitle("Time per iteration, and the least possible")
    panels = figure.subplots(len(configurations), 1, squeeze=False)[:, 0]
    for axes, configuration in zip(panels, configurations, strict=True):
        own = _of(runs, configuration)
        middle = [run["seconds"] for run in own]
        spread = [
            [run["seconds"] - run["seconds_10"] for run in own],
            [run["seconds_90"] - run["seconds"] for run in own],
        ]
        places = range(len(own))
        axes.barh(places, middle, xerr=spread, color=COLOURS[0], label="measured (10-90 %)")
        limits = [run["limit_seconds"] for run in own]
        axes.plot(limits, places, "|", color="black", markersize=12, markeredgewidth=2)
        axes.plot([], [], "|", color="black", markersize=12, markeredgewidth=2, label="limit")
        alone = configuration["computation_seconds"]
        axes.axvline(alone, color=COLOURS[1], linestyle=":", label="computation alone")
        axes.set_yticks(places, [_label(run) for run in own], fontsize="small")
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        axes.set(title=f"{configuration['hosts']} hosts, {_link(configuration)}")
        axes.set_xlabel("seconds per iteration (median of the slowest host)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)


def plot_over(
    configurations: Sequence[Record],
    runs: Sequence[Record],
    path: Path,
    title: str,
    x: tuple[str, Callable[[Record], float]],
    panel: Callable[[Record], str],
) -> None:
    """Seconds per iteration over `x` (label, and value of a configuration), a line per row."""
    titles = list(dict.fromkeys(map(panel, configurations)))
    names = list(dict.fromkeys(_label(run) for run in runs))
    algorithms = list(dict.fromkeys(run["algorithm"] for run in runs))
    height = 5 + 0.2 * -(-(len(names) + 1) // 2)
    figure = Figure((2 + 5 * len(titles), height), dpi=120, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
    panels[0].set_ylabel("seconds per iteration (median, 10-90 %)")
    for axes, name in zip(panels, titles, strict=True):
        shown = sorted((c for c in configurations if panel(c) == name), key=x[1])
        xs = [x[1](configuration) for configuration in shown]
        for label in names:
            points = [
                (at, run)
                for at, configuration in zip(xs, shown, strict=True)
                for run in _of(runs, configuration)
                if _label(run) == label
            ]
            if not points:
                continue
            at = [value for value, _ in points]
            first = points[0][1]
            kind = algorithms.index(first["algorithm"])
            look: dict[str, Any] = {"color": COLOURS[kind % len(COLOURS)]}
            axes.fill_between(
                at,
                [run["seconds_10"] for _, run in points],
                [run["seconds_90"] for _, run in points],
                alpha=0.15,
                linewidth=0,
                **look,
            )
            look |= {"marker": MARKS[kind % len(MARKS)], "linestyle": DASHES[first["wire"]]}
            middle = [run["seconds"] for _, run in points]
            axes.plot(at, middle, label=label, markersize=4, linewidth=1.2, **look)
        alone = [configuration["computation_seconds"] for configuration in shown]
        axes.plot(xs, alone, ":", color="black", label="computation alone")
        axes.set(title=name, xlabel=x[0], xscale="log")
        axes.set_xticks(xs, [f"{value:g}" for value in xs])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize="small"
    )
    figure.savefig(path)


def _label(run: Record) -> str:
    return run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else "")


def _of(runs: Sequence[Record], configuration: Record) -> list[Record]:
    where = ("hosts", "bandwidth")
    return [run for run in runs if all(run[k] == configuration[k] for k in where)]


def write_report(folder: Path, console: Console) -> None:
    """Reads a run's `summary.json`, prints its tables and writes its plots beside it.

    `seconds_per_iteration.png`, and where there are several of them `time_over_hosts.png` (as
    SGP-19, Figure 1) and `time_over_bandwidth.png` (as DPSGD-17, Figure 2).

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is not JSON, or is of another program.
    """
    summary = json.loads((folder / "summary.json").read_text())
    if "configurations" not in summary:
        raise ValueError(f"{folder} holds no run of experiments.speed network.")
    configurations, runs = summary["configurations"], summary["runs"]
    plot_rows(configurations, runs, folder / "seconds_per_iteration.png")
    if len({configuration["hosts"] for configuration in configurations}) > 1:
        path, hosts = folder / "time_over_hosts.png", ("hosts", lambda c: c["hosts"])
        plot_over(configurations, runs, path, "Time per iteration over hosts", hosts, _link)
    if len({configuration["bandwidth"] for configuration in configurations}) > 1:
        plot_over(
            configurations,
            runs,
            folder / "time_over_bandwidth.png",
            "Time per iteration over bandwidth",
            ("bandwidth of every link (Mbit/s)", lambda c: c["bits_per_second"] / MEGA),
            lambda c: f"{c['hosts']} hosts",
        )
    for configuration in configurations:
        console.print(table(configuration, _of(runs, configuration)))
        console.print(legend(configuration))
    for where, reasons in summary["left_out"].items():
        for name, why in reasons.items():
            console.print(f"left out ({where}): {name}: {why}", soft_wrap=True)


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes the tables and the plots of a network measurement again, from its folder.

    Args:
        out: the folder that the measurement wrote (its --out).
    """
    try:
        write_report(out, Console())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.speed_report")
