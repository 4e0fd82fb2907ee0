"""Tables and plots: what they show of the files of a run, and what they say of broken files."""

import io
import json

import numpy as np
import pytest
import tyro
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


def legend_texts(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def drawn_curves(axes):
    """Color, line style and heights of the lines that have data."""
    heights = [np.asarray(line.get_ydata(), float).tolist() for line in axes.lines]
    return [
        (to_hex(line.get_color()), str(line.get_linestyle()), ys)
        for line, ys in zip(axes.lines, heights, strict=True)
        if ys
    ]


def test_loss_over_steps_and_over_seconds(folder, figures):
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


def test_consensus_before_and_after_with_a_note_on_zeros(folder, figures):
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


def test_consensus_with_some_zeros(tmp_path, figures):
    lines = make_lines(RUNS[1])
    lines[0]["consensus_distance"] = 0.0
    _, curves = read_runs(write_run(tmp_path, RUNS[1:2], lines))
    plots.plot_consensus(curves, tmp_path / "plot.png")
    assert legend_texts(figures[0]) == ["sgp, ring, 4 nodes (zeros after mixing not drawn)"]
    np.testing.assert_array_equal(drawn_curves(figures[0].axes[0])[1][2], [np.nan, 1, 1, 1])


def test_consensus_with_only_zeros(tmp_path):
    _, curves = read_runs(write_run(tmp_path, RUNS[:1], make_lines(RUNS[0], 0.0)))
    plots.plot_consensus(curves, tmp_path / "plot.png")  # a warning would be an error
    assert (tmp_path / "plot.png").exists()


def test_accuracy_in_percent(folder, figures):
    plots.plot_metric(read_runs(folder)[1], "accuracy", folder / "plot.png")
    (figure,) = figures
    epochs, seconds = figure.axes
    assert (epochs.get_xlabel(), seconds.get_xlabel()) == ("epoch", "training time (seconds)")
    assert epochs.get_ylabel() == "test accuracy (%)"
    assert epochs.yaxis.get_major_formatter()(0.5, 0).startswith("50")
    assert [heights for _, _, heights in drawn_curves(epochs)] == [[0.5]] * 3


def test_report_of_another_metric(tmp_path, figures):
    lines = [line for run in PERPLEXITY_RUNS for line in make_perplexity_lines(run)]
    write_run(tmp_path, PERPLEXITY_RUNS, lines)
    plots.write_report(tmp_path, Console(file=io.StringIO()))
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "loss.png", "consensus.png", "test_perplexity.png"
    }  # fmt: skip
    epochs, _ = figures[-1].axes
    assert epochs.get_ylabel() == "test perplexity"
    assert [heights for _, _, heights in drawn_curves(epochs)] == [[30.0]] * 2


def test_many_curves_look_different(tmp_path, figures):
    runs = [make_run("sgp", f"topology{number}", 0) for number in range(24)]
    lines = [line for run in runs for line in make_lines(run)]
    plots.plot_loss(read_runs(write_run(tmp_path, runs, lines))[1], tmp_path / "plot.png")
    looks = {(to_hex(c.get_color()), c.get_marker()) for c in figures[0].axes[0].lines}
    assert len(looks) == 24


def one_peer(nodes, hop):
    """Node j sends to node j + hop, weights 1/2."""
    return (np.eye(nodes) + np.roll(np.eye(nodes), hop, axis=0)) / 2


def arrows(axes):
    """The (sender, receiver) pairs, by the positions of the node numbers."""
    numbers = {t.get_text(): t.get_position() for t in axes.texts if t.get_text()}
    points = np.array([numbers[f"{node}"] for node in range(len(numbers))]) / 1.14

    def node_at(xy):
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


def test_topology_draws_an_arrow_from_sender_to_receiver(tmp_path, figures):
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


def test_topology_shows_the_first_eight_rounds(tmp_path, figures):
    matrices = np.stack([one_peer(10, hop) for hop in range(1, 10)])
    plots.plot_topology(matrices, "cycle", tmp_path / "plot.png")
    assert figures[0].get_suptitle().strip() == "cycle (first 8 of 9 rounds)"
    assert len(figures[0].axes) == 8


def test_topology_of_unequal_weights_and_idle_nodes(tmp_path, figures):
    matrix = np.array([[[1 / 2, 0, 0], [1 / 4, 1, 1 / 3], [1 / 4, 0, 2 / 3]]])
    plots.plot_topology(matrix, "from matrices", tmp_path / "plot.png")
    assert arrows(figures[0].axes[0]) == {(0, 1), (0, 2), (2, 1)}
    assert figures[0].get_supxlabel() == (
        "arrow from j to i: i gives weight 1/4 to 1/3 to what j sends\n"
        "and 1/2 to 1 to its own model"
    )


@pytest.mark.parametrize("nodes", [1, 40])
def test_topology_without_arrows(tmp_path, figures, nodes):
    plots.plot_topology(np.eye(nodes)[np.newaxis], "identity", tmp_path / "plot.png")
    assert not arrows(figures[0].axes[0])
    assert figures[0].get_supxlabel() == "no node sends"


def test_topology_refuses_other_shapes(tmp_path):
    with pytest.raises(ValueError, match=r"must have the shape \[T, N, N\], got \["):
        plots.plot_topology(np.zeros((4, 4)), "wrong", tmp_path / "plot.png")


def render(table, width):
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


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
            examples_per_second=1000 * (seed + 1),
        )
        for seed in range(3)
    ]
    text = render(plots.make_table([*seeds, make_run("allreduce", "complete", 0)]), 100)
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "sgp" in line)
    assert lines[at].split()[4:] == ["4", "97.00", "94.00", "92.00", "0.02", "12.0"]
    assert lines[at + 1].split() == ["±1.00", "±2.00", "±2.00", "±0.01", "±2.0"]
    for header in ("algorithm", "topology", "nodes", "average", "worst", "ms"):
        assert header in text


def test_table_keeps_its_numbers_in_a_narrow_terminal():
    text = render(plots.make_table([make_run("allreduce", "one_peer_exponential", 0)]), 80)
    assert max(map(len, text.splitlines())) <= 80
    for number in ("97.50", "96.50", "95.00", "0.012", "12.5"):
        assert number in text


@pytest.mark.parametrize("evaluations", [True, False])
def test_the_program_makes_table_and_plots(tmp_path, capsys, evaluations):
    write_run(tmp_path, RUNS[1:2], make_lines(RUNS[1], evaluations=evaluations))
    tyro.cli(plots.main, args=[f"{tmp_path}"])
    assert "sgp" in capsys.readouterr().out
    for plot in ("loss.png", "consensus.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "test_accuracy.png").exists() == evaluations


def test_table_of_another_metric_shows_mean_and_spread():
    text = render(plots.make_table(PERPLEXITY_RUNS), 80)
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "sgp" in line)
    assert lines[at].split()[2:6] == ["4", "21", "23.5", "4"]
    assert "perplexity:" in text
    assert "%" not in text
    assert "worst" not in text


def test_table_of_a_translation_leaves_out_what_is_there_twice():
    fields = {
        "valid_loss_average_model": 2.4726,
        "valid_loss_nodes": [2.4726] * 4,
        "valid_perplexity_average_model": 11.8537,
        "valid_perplexity_nodes": [11.8537] * 4,
        "valid_bleu_average_model": 14.6326,
        "valid_bleu_nodes": None,
        "test_bleu_average_model": 17.5059,
        "test_bleu_nodes": None,
    }
    runs = [make_run("sgp", "ring", 0) | fields]
    for name in ("test_accuracy_average_model", "test_accuracy_nodes"):
        del runs[0][name]
    text = render(plots.make_table(runs), 80)
    (row,) = (line.split() for line in text.splitlines() if "sgp" in line)
    assert row == ["sgp", "ring", "4", "11.85", "11.85", "0", "17.51", "0.012", "12.5"]
    assert "BLEU:" in text


def test_runs_of_one_folder_have_the_same_metrics(tmp_path):
    runs = [make_run("sgp", "star", 0), PERPLEXITY_RUNS[0]]
    write_run(tmp_path, runs, [*make_lines(runs[0]), *make_perplexity_lines(runs[1])])
    with pytest.raises(ValueError, match=r"runs\[0\] must have test_perplexity_average_model, "):
        read_runs(tmp_path)


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
def test_a_missing_file_is_named(folder, file):
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {file} in .*{folder.name}"):
        read_runs(folder)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ("{", "summary.json must be JSON"),
        ("[]", "summary.json must be a JSON object"),
        ("{}", "summary.json must have runs"),
        ('{"runs": []}', "summary.json must list one run or more"),
        ('{"runs": [3]}', r"summary.json, runs\[0\] must be a JSON object"),
        (
            json.dumps({"runs": [RUNS[0], {"run": "x", "nodes": 4, "algorithm": "sgp"}]}),
            r"summary.json, runs\[1\] must have consensus_distance, examples_per_second, ",
        ),
    ],
)
def test_a_malformed_summary_is_described(folder, summary, message):
    (folder / "summary.json").write_text(summary)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"{folder.name}.{message}"):
        read_runs(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"run": "sgp-ring-0", "st', "line 2 must be JSON"),
        ("", "line 2 must be JSON"),
        ("7", "line 2 must be a JSON object"),
        ('{"run": "sgp-ring-0"}', "line 2 must have epoch, seconds, step"),
        (
            json.dumps({"run": "sgp-ring-0", "step": 1, "epoch": 1, "seconds": 1, "loss": 1}),
            "line 2 must have consensus_distance, consensus_distance_before_mixing",
        ),
    ],
)
def test_a_malformed_line_is_described(folder, line, message):
    (folder / "metrics.jsonl").write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(ValueError, match=f"{folder.name}.metrics.jsonl, {message}"):
        read_runs(folder)


def test_an_interrupted_run_is_left_out(folder):
    write_run(folder, RUNS[:2], LINES)
    runs, curves = read_runs(folder)
    assert [run["run"] for run in runs] == ["allreduce-complete-0", "sgp-ring-0"]
    assert curves == {
        "allreduce, complete, 4 nodes": [LINES[:5]],
        "sgp, ring, 4 nodes": [LINES[5:10]],
    }


def test_a_run_without_training_lines_is_named(folder):
    lines = [line for line in LINES if line["run"] != "sgp-ring-1" or "loss" not in line]
    write_run(folder, RUNS, lines)
    with pytest.raises(ValueError, match="must have a training line of run 'sgp-ring-1'"):
        read_runs(folder)
