"""Tables from the files of a run, and the messages about broken files."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
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
from rich.table import Table

from experiments import plots
from experiments.results import read_runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, RUNS, LINES)


def render(table: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_of_one_seed() -> None:
    (row,) = (
        line for line in render(plots.make_table(RUNS[:1]), 100).splitlines() if "allr" in line
    )
    assert row.split() == [
        *("allreduce", "complete", "4", "97.50", "96.50", "95.00", "0.012", "12.5")
    ]


def test_table_of_several_seeds_shows_mean_and_deviation() -> None:
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


def test_table_keeps_its_numbers_in_a_narrow_terminal() -> None:
    text = render(plots.make_table([make_run("allreduce", "one_peer_exponential", 0)]), 80)
    assert max(map(len, text.splitlines())) <= 80
    for number in ("97.50", "96.50", "95.00", "0.012", "12.5"):
        assert number in text


def test_table_has_a_row_per_number_of_nodes() -> None:
    table = plots.make_table([make_run("sgp", "ring", 0), make_run("sgp", "ring", 1, nodes=8)])
    assert table.row_count == 2


def test_write_report_makes_table_and_plots(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    plots.write_report(folder, console)
    assert isinstance(console.file, io.StringIO)
    assert "sgp" in console.file.getvalue()
    for plot in ("loss.png", "consensus.png", "test_accuracy.png"):
        assert (folder / plot).read_bytes().startswith(b"\x89PNG")


def test_without_evaluations_there_is_no_plot_of_the_metric(tmp_path: Path) -> None:
    write_run(tmp_path, RUNS[:1], make_lines(RUNS[0], evaluations=False))
    plots.write_report(tmp_path, Console(file=io.StringIO()))
    assert not (tmp_path / "test_accuracy.png").exists()
    assert (tmp_path / "loss.png").exists()


def test_table_of_another_metric_shows_mean_and_spread() -> None:
    text = render(plots.make_table(PERPLEXITY_RUNS), 80)
    lines = text.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "sgp" in line)
    assert lines[at].split()[2:6] == ["4", "21", "23.5", "4"]
    assert "perplexity:" in text
    assert "%" not in text
    assert "worst" not in text


def test_table_of_a_translation_leaves_out_what_is_there_twice() -> None:
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


def test_runs_of_one_folder_have_the_same_metrics(tmp_path: Path) -> None:
    runs = [make_run("sgp", "star", 0), PERPLEXITY_RUNS[0]]
    write_run(tmp_path, runs, [*make_lines(runs[0]), *make_perplexity_lines(runs[1])])
    with pytest.raises(ValueError, match=r"runs\[0\] must have test_perplexity_average_model, "):
        read_runs(tmp_path)


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
def test_a_missing_file_is_named(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {file} in .*{folder.name}"):
        read_runs(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"in .*nowhere"):
        read_runs(tmp_path / "nowhere")


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
def test_a_malformed_summary_is_described(folder: Path, summary: str, message: str) -> None:
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
def test_a_malformed_line_is_described(folder: Path, line: str, message: str) -> None:
    (folder / "metrics.jsonl").write_text(f"{json.dumps(LINES[0])}\n{line}\n")
    with pytest.raises(ValueError, match=f"{folder.name}.metrics.jsonl, {message}"):
        read_runs(folder)


def test_an_interrupted_run_is_left_out(folder: Path) -> None:
    write_run(folder, RUNS[:2], LINES)
    runs, curves = read_runs(folder)
    assert [run["run"] for run in runs] == ["allreduce-complete-0", "sgp-ring-0"]
    assert curves == {
        "allreduce, complete, 4 nodes": [LINES[:5]],
        "sgp, ring, 4 nodes": [LINES[5:10]],
    }


def test_a_run_without_training_lines_is_named(folder: Path) -> None:
    lines = [line for line in LINES if line["run"] != "sgp-ring-1" or "loss" not in line]
    write_run(folder, RUNS, lines)
    with pytest.raises(ValueError, match="must have a training line of run 'sgp-ring-1'"):
        read_runs(folder)


def test_program_makes_the_plots_again(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plots", str(folder)],
        cwd=Path(plots.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sgp" in done.stdout
    assert (folder / "loss.png").exists()


def test_program_reports_an_error_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        tyro.cli(plots.main, args=[str(tmp_path)])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: no summary.json in {tmp_path}")
