"""The plots of a report: what they show of the files of a run."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation
from report_files import (
    LINES,
    PERPLEXITY_RUNS,
    RUNS,
    make_lines,
    make_perplexity_lines,
    make_run,
    write_run,
)
from rich.console import Console

from experiments import plots
from experiments.results import read_runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, RUNS, LINES)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in order; saving still writes the file."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(self: Figure, path: Path) -> None:
        saved.append(self)
        save(self, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def legend_texts(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def drawn_curves(axes: Axes) -> list[tuple[str, str, list[float]]]:
    """Color, line style and heights of the lines that have data."""
    heights = [np.asarray(line.get_ydata(), float).tolist() for line in axes.lines]
    return [
        (to_hex(line.get_color()), str(line.get_linestyle()), ys)
        for line, ys in zip(axes.lines, heights, strict=True)
        if ys
    ]


def test_loss_over_steps_and_over_seconds(folder: Path, figures: list[Figure]) -> None:
    plots.plot_loss(read_runs(folder)[1], folder / "plot.png")
    (figure,) = figures
    assert figure.get_suptitle().strip() == "Training loss"
    assert legend_texts(figure) == ["allreduce, complete, 4 nodes", "sgp, ring, 4 nodes"]
    steps, seconds = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "step (updates per node)",
        "training time (seconds)",
    ]
    assert {axes.get_ylabel() for axes in figure.axes} == {"loss (mean over the nodes)"}
    np.testing.assert_array_equal(steps.lines[0].get_xdata(), [0, 5, 10, 15])
    np.testing.assert_array_equal(seconds.lines[0].get_xdata(), [0, 1, 2, 3])
    allreduce, first, second = drawn_curves(steps)
    assert allreduce[2] == [2 / 1, 2 / 6, 2 / 11, 2 / 16]
    assert first[0] == second[0] != allreduce[0]  # seeds share a color


def test_consensus_before_and_after_with_a_note_on_zeros(
    folder: Path, figures: list[Figure]
) -> None:
    plots.plot_consensus(read_runs(folder)[1], folder / "plot.png")
    (figure,) = figures
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert "distance" in axes.get_ylabel()
    assert legend_texts(figure) == [
        "allreduce, complete, 4 nodes (zeros before and after mixing not drawn)",
        "sgp, ring, 4 nodes",
    ]
    styles = axes.get_legend()
    assert isinstance(styles, Legend)
    assert [text.get_text() for text in styles.get_texts()] == ["before mixing", "after mixing"]
    assert [(style, set(heights)) for _, style, heights in drawn_curves(axes)] == [
        ("--", {2}),
        ("-", {1}),
    ] * 2


def test_consensus_with_some_zeros(tmp_path: Path, figures: list[Figure]) -> None:
    lines = make_lines(RUNS[1])
    lines[0]["consensus_distance"] = 0.0
    _, curves = read_runs(write_run(tmp_path, RUNS[1:2], lines))
    plots.plot_consensus(curves, tmp_path / "plot.png")
    assert legend_texts(figures[0]) == ["sgp, ring, 4 nodes (zeros after mixing not drawn)"]
    np.testing.assert_array_equal(drawn_curves(figures[0].axes[0])[1][2], [np.nan, 1, 1, 1])


def test_consensus_with_only_zeros(tmp_path: Path) -> None:
    _, curves = read_runs(write_run(tmp_path, RUNS[:1], make_lines(RUNS[0], 0.0)))
    plots.plot_consensus(curves, tmp_path / "plot.png")  # a warning would be an error
    assert (tmp_path / "plot.png").exists()


def test_accuracy_in_percent(folder: Path, figures: list[Figure]) -> None:
    plots.plot_metric(read_runs(folder)[1], "accuracy", folder / "plot.png")
    (figure,) = figures
    epochs, seconds = figure.axes
    assert (epochs.get_xlabel(), seconds.get_xlabel()) == ("epoch", "training time (seconds)")
    assert epochs.get_ylabel() == "test accuracy (%)"
    assert epochs.yaxis.get_major_formatter()(0.5, 0).startswith("50")
    assert [heights for _, _, heights in drawn_curves(epochs)] == [[0.5]] * 3


def test_report_of_another_metric(tmp_path: Path, figures: list[Figure]) -> None:
    lines = [line for run in PERPLEXITY_RUNS for line in make_perplexity_lines(run)]
    write_run(tmp_path, PERPLEXITY_RUNS, lines)
    plots.write_report(tmp_path, Console(file=io.StringIO()))
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "loss.png", "consensus.png", "test_perplexity.png"
    }  # fmt: skip
    epochs, _ = figures[-1].axes
    assert epochs.get_ylabel() == "test perplexity"
    assert [heights for _, _, heights in drawn_curves(epochs)] == [[30.0]] * 2


def test_many_curves_look_different(tmp_path: Path, figures: list[Figure]) -> None:
    runs = [make_run("sgp", f"topology{number}", 0) for number in range(24)]
    lines = [line for run in runs for line in make_lines(run)]
    plots.plot_loss(read_runs(write_run(tmp_path, runs, lines))[1], tmp_path / "plot.png")
    looks = {(to_hex(c.get_color()), c.get_marker()) for c in figures[0].axes[0].lines}
    assert len(looks) == 24


def one_peer(nodes: int, hop: int) -> np.ndarray:
    """Node j sends to node j + hop, weights 1/2."""
    return (np.eye(nodes) + np.roll(np.eye(nodes), hop, axis=0)) / 2


def arrows(axes: Axes) -> set[tuple[int, int]]:
    """The (sender, receiver) pairs, by the positions of the node numbers."""
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
    plots.plot_topology(matrices, "one-peer exponential, 8 nodes", tmp_path / "plot.png")
    (figure,) = figures
    assert figure.get_suptitle().strip() == "one-peer exponential, 8 nodes"
    assert [axes.get_title() for axes in figure.axes] == ["round 0", "round 1", "round 2"]
    for axes, hop in zip(figure.axes, (1, 2, 4), strict=True):
        assert arrows(axes) == {(j, (j + hop) % 8) for j in range(8)}
    assert figure.get_supxlabel() == (
        "arrow from j to i: i gives weight 1/2 to what j sends\nand 1/2 to its own model"
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_topology_shows_the_first_eight_rounds(tmp_path: Path, figures: list[Figure]) -> None:
    matrices = np.stack([one_peer(10, hop) for hop in range(1, 10)])
    plots.plot_topology(matrices, "cycle", tmp_path / "plot.png")
    assert figures[0].get_suptitle().strip() == "cycle (first 8 of 9 rounds)"
    assert len(figures[0].axes) == 8


def test_topology_of_unequal_weights_and_idle_nodes(tmp_path: Path, figures: list[Figure]) -> None:
    matrix = np.array([[[1 / 2, 0, 0], [1 / 4, 1, 1 / 3], [1 / 4, 0, 2 / 3]]])
    plots.plot_topology(matrix, "from matrices", tmp_path / "plot.png")
    assert arrows(figures[0].axes[0]) == {(0, 1), (0, 2), (2, 1)}
    assert figures[0].get_supxlabel() == (
        "arrow from j to i: i gives weight 1/4 to 1/3 to what j sends\n"
        "and 1/2 to 1 to its own model"
    )


@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_topology_without_arrows(tmp_path: Path, figures: list[Figure], nodes: int) -> None:
    plots.plot_topology(np.eye(nodes)[np.newaxis], "identity", tmp_path / "plot.png")
    assert not arrows(figures[0].axes[0])
    assert figures[0].get_supxlabel() == "no node sends"


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4), (0, 4, 4)])
def test_topology_refuses_other_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have the shape \[T, N, N\], got \["):
        plots.plot_topology(np.zeros(shape), "wrong", tmp_path / "plot.png")
