"""How programs end, and the folder and files of their results."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from report_files import RUNS

from experiments import results
from experiments.data import MissingDataError
from experiments.program import FatalError, ProgramError, exit_on_error
from gossipjax.checkpoint import Preempted

OUT = Path("runs/mine")


@pytest.mark.parametrize(
    ("error", "out", "status", "line"),
    [
        (ValueError("no such topology"), None, 2, "error: no such topology"),
        (MissingDataError("no data"), None, 2, "error: no data"),
        (OSError("disk full"), None, 1, "error: disk full"),
        (ProgramError("a host failed"), OUT, 1, "error: a host failed"),
        (FatalError("the loss is not finite"), OUT, 2, "error: the loss is not finite"),
        (KeyboardInterrupt(), None, 130, None),
        (KeyboardInterrupt(), OUT, 130, f"interrupted; {OUT} holds what was measured"),
        (Preempted(7, OUT), OUT, 128 + signal.SIGTERM, str(Preempted(7, OUT))),
    ],
)
def test_an_error_is_one_line_and_a_status(capsys, error, out, status, line):
    with pytest.raises(SystemExit) as stop, exit_on_error(lambda: out):
        raise error
    assert stop.value.code == status
    assert capsys.readouterr().err.splitlines() == [line] * (line is not None)


def test_other_exceptions_pass():
    """Also a `ValueError`, once there are results."""
    for error in (RuntimeError("a bug"), ValueError("a bug"), SystemExit(3)):
        with pytest.raises(type(error)) as raised, exit_on_error(lambda: OUT):
            raise error
        assert raised.value is error


def test_a_folder_is_new_unless_it_is_overwritten_or_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = results.create_run_dir("averaging", None, overwrite=False)
    assert re.fullmatch(r"runs/averaging-\d{8}-\d{6}-\d+", str(out))
    (out / "checkpoints" / "sgp").mkdir(parents=True)
    for name in ("metrics.jsonl", "summary.json", "loss.png", "notes.txt"):
        (out / name).write_text("old")
    with pytest.raises(ValueError, match=r"holds another run \(metrics.jsonl, summary.json, "):
        results.create_run_dir("image", out, overwrite=False)
    results.create_run_dir("image", out, overwrite=False, resume=True)
    assert (out / "metrics.jsonl").read_text() == "old"
    results.create_run_dir("image", out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"metrics.jsonl", "notes.txt"}
    assert (out / "metrics.jsonl").read_text() == ""
    with pytest.raises(ValueError, match=r"--out must be a folder on a disk, got gs:/bucket"):
        results.create_run_dir("image", Path("gs://bucket"), overwrite=False)
    with pytest.raises(ValueError, match=r"--out must be a folder, got the file .*notes.txt"):
        results.create_run_dir("image", out / "notes.txt", overwrite=True)


def test_programs_keep_what_is_compiled(tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    code = "import experiments, jax; jax.jit(lambda x: x + 1)(1.0)"
    subprocess.run([sys.executable, "-c", code], env=kept | {"HOME": str(tmp_path)}, check=True)
    assert [*(tmp_path / ".cache" / "gossipjax").iterdir()]


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
