"""Tables and plots of experiments, made from the files that a program wrote into its folder.

    python -m experiments.report OUT

`metrics.jsonl` holds one JSON object per line with `run`, `step` (updates per node), `epoch`,
`seconds` (spent in training; compiling and evaluating left out), and either

- `loss` (mean over the nodes and over the steps since the last such line), `rate` (the learning
  rate), `examples_per_second` (of all nodes together), and two consensus distances (means over the
  nodes) of the last step: `consensus_distance_before_mixing`, of the models after their own half of
  the step, without the exchange, and `consensus_distance`, of the models that the nodes hold after
  it (for D-PSGD as published these are `x + u` and `P x + u`, the newest gradient in both); or
- `test_accuracy_average_model`.

`summary.json` holds `options`, `environment` (versions, devices, sizes of the data set) and `runs`,
a list of objects with `run`, `algorithm`, `topology`, `nodes`, `steps`, `seed`, `seconds_per_step`
(median over the lines of `metrics.jsonl`), `examples_per_second` (at that),
`share_outside_the_step` (of that, beside the compiled step by itself: what the input costs),
`final_loss` (of the last line), `consensus_distance_by_layer` (an object: path of the array, mean
over the nodes), `test_accuracy_average_model`, `test_accuracy_nodes` (a list) and the two consensus
distances. Accuracies are fractions in the files, and % in tables and plots.
"""

import itertools
import json
import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]
Metrics = dict[str, list[list[Record]]]
"""What a curve is called (algorithm, topology, nodes) -> the lines of each of its seeds' runs."""

BEFORE, AFTER = "consensus_distance_before_mixing", "consensus_distance"
LOSS, ACCURACY, NODES = "loss", "test_accuracy_average_model", "test_accuracy_nodes"
RUN_FIELDS = {"run", "algorithm", "topology", "nodes", "seconds_per_step", "examples_per_second"}
RUN_FIELDS |= {ACCURACY, NODES, AFTER}
AXIS = {"step": "step (updates per node)", "epoch": "epoch", "seconds": "training time (seconds)"}
# Ten colours that the colour-blind can tell apart; from the eleventh curve on, marks help.
COLOURS = matplotlib.color_sequences["petroff10"]
MARKS = ("", "o", "s", "^", "x", "v")


def read(folder: Path) -> tuple[list[Record], Metrics]:
    """The runs in a folder's `summary.json`, and the lines of `metrics.jsonl` by curve and run.

    Lines of a run that the summary does not list, as it was broken off, are left out.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: a file is not JSON, or lacks a field or a run; the message says where.
    """
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    for file in (summary, metrics):
        if not file.is_file():
            raise FileNotFoundError(f"no {file.name} in {folder}: is it a finished run's folder?")
    runs = _object(summary.read_text(), f"{summary}", {"runs"})["runs"]
    lines: dict[str, list[Record]] = {}
    for index, run in enumerate(runs):
        _require(run, f"{summary}, runs[{index}]", RUN_FIELDS)
        if run["run"] in lines:
            raise ValueError(f"{summary}: two runs are called {run['run']!r}")
        lines[run["run"]] = []
    for number, text in enumerate(metrics.read_text().splitlines(), start=1):
        where = f"{metrics}, line {number}"
        line = _object(text, where, {"run", "step", "epoch", "seconds"})
        if ACCURACY not in line:
            _require(line, where, {LOSS, BEFORE, AFTER})
        lines.get(line["run"], []).append(line)
    if not runs:
        raise ValueError(f"{summary} lists no run")
    for name, own in lines.items():
        if not any(LOSS in line for line in own):
            raise ValueError(f"{metrics} holds no training line of run {name!r}")
    groups = _by_label(runs).items()
    return runs, {label: [lines[run["run"]] for run in group] for label, group in groups}


def _object(text: str, where: str, fields: set[str]) -> Record:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    _require(value, where, fields)
    return value


def _require(value: object, where: str, fields: set[str]) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    if missing := sorted(fields - value.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")


def _by_label(runs: Sequence[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for run in runs:
        label = f"{run['algorithm']}, {run['topology']}, {run['nodes']} nodes"
        groups.setdefault(label, []).append(run)
    return groups


def table(runs: Sequence[Record]) -> Table:
    """The `runs` of `summary.json`, a row per algorithm, topology and number of nodes.

    Shows the mean over the seeds and, below it, ± their standard deviation (divisor: seeds - 1).
    """
    seeds = max(len(group) for group in _by_label(runs).values())
    caption = f"± standard deviation over {seeds} seeds" if seeds > 1 else None
    result = Table(box=SIMPLE_HEAD, padding=0, caption=caption, min_width=64)
    result.add_column("algorithm", no_wrap=True)
    result.add_column("topology")
    for header in ("nodes", "average\nmodel %", "mean\nnode %", "worst\nnode %"):
        result.add_column(header, justify="right", no_wrap=True)
    for header in ("consensus\ndistance", "ms per\nstep"):
        result.add_column(header, justify="right", no_wrap=True)
    for group in _by_label(runs).values():
        result.add_row(
            group[0]["algorithm"],
            group[0]["topology"].replace("_", " ").replace("/", ", then "),  # breaks at words
            f"{group[0]['nodes']}",
            _mean("{:.2f}", [100 * run[ACCURACY] for run in group]),
            _mean("{:.2f}", [100 * np.mean(run[NODES]) for run in group]),
            _mean("{:.2f}", [100 * min(run[NODES]) for run in group]),
            _mean("{:.2g}", [run[AFTER] for run in group]),
            _mean("{:.1f}", [1000 * run["seconds_per_step"] for run in group]),
        )
    return result


def _mean(form: str, values: Sequence[float]) -> str:
    mean = form.format(np.mean(values))
    return mean if len(values) == 1 else f"{mean}\n±{form.format(np.std(values, ddof=1))}"


def plot_loss(metrics: Metrics, path: Path) -> None:
    """Training loss (mean over the nodes) over steps and over seconds, as a PNG."""
    figure = _curves("Training loss", metrics, ["step", "seconds"], {LOSS: "-"})
    for axes in figure.axes:
        axes.set(yscale="log", ylabel="loss (mean over the nodes)")
    figure.savefig(path)


def plot_consensus(metrics: Metrics, path: Path) -> None:
    """Consensus distance over steps, before mixing (dashed) and after it (solid), as a PNG.

    Zeros (as under AllReduce) have no place on the logarithmic axis: the legend says so instead.
    """
    names, styles = {BEFORE: "before", AFTER: "after"}, {BEFORE: "--", AFTER: "-"}
    labelled: Metrics = {}
    for label, runs in metrics.items():
        lines = list(itertools.chain(*runs))
        zeros = [names[f] for f in names if any(line.get(f) == 0 for line in lines)]
        note = f" (zeros {' and '.join(zeros)} mixing not drawn)" if zeros else ""
        # NaN breaks the curve; a 0 would make matplotlib warn where there is nothing else.
        labelled[label + note] = [
            [line | {f: line[f] or math.nan for f in names if f in line} for line in own]
            for own in runs
        ]
    figure = _curves("Consensus distance", labelled, ["step"], styles)
    (axes,) = figure.axes
    axes.set(yscale="log", ylabel="Euclidean distance to the average (mean over nodes)")
    for field, style in styles.items():
        axes.plot([], [], color="black", linestyle=style, label=f"{names[field]} mixing")
    axes.legend()
    figure.savefig(path)


def plot_accuracy(metrics: Metrics, path: Path) -> None:
    """Test accuracy of the average model over epochs and over seconds, as a PNG."""
    figure = _curves("Average model, test set", metrics, ["epoch", "seconds"], {ACCURACY: "-"})
    for axes in figure.axes:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=None))
        axes.set_ylabel("test accuracy (%)")
    figure.savefig(path)


def _curves(title: str, metrics: Metrics, xs: Sequence[str], styles: dict[str, str]) -> Figure:
    """A panel per x, a line per run and field; a colour per label, named below the panels."""
    height = 4.5 + 0.2 * math.ceil(len(metrics) / len(xs))
    figure = Figure((2 + 5 * len(xs), height), dpi=120, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(xs), squeeze=False)[0]
    for axes, x in zip(panels, xs, strict=True):
        axes.set_xlabel(AXIS[x])
        axes.grid(alpha=0.3)
    handles = []
    for index, (label, runs) in enumerate(metrics.items()):
        marks, colour = divmod(index, len(COLOURS))
        look: dict[str, Any] = {"color": COLOURS[colour], "marker": MARKS[marks % len(MARKS)]}
        look |= {"markevery": 0.1, "markersize": 4, "linewidth": 1.2}
        handles.append(Line2D([], [], label=label, **look))
        for (axes, x), lines in itertools.product(zip(panels, xs, strict=True), runs):
            for field, style in styles.items():
                points = [(line[x], line[field]) for line in lines if field in line]
                if not np.isfinite([y for _, y in points]).any():
                    continue  # matplotlib cannot mark what it cannot draw
                dot = {"marker": "o", "markevery": 1} if len(points) == 1 else {}
                axes.plot(*np.reshape(points, (-1, 2)).T, linestyle=style, **(look | dot))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(xs), fontsize="small")
    return figure


def plot_topology(matrices: np.ndarray, title: str, path: Path) -> None:
    """Who sends to whom: the nodes on a circle, one panel per round (the first 8), as a PNG.

    Args:
        matrices: floats `[T, N, N]`; in round t, receiver i gives the weight `matrices[t, i, j]`
            to what sender j sends. Every weight off the diagonal but 0 is an arrow from j to i.
        title: what the topology is called.
        path: the PNG to write.

    Raises:
        ValueError: matrices of another shape.
    """
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or not matrices.size:
        raise ValueError(f"the matrices have shape {list(matrices.shape)}, and not [T, N, N]")
    rounds, nodes, _ = matrices.shape
    panels = min(rounds, 8)
    rows = 1 if panels <= 4 else 2
    columns = math.ceil(panels / rows)
    side = 5 if panels == 1 else 3.4
    figure = Figure((side * columns, side * rows + 1), dpi=120, layout="constrained")
    title = f"{title} (first {panels} of {rounds} rounds)" if rounds > panels else title
    figure.suptitle(f"{title}\n")  # an empty line between it and the panels' titles
    clockwise = np.pi / 2 - 2 * np.pi * np.arange(nodes) / nodes
    points = list(zip(np.cos(clockwise), np.sin(clockwise), strict=True))
    size = 4 if nodes <= 32 else 2
    arrow = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.08", "color": COLOURS[0]}
    arrow |= {"mutation_scale": 3 + size, "shrinkA": size / 2, "shrinkB": size / 2}
    diagonal = np.eye(nodes, dtype=bool)
    for number, matrix in enumerate(matrices[:panels]):
        axes = figure.add_subplot(rows, columns, number + 1, aspect="equal")
        axes.set(title=f"round {number}", xlim=(-1.25, 1.25), ylim=(-1.25, 1.25))
        axes.set_axis_off()
        arrows = np.argwhere(np.where(diagonal, 0, matrix))
        arrow["linewidth"] = min(0.8, 200 / max(1, len(arrows)))  # dense graphs stay readable
        for receiver, sender in arrows:
            axes.annotate("", xy=points[receiver], xytext=points[sender], arrowprops=arrow)
        for node, (x, y) in enumerate(points):
            axes.plot(x, y, "o", color="black", markersize=size, zorder=5)
            axes.text(1.14 * x, 1.14 * y, f"{node}", ha="center", va="center", fontsize="x-small")
    sent, kept = matrices[:, ~diagonal], matrices[:, diagonal]
    caption = "no node sends"
    if sent.any():
        caption = f"arrow from j to i: i gives weight {_weights(sent[sent != 0])} to what j sends\n"
        caption += f"and {_weights(kept)} to its own"
    figure.supxlabel(caption, fontsize="medium")
    figure.savefig(path)


def _weights(weights: np.ndarray) -> str:
    low, high = (Fraction(w).limit_denominator(1000) for w in (weights.min(), weights.max()))
    return f"{low}" if low == high else f"{low} to {high}"


def write_report(folder: Path, console: Console) -> None:
    """Reads a folder (raising as `read` does), prints its table, and writes its plots into it.

    `loss.png`, `consensus.png` and, where models were evaluated along the way, `accuracy.png`.
    """
    runs, metrics = read(folder)
    plot_loss(metrics, folder / "loss.png")
    plot_consensus(metrics, folder / "consensus.png")
    if any(ACCURACY in line for own in metrics.values() for lines in own for line in lines):
        plot_accuracy(metrics, folder / "accuracy.png")
    console.print(table(runs))


def main(out: tyro.conf.Positional[Path]) -> None:
    """Makes the table and the curves of an experiment again, from the files in its folder.

    Args:
        out: the folder that the experiment wrote (its --out).
    """
    try:
        write_report(out, Console())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m experiments.report")
