"""How programs end, and the folder and files of their results."""

import json
import re
import signal
from pathlib import Path

import pytest
from report_files import RUNS

from experiments import results
from experiments.data import MissingDataError
from experiments.program import FatalError, ProgramError, exit_on_error
from gossipjax.checkpoint import Preempted


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("no such topology"), 2, "error: no such topology\n"),
        (MissingDataError("no data"), 2, "error: no data\n"),
        (OSError("disk full"), 1, "error: disk full\n"),
        (FileNotFoundError("no file"), 1, "error: no file\n"),
        (ProgramError("a host failed"), 1, "error: a host failed\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_a_status(capsys, error, status, message):
    with pytest.raises(SystemExit) as stop, exit_on_error():
        raise error
    assert stop.value.code == status
    assert capsys.readouterr().err == message


def test_an_interrupt_names_the_folder_of_the_results(capsys):
    with pytest.raises(SystemExit) as stop, exit_on_error(lambda: Path("runs/mine")):
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted; runs/mine holds what was measured\n"


def test_a_preempted_run_reports_its_checkpoint(capsys):
    with pytest.raises(SystemExit) as stop, exit_on_error():
        raise Preempted(7, Path("runs/mine"))
    assert stop.value.code == 128 + signal.SIGTERM
    assert re.search("saved after step 7 in runs/mine", capsys.readouterr().err)


def test_what_fails_after_the_start_is_a_bug_unless_it_is_said_to_be_fatal(capsys):
    with pytest.raises(ValueError, match="shapes do not fit"), exit_on_error(lambda: Path("out")):
        raise ValueError("shapes do not fit")
    with pytest.raises(SystemExit) as stop, exit_on_error(lambda: Path("out")):
        raise FatalError("the loss is not finite")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: the loss is not finite\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), TypeError("a bug"), SystemExit(3)])
def test_other_exceptions_pass(error):
    with pytest.raises(type(error)) as raised, exit_on_error():
        raise error
    assert raised.value is error


def test_no_error_ends_nothing():
    with exit_on_error():
        reached = True
    assert reached


class TestRunDir:
    def test_is_new_by_default(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        out = results.create_run_dir("averaging", None, overwrite=False)
        assert re.fullmatch(r"runs/averaging-\d{8}-\d{6}-\d+", str(out))
        assert (out / "metrics.jsonl").read_text() == ""

    def test_overwriting_removes_the_results_of_another_run_and_nothing_else(self, tmp_path):
        (tmp_path / "checkpoints" / "sgp").mkdir(parents=True)
        for name in ("metrics.jsonl", "summary.json", "loss.png", "notes.txt"):
            (tmp_path / name).write_text("old")
        with pytest.raises(ValueError, match=r"holds another run \(metrics.jsonl, summary.json, "):
            results.create_run_dir("image", tmp_path, overwrite=False)
        results.create_run_dir("image", tmp_path, overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "notes.txt"}
        assert (tmp_path / "metrics.jsonl").read_text() == ""

    def test_resuming_removes_nothing(self, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("old")
        results.create_run_dir("image", tmp_path, overwrite=False, resume=True)
        assert (tmp_path / "metrics.jsonl").read_text() == "old"

    def test_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"--out must be a folder, got the file .*file\."):
            results.create_run_dir("image", tmp_path / "file", overwrite=True)


def test_summary_is_read_as_written(tmp_path):
    assert results.read_summary(None) == results.read_summary(tmp_path) == {}
    results.write_summary(tmp_path, {"nodes": 8}, {"cores": 2}, [RUNS[0]], left_out=["b"])
    summary = results.read_summary(tmp_path)
    assert summary["options"] == {"nodes": 8}
    assert summary["environment"].keys() == {"jax", "gossipjax", "cores"}
    assert (summary["runs"], summary["left_out"]) == ([RUNS[0]], ["b"])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary.json must be JSON, got .*--overwrite replaces"):
        results.read_summary(tmp_path)


def test_filter_metrics_drops_lines_and_what_was_cut_short(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"run": run, "step": step}) for run in "ab" for step in (1, 2)]
    metrics.write_text("\n".join([*lines, '{"run": "a", "st']))
    results.filter_metrics(metrics, lambda line: line["run"] == "a" and line["step"] <= 1)
    assert metrics.read_text() == f"{lines[0]}\n"
