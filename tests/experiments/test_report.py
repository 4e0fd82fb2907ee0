"""Tables and plots from the files of a run: what they show, and what is said of broken files."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation
from rich.console import Console
from rich.table import Table

from experiments import report

Record = dict[str, Any]


def a_run(algorithm: str, topology: str, seed: int, **fields: object) -> Record:
    return {
        "run": f"{algorithm}-{topology}-{seed}",
        "algorithm": algorithm,
        "topology": topology,
        "nodes": 4,
        "steps": 20,
        "seed": seed,
        "seconds_per_step": 0.0125,
        "examples_per_second": 12345.6,
        "test_accuracy_average_model": 0.975,
        "test_accuracy_nodes": [0.97, 0.96, 0.98, 0.95],
        "consensus_distance": 0.0123,
        "consensus_distance_before_mixing": 0.03,
        "final_loss": 0.1,
        **fields,
    }


def lines_of(run: Record, distance: float = 1.0, evaluations: bool = True) -> list[Record]:
    training = [
        {
            "run": run["run"],
            "step": step,
            "epoch": step / 10,
            "seconds": step / 5,
            "loss": 2.0 / (step + 1),
            "consensus_distance_before_mixing": 2 * distance,
            "consensus_distance": distance,
            "examples_per_second": 1e4,
            "rate": 0.1,
        }
        for step in range(0, 20, 5)
    ]
    shared = {"run": run["run"], "step": 10, "epoch": 1.0, "seconds": 2.0}
    return training + [shared | {"test_accuracy_average_model": 0.5}] * evaluations


def write(folder: Path, runs: list[Record], lines: list[Record]) -> Path:
    (folder / "summary.json").write_text(json.dumps({"options": {}, "runs": runs}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


RUNS = [a_run("allreduce", "complete", 0), a_run("sgp", "ring", 0), a_run("sgp", "ring", 1)]
LINES = [line for run in RUNS for line in lines_of(run, 0.0 if run is RUNS[0] else 1.0)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, RUNS, LINES)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, in order; saving goes on."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, path: Path) -> None:
        saved.append(self)
        save(self, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def legend_of(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def curves(axes: Axes) -> list[tuple[str, str, list[float]]]:
    """Colour, style and heights of what was drawn with data."""
    heights = [np.asarray(line.get_ydata(), float).tolist() for line in axes.lines]
    return [
        (to_hex(line.get_color()), str(line.get_linestyle()), ys)
        for line, ys in zip(axes.lines, heights, strict=True)
        if ys
    ]


def text_of(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_of_one_seed() -> None:
    (row,) = (line for line in text_of(report.table(RUNS[:1]), 100).splitlines() if "allr" in line)
    assert row.split() == [
        *("allreduce", "complete", "4", "97.50", "96.50", "95.00", "0.012", "12.5")
    ]


def test_table_of_several_seeds_shows_mean_and_deviation() -> None:
    seeds = [
        a_run(
            "sgp",
            "one_peer_exponential",
            seed,
            test_accuracy_average_model=0.96 + 0.01 * seed,
            test_accuracy_nodes=[0.90 + 0.02 * seed, 0.94 + 0.02 * seed],
            consensus_distance=0.01 * (seed + 1),
            seconds_per_step=0.010 + 0.002 * seed,
            examples_per_second=1000 * (seed + 1),
        )
        for seed in range(3)
    ]
    text = text_of(report.table([*seeds, a_run("allreduce", "complete", 0)]), 100)
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "sgp" in line)
    assert lines[at].split()[4:] == ["4", "97.00", "94.00", "92.00", "0.02", "12.0"]
    assert lines[at + 1].split() == ["±1.00", "±2.00", "±2.00", "±0.01", "±2.0"]
    for header in ("algorithm", "topology", "nodes", "average", "worst", "ms"):
        assert header in text


def test_table_keeps_its_numbers_in_a_narrow_terminal() -> None:
    text = text_of(report.table([a_run("allreduce", "one_peer_exponential", 0)]), 80)
    assert max(map(len, text.splitlines())) <= 80
    for number in ("97.50", "96.50", "95.00", "0.012", "12.5"):
        assert number in text


def test_table_has_a_row_per_number_of_nodes() -> None:
    table = report.table([a_run("sgp", "ring", 0), a_run("sgp", "ring", 1, nodes=8)])
    assert table.row_count == 2


def test_write_report_makes_table_and_plots(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    report.write_report(folder, console)
    assert isinstance(console.file, io.StringIO)
    assert "sgp" in console.file.getvalue()
    for plot in ("loss.png", "consensus.png", "accuracy.png"):
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")


def test_without_evaluations_there_is_no_accuracy_plot(tmp_path: Path) -> None:
    write(tmp_path, RUNS[:1], lines_of(RUNS[0], evaluations=False))
    report.write_report(tmp_path, Console(file=io.StringIO()))
    assert not (tmp_path / "accuracy.png").exists()
    assert (tmp_path / "loss.png").exists()


def test_loss_over_steps_and_over_seconds(folder: Path, figures: list[Figure]) -> None:
    report.plot_loss(report.read(folder)[1], folder / "plot.png")
    (figure,) = figures
    assert figure.get_suptitle().strip() == "Training loss"
    assert legend_of(figure) == ["allreduce, complete, 4 nodes", "sgp, ring, 4 nodes"]
    steps, seconds = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "step (updates per node)",
        "training time (seconds)",
    ]
    assert {axes.get_ylabel() for axes in figure.axes} == {"loss (mean over the nodes)"}
    np.testing.assert_array_equal(steps.lines[0].get_xdata(), [0, 5, 10, 15])
    np.testing.assert_array_equal(seconds.lines[0].get_xdata(), [0, 1, 2, 3])
    allreduce, first, second = curves(steps)
    assert allreduce[2] == [2 / 1, 2 / 6, 2 / 11, 2 / 16]
    assert first[0] == second[0] != allreduce[0]  # seeds share a colour


def test_consensus_before_and_after_with_zeros_said(folder: Path, figures: list[Figure]) -> None:
    report.plot_consensus(report.read(folder)[1], folder / "plot.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert "distance" in axes.get_ylabel()
    assert legend_of(figure) == [
        "allreduce, complete, 4 nodes (zeros before and after mixing not drawn)",
        "sgp, ring, 4 nodes",
    ]
    styles = axes.get_legend()
    assert isinstance(styles, Legend)
    assert [text.get_text() for text in styles.get_texts()] == ["before mixing", "after mixing"]
    assert [(style, set(heights)) for _, style, heights in curves(axes)] == [
        ("--", {2}),
        ("-", {1}),
    ] * 2


def test_consensus_of_which_some_is_zero(tmp_path: Path, figures: list[Figure]) -> None:
    lines = lines_of(RUNS[1])
    lines[0]["consensus_distance"] = 0.0
    _, metrics = report.read(write(tmp_path, RUNS[1:2], lines))
    report.plot_consensus(metrics, tmp_path / "plot.png")
    assert legend_of(figures[0]) == ["sgp, ring, 4 nodes (zeros after mixing not drawn)"]
    np.testing.assert_array_equal(curves(figures[0].axes[0])[1][2], [np.nan, 1, 1, 1])


def test_consensus_of_nothing_but_zeros(tmp_path: Path) -> None:
    _, metrics = report.read(write(tmp_path, RUNS[:1], lines_of(RUNS[0], 0.0)))
    report.plot_consensus(metrics, tmp_path / "plot.png")  # a warning would be an error
    assert (tmp_path / "plot.png").exists()


def test_accuracy_in_percent(folder: Path, figures: list[Figure]) -> None:
    report.plot_accuracy(report.read(folder)[1], folder / "plot.png")
    (figure,) = figures
    epochs, seconds = figure.axes
    assert (epochs.get_xlabel(), seconds.get_xlabel()) == ("epoch", "training time (seconds)")
    assert epochs.get_ylabel() == "test accuracy (%)"
    assert epochs.yaxis.get_major_formatter()(0.5, 0).startswith("50")
    assert [heights for _, _, heights in curves(epochs)] == [[0.5]] * 3


def test_many_curves_are_told_apart(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [a_run("sgp", f"topology{number}", 0) for number in range(24)]
    lines = [line for run in runs for line in lines_of(run)]
    report.plot_loss(report.read(write(tmp_path, runs, lines))[1], tmp_path / "plot.png")
    looks = {(to_hex(c.get_color()), c.get_marker()) for c in figures[0].axes[0].lines}
    assert len(looks) == 24


def one_peer(nodes: int, hop: int) -> np.ndarray:
    """Node j sends to node j + hop, weights 1/2."""
    return (np.eye(nodes) + np.roll(np.eye(nodes), hop, axis=0)) / 2


def arrows(axes: Axes) -> set[tuple[int, int]]:
    """The (sender, receiver) pairs, found by the places of the node numbers."""
    numbers = {t.get_text(): t.get_position() for t in axes.texts if t.get_text()}
    points = np.array([numbers[f"{node}"] for node in range(len(numbers))]) / 1.14

    def node_at(xy: Any) -> int:
        distances = np.linalg.norm(points - np.asarray(xy), axis=1)
        assert distances.min() < 1e-6
        return int(distances.argmin())

    pairs = [
        (node_at(text.xyann), node_at(text.xy))
        for text in axes.texts
        if isinstance(text, Annotation)
    ]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def test_topology_draws_an_arrow_from_sender_to_receiver(
    tmp_path: Path, figures: list[Figure]
) -> None:
    matrices = np.stack([one_peer(8, hop) for hop in (1, 2, 4)])
    report.plot_topology(matrices, "one-peer exponential, 8 nodes", tmp_path / "plot.png")
    (figure,) = figures
    assert figure.get_suptitle().strip() == "one-peer exponential, 8 nodes"
    assert [axes.get_title() for axes in figure.axes] == ["round 0", "round 1", "round 2"]
    for axes, hop in zip(figure.axes, (1, 2, 4), strict=True):
        assert arrows(axes) == {(j, (j + hop) % 8) for j in range(8)}
    assert figure.get_supxlabel() == (
        "arrow from j to i: i gives weight 1/2 to what j sends\nand 1/2 to its own"
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_topology_shows_the_first_eight_rounds(tmp_path: Path, figures: list[Figure]) -> None:
    matrices = np.stack([one_peer(10, hop) for hop in range(1, 10)])
    report.plot_topology(matrices, "cycle", tmp_path / "plot.png")
    assert figures[0].get_suptitle().strip() == "cycle (first 8 of 9 rounds)"
    assert len(figures[0].axes) == 8


def test_topology_of_unequal_weights_and_idle_nodes(tmp_path: Path, figures: list[Figure]) -> None:
    matrix = np.array([[[1 / 2, 0, 0], [1 / 4, 1, 1 / 3], [1 / 4, 0, 2 / 3]]])
    report.plot_topology(matrix, "from matrices", tmp_path / "plot.png")
    assert arrows(figures[0].axes[0]) == {(0, 1), (0, 2), (2, 1)}
    assert figures[0].get_supxlabel() == (
        "arrow from j to i: i gives weight 1/4 to 1/3 to what j sends\nand 1/2 to 1 to its own"
    )


@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_topology_without_arrows(tmp_path: Path, figures: list[Figure], nodes: int) -> None:
    report.plot_topology(np.eye(nodes)[np.newaxis], "identity", tmp_path / "plot.png")
    assert not arrows(figures[0].axes[0])
    assert figures[0].get_supxlabel() == "no node sends"


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4), (0, 4, 4)])
def test_topology_refuses_other_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"and not \[T, N, N\]"):
        report.plot_topology(np.zeros(shape), "wrong", tmp_path / "plot.png")


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {file} in .*{folder.name}"):
        report.read(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"in .*nowhere"):
        report.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ("{", "summary.json is not JSON"),
        ("[]", "summary.json is not a JSON object"),
        ("{}", "summary.json lacks runs"),
        ('{"runs": []}', "summary.json lists no run"),
        ('{"runs": [3]}', r"summary.json, runs\[0\] is not a JSON object"),
        (
            json.dumps({"runs": [RUNS[0], {"run": "x", "nodes": 4, "algorithm": "sgp"}]}),
            r"summary.json, runs\[1\] lacks consensus_distance, examples_per_second, ",
        ),
    ],
)
def test_a_malformed_summary_is_described(folder: Path, summary: str, message: str) -> None:
    (folder / "summary.json").write_text(summary)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"{folder.name}.{message}"):
        report.read(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"run": "sgp-ring-0", "st', "line 2 is not JSON"),
        ("", "line 2 is not JSON"),
        ("7", "line 2 is not a JSON object"),
        ('{"run": "sgp-ring-0"}', "line 2 lacks epoch, seconds, step"),
        (
            json.dumps({"run": "sgp-ring-0", "step": 1, "epoch": 1, "seconds": 1, "loss": 1}),
            "line 2 lacks consensus_distance, consensus_distance_before_mixing",
        ),
    ],
)
def test_a_malformed_line_is_described(folder: Path, line: str, message: str) -> None:
    (folder / "metrics.jsonl").write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(ValueError, match=f"{folder.name}.metrics.jsonl, {message}"):
        report.read(folder)


def test_a_run_that_was_broken_off_is_left_out(folder: Path) -> None:
    write(folder, RUNS[:2], LINES)
    runs, metrics = report.read(folder)
    assert [run["run"] for run in runs] == ["allreduce-complete-0", "sgp-ring-0"]
    assert metrics == {
        "allreduce, complete, 4 nodes": [LINES[:5]],
        "sgp, ring, 4 nodes": [LINES[5:10]],
    }


def test_a_run_without_training_lines_is_named(folder: Path) -> None:
    kept = [line for line in LINES if line["run"] != "sgp-ring-1" or "loss" not in line]
    write(folder, RUNS, kept)
    with pytest.raises(ValueError, match="no training line of run 'sgp-ring-1'"):
        report.read(folder)


def test_program_makes_the_plots_again(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.report", str(folder)],
        cwd=Path(report.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sgp" in done.stdout
    assert (folder / "loss.png").exists()


def test_program_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no summary\.json in "):
        tyro.cli(report.main, args=[str(tmp_path)])
