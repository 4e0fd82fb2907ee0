"""Makes tables and plots of an experiment from the files that a program wrote into its folder.

    python -m experiments.plots OUT

Each line of `metrics.jsonl` is a JSON object with `run` (its name in `summary.json`), `step`
(updates per node), `epoch`, `seconds` (training time without compilation and evaluation), and

- in a training line `loss` (mean over the nodes and over the steps since the last training line),
  `learning_rate`, `examples_per_second` (of all nodes together), and two consensus distances of the
  last step (means over the nodes). `consensus_distance_before_mixing` compares the models after the
  local half of the step, and `consensus_distance` the models after the exchange. Both kinds of
  models contain the newest gradient: for D-PSGD as published they are `x + u` and `P x + u`.
- in an evaluation line `test_METRIC_average_model`, for example `test_accuracy_average_model`, and
  with `--evaluate-nodes` also `test_METRIC_nodes` (a list with a number per node).

`summary.json` contains `options`, `environment` (versions, devices, sizes of the data set) and
`runs`, a list of objects with

- `run`, `algorithm`, `topology`, `nodes`, `steps`, `seed`;
- `seconds_per_step` (median over the training lines) and `examples_per_second` (from this median);
- `input_wait` (the part of the training time since the last resume in which the devices only waited
  for input);
- `sent_bytes_per_step` and `gradients_per_node` (of a whole run), `spectral_gap` (of the schedule
  per step; null if it is not known), and with `--sharpness` the `sharpness` of the average model;
- `final_loss` (of the last training line), the two consensus distances, and
  `consensus_distance_by_layer` (an object with the mean over the nodes for the path of each array);
- `test_METRIC_average_model` and `test_METRIC_nodes` (a list with a number per node; null if only
  the average model has the metric). A metric of the validation set is `valid_METRIC`, without
  `test_`.

Accuracies are fractions in the files, and percentages in tables and plots. The table leaves out a
loss if it shows the perplexity, and a metric of the validation set if it shows the metric of the
test set.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.program import exit_on_error
from experiments.results import (
    AFTER_MIXING,
    BEFORE_MIXING,
    LOSS,
    Curves,
    Record,
    describe_orders,
    find_metrics,
    group_by_label,
    metric_fields,
    read_runs,
)

AXIS_LABELS = {
    "step": "step (updates per node)",
    "epoch": "epoch",
    "seconds": "training time (seconds)",
}
# Ten colors that color-blind readers can tell apart; from the eleventh curve on, markers help.
COLORS = matplotlib.color_sequences["petroff10"]
MARKERS = ("", "o", "s", "^", "x", "v")
# Part of a method's name, in lower case without hyphens -> the number of its color in all figures.
# The first that fits counts.
METHOD_COLORS = {
    **{"biased": 6, "osgp": 4, "2p/1p": 9, "ar/1p": 8, "2psgp": 7, "every": 7},
    **{"quasiglobal": 6, "relaysgd on a binary": 4, "relay": 9, "d2": 8},
    **{"randpsgd": 7, "d1dpsgd": 8, "adpsgd": 3, "dpsgd": 1},
    **{"local": 5, "diloco": 5, "one peer": 2, "sgp": 2, "allreduce": 0, "all to all": 0},
}


class Column(NamedTuple):
    """A column of numbers. The table shows the mean of `scale * reduce(run[field])` over runs."""

    header: str
    number_format: str
    field: str
    reduce: Callable[[Any], Any] = float
    scale: float = 1

    def value(self, run: Record) -> float:
        return self.scale * float(self.reduce(run[self.field]))


def _make_metric_columns(metric: str, runs: Sequence[Record]) -> list[Column]:
    average, nodes = metric_fields(metric)
    name = metric.replace("_", "\n").replace("bleu", "BLEU")
    average_column = Column(f"{name}:\naverage\nmodel", "{:.4g}", average)
    if any(run[nodes] is None for run in runs):
        return [average_column]
    if metric == "accuracy":
        return [
            Column("average\nmodel %", "{:.2f}", average, scale=100),
            Column("mean\nnode %", "{:.2f}", nodes, np.mean, scale=100),
            Column("worst\nnode %", "{:.2f}", nodes, min, scale=100),
        ]
    # It is not known here whether a small number is good, so there is no worst node.
    return [
        average_column,
        Column("mean\nof\nnodes", "{:.4g}", nodes, np.mean),
        Column("max -\nmin of\nnodes", "{:.2g}", nodes, np.ptp),
    ]


def make_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the `runs` of `summary.json`: a row per algorithm, topology and node count.

    Each number is the mean over the seeds, above ± the standard deviation (divisor: seeds - 1).
    """
    groups = group_by_label(runs).values()
    names = find_metrics(runs)
    is_twice = {name.replace("perplexity", "loss") for name in names if "perplexity" in name}
    is_twice |= {f"valid_{name}" for name in names}
    shown = [name for name in names if name not in is_twice]
    columns = [
        *(column for metric in shown for column in _make_metric_columns(metric, runs)),
        Column("consensus\ndistance", "{:.2g}", AFTER_MIXING),
        Column("ms per\nstep", "{:.1f}", "seconds_per_step", scale=1000),
    ]
    seeds = max(len(group) for group in groups)
    captions = [f"± standard deviation over {seeds} seeds."] if seeds > 1 else []
    captions.append(describe_orders(group[0]["algorithm"] for group in groups))
    caption = " ".join(filter(None, captions)) or None
    table = Table(box=SIMPLE_HEAD, padding=0, caption=caption, min_width=64)
    table.add_column("algorithm", no_wrap=True)
    table.add_column("topology")
    for header in ("nodes", *(column.header for column in columns)):
        table.add_column(header, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            group[0]["algorithm"],
            group[0]["topology"].replace("_", " ").replace("/", ", then "),  # lines break at spaces
            f"{group[0]['nodes']}",
            *(_format_mean(column, [column.value(run) for run in group]) for column in columns),
        )
    return table


def _format_mean(column: Column, values: Sequence[float]) -> str:
    mean = column.number_format.format(np.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean}\n±{column.number_format.format(np.std(values, ddof=1))}"


def plot_loss(curves: Curves, path: Path) -> None:
    """Plots the training loss (mean over the nodes) over steps and over seconds, as a PNG."""
    figure = _draw_curves("Training loss", curves, ["step", "seconds"], {LOSS: "-"})
    for axes in figure.axes:
        axes.set(yscale="log", ylabel="loss (mean over the nodes)")
    figure.savefig(path)


def plot_consensus(curves: Curves, path: Path) -> None:
    """Plots the consensus distance over steps, before (dashed) and after mixing, as a PNG.

    A logarithmic axis cannot show zeros (of AllReduce), so the legend says that zeros are left out.
    """
    names = {BEFORE_MIXING: "before", AFTER_MIXING: "after"}
    linestyles = {BEFORE_MIXING: "--", AFTER_MIXING: "-"}
    without_zeros: Curves = {}
    for label, runs in curves.items():
        lines = list(itertools.chain(*runs))
        zeros = [names[f] for f in names if any(line.get(f) == 0 for line in lines)]
        note = f" (zeros {' and '.join(zeros)} mixing not drawn)" if zeros else ""
        # NaN breaks the curve; matplotlib would warn of a curve that has nothing but zeros.
        without_zeros[label + note] = [
            [line | {f: line[f] or math.nan for f in names if f in line} for line in lines_of_run]
            for lines_of_run in runs
        ]
    figure = _draw_curves("Consensus distance", without_zeros, ["step"], linestyles)
    (axes,) = figure.axes
    axes.set(yscale="log", ylabel="Euclidean distance to the average (mean over nodes)")
    for field, linestyle in linestyles.items():
        axes.plot([], [], color="black", linestyle=linestyle, label=f"{names[field]} mixing")
    axes.legend()
    figure.savefig(path)


def plot_metric(curves: Curves, metric: str, path: Path) -> None:
    """Plots a test metric of the average model over epochs and over seconds, as a PNG."""
    field, _ = metric_fields(metric)
    label = field.removesuffix("_average_model").replace("_", " ")
    data_set = "validation" if metric.startswith("valid_") else "test"
    title = f"Average model, {data_set} set"
    figure = _draw_curves(title, curves, ["epoch", "seconds"], {field: "-"})
    for axes in figure.axes:
        axes.set_ylabel(label)
        if metric == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=None))
            axes.set_ylabel("test accuracy (%)")
    figure.savefig(path)


def find_color(method: str) -> int | None:
    """Returns the number of a method's color in all figures; None for an unknown method.

    >>> [find_color(name) for name in ("AD-PSGD", "D-PSGD on the ring", "sgp, ring, 8 nodes", "x")]
    [3, 1, 2, None]
    """
    name = method.lower().replace("-", "")
    return next((color for part, color in METHOD_COLORS.items() if part in name), None)


def choose_looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the look of each curve of a figure by its name.

    The first variant of a method gets the method's own color. All others get colors that are left,
    and when all colors are used, markers.
    """
    numbers: dict[str, int] = {}
    for name in names:
        color = find_color(name)
        if color is not None and color not in numbers.values():
            numbers[name] = color
    left = [number for number in range(len(COLORS)) if number not in numbers.values()]
    others = itertools.chain(left, itertools.count(len(COLORS)))
    numbers |= zip((name for name in names if name not in numbers), others, strict=False)
    looks = {}
    for name in names:
        cycle, color = divmod(numbers[name], len(COLORS))
        look = {"color": COLORS[color], "marker": MARKERS[cycle % len(MARKERS)]}
        looks[name] = look | {"markevery": 0.1, "markersize": 4, "linewidth": 1.2}
    return looks


def choose_colors(names: Sequence[str]) -> dict[str, Any]:
    """Returns the colors of `choose_looks`."""
    return {name: look["color"] for name, look in choose_looks(names).items()}


def _draw_curves(
    title: str, curves: Curves, xs: Sequence[str], linestyles: dict[str, str]
) -> Figure:
    """Draws a panel for each x, a line for each run and field, and a legend of the labels."""
    height = 4.5 + 0.2 * math.ceil(len(curves) / len(xs))
    figure = Figure((2 + 5 * len(xs), height), dpi=120, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(xs), squeeze=False)[0]
    for axes, x in zip(panels, xs, strict=True):
        axes.set_xlabel(AXIS_LABELS[x])
        axes.grid(alpha=0.3)
    handles = []
    looks = choose_looks(list(curves))
    for label, runs in curves.items():
        look = looks[label]
        handles.append(Line2D([], [], label=label, **look))
        for (axes, x), lines in itertools.product(zip(panels, xs, strict=True), runs):
            for field, linestyle in linestyles.items():
                points = [(line[x], line[field]) for line in lines if field in line]
                _draw_line(axes, points, linestyle, look)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(xs), fontsize="small")
    return figure


def _draw_line(axes: Axes, points: list[Any], linestyle: str, look: dict[str, Any]) -> None:
    if not np.isfinite([y for _, y in points]).any():
        return  # matplotlib fails to place markers on a curve without a point
    if len(points) == 1:
        look = look | {"marker": "o", "markevery": 1}
    axes.plot(*np.reshape(points, (-1, 2)).T, linestyle=linestyle, **look)


def write_report(folder: Path, console: Console) -> None:
    """Prints the table of a folder and writes its plots; raises as `read_runs` does.

    The plots are `loss.png`, `consensus.png`, and a `test_METRIC.png` or `valid_METRIC.png` each.
    """
    runs, curves = read_runs(folder)
    plot_loss(curves, folder / "loss.png")
    plot_consensus(curves, folder / "consensus.png")
    lines = [line for group in curves.values() for lines in group for line in lines]
    for metric in find_metrics(lines):
        name = metric_fields(metric)[0].removesuffix("_average_model")
        plot_metric(curves, metric, folder / f"{name}.png")
    console.print(make_table(runs))


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes the table and the plots of an experiment again from the files in its folder.

    Args:
        out: the folder that the experiment wrote (its --out).
    """
    with exit_on_error():
        write_report(out, Console())


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.plots")
