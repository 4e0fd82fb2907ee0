"""Tables and plots: what they show of the files of a run, and what they say of broken files."""

import io
import math

import numpy as np
import pytest
import tyro
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
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
def folder(tmp_path):
    return write_run(tmp_path, RUNS, LINES)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, in order; saving still writes the file."""
    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(self, path):
        saved.append(self)
        save(self, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


def drawn_curves(axes):
    """Color, line style and heights of the lines that have data."""
    curves = [
        (to_hex(line.get_color()), str(line.get_linestyle()), list(line.get_ydata()))
        for line in axes.lines
    ]
    return [curve for curve in curves if curve[2]]


def test_loss_and_accuracy(folder, figures, capsys):
    tyro.cli(plots.main, args=[f"{folder}"])
    assert "sgp" in capsys.readouterr().out
    assert {path.name for path in folder.glob("*.png")} == {
        *("loss.png", "consensus.png", "test_accuracy.png")
    }
    loss, _, accuracy = figures
    steps, seconds = loss.axes
    np.testing.assert_array_equal(steps.lines[0].get_xdata(), [0, 5, 10, 15])
    np.testing.assert_array_equal(seconds.lines[0].get_xdata(), [0, 1, 2, 3])
    allreduce, first, second = drawn_curves(steps)
    assert allreduce[2] == [2 / 1, 2 / 6, 2 / 11, 2 / 16]
    assert first[0] == second[0] != allreduce[0]  # seeds share a color
    epochs, _ = accuracy.axes
    assert epochs.yaxis.get_major_formatter()(0.5, 0).startswith("50")
    assert [heights for _, _, heights in drawn_curves(epochs)] == [[0.5]] * 3


def test_consensus_before_and_after_with_a_note_on_zeros(folder, figures):
    """A logarithmic axis cannot show zeros: they break the curve, and a curve of zeros is none."""
    lines = [*LINES[:5], *make_lines(RUNS[1])]
    lines[5]["consensus_distance"] = 0.0
    _, curves = read_runs(write_run(folder, RUNS[:2], lines))
    plots.plot_consensus(curves, folder / "plot.png")  # a warning would be an error
    (axes,) = figures[0].axes
    assert axes.get_yscale() == "log"
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "allreduce, complete, 4 nodes (zeros before and after mixing not drawn)",
        "sgp, ring, 4 nodes (zeros after mixing not drawn)",
    ]
    (_, before, twos), (_, after, ones) = drawn_curves(axes)
    assert (before, twos, after, ones[1:]) == ("--", [2] * 4, "-", [1] * 3)
    assert math.isnan(ones[0])


def test_another_metric(tmp_path, figures):
    lines = [line for run in PERPLEXITY_RUNS for line in make_perplexity_lines(run)]
    write_run(tmp_path, PERPLEXITY_RUNS, lines)
    output = io.StringIO()
    plots.write_report(tmp_path, Console(file=output, width=80))
    assert (tmp_path / "test_perplexity.png").exists()
    assert [heights for _, _, heights in drawn_curves(figures[-1].axes[0])] == [[30.0]] * 2
    (row,) = (line.split() for line in output.getvalue().splitlines() if "sgp" in line)
    assert row[2:6] == ["4", "21", "23.5", "4"]
    assert "worst" not in output.getvalue()  # whether less is better is not known


def render(runs, width):
    text = io.StringIO()
    Console(file=text, width=width).print(plots.make_table(runs))
    return text.getvalue().splitlines()


def test_table_of_several_seeds_shows_mean_and_deviation():
    seeds = [
        make_run(
            "sgp",
            "one_peer_exponential",
            seed,
            test_accuracy_average_model=0.96 + 0.01 * seed,
            test_accuracy_nodes=[0.90 + 0.02 * seed, 0.94 + 0.02 * seed],
            consensus_distance=0.01 * (seed + 1),
            seconds_per_step=0.010 + 0.002 * seed,
        )
        for seed in range(3)
    ]
    lines = render([*seeds, make_run("allreduce", "complete", 0)], 80)
    assert max(map(len, lines)) <= 80
    (at,) = (number for number, line in enumerate(lines) if "sgp" in line)
    assert lines[at].split()[-6:] == ["4", "97.00", "94.00", "92.00", "0.02", "12.0"]
    assert lines[at + 1].split()[-5:] == ["±1.00", "±2.00", "±2.00", "±0.01", "±2.0"]
