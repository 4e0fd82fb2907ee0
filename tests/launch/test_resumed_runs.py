"""The image program stopped and resumed, in one process."""

import json
import signal

import numpy as np
import pytest
from image_runs import (
    STEPS,
    assert_same_end,
    folders,
    read_results,
    train,
    train_interrupted,
)
from small import make_small

from experiments.training import main, placement
from gossipjax.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    # The devices are there already.
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


def test_stopped_runs_end_as_if_they_had_never_been_stopped(tmp_path, monkeypatch):
    """SIGTERM saves, Ctrl-C does not. Finished runs are not trained again."""
    once = tmp_path / "once"
    often = tmp_path / "often"
    several = ("--algorithm", "2-osgp", "allreduce", "d1d-psgd")
    train(once, *several)
    assert train_interrupted(often, monkeypatch, 5, signal.SIGTERM, *several, run=1) == 143
    assert len(folders(often)) == 2, "one run is finished, one has started, one has not"
    trained = []
    real_train = main.train

    def recorded_train(experiment, run, log):
        trained.append(run.name.partition(",")[0])
        return real_train(experiment, run, log)

    monkeypatch.setattr(main, "train", recorded_train)
    resume = (*several, "--resume")
    assert train_interrupted(often, monkeypatch, 7, signal.SIGINT, *resume, run=1) == 130
    newest = [max(int(path.name) for path in folder.iterdir()) for folder in folders(often)]
    assert sorted(newest) == [6, STEPS, STEPS]
    train(often, *resume)
    assert trained == ["allreduce", "d1d-psgd", "d1d-psgd"]
    assert_same_end(once, often)
    train(often, *resume)
    assert len(trained) == 3, "nothing is left to do"
    assert read_results(once) == read_results(often)


def test_another_number_of_nodes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    resume = ("--resume", "--nodes")
    assert train_interrupted(out, monkeypatch, 2, signal.SIGTERM) == 143
    assert train_interrupted(out, monkeypatch, 5, signal.SIGTERM, *resume, "3") == 143
    (run,), lines = train(out, *resume, "4")
    output = capsys.readouterr().out
    message = "sgp resumes after step 2 of sgp: 4 nodes became 3: all start from the average"
    assert message in output
    assert "sgp resumes after step 5 of sgp: 3 nodes became 4" in output
    assert (run["nodes"], run["steps"], len(run["test_accuracy_nodes"])) == (4, STEPS, 4)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    epochs = [line["epoch"] for line in lines if "loss" in line]
    assert epochs[-1] == pytest.approx((5 * 4 + 3 * 3) * 32 / 512)


def test_from_another_algorithm(tmp_path, capsys):
    first = tmp_path / "first"
    train(first, "--algorithm", "allreduce")
    (run,), lines = train(tmp_path / "out", "--init-from", folders(first)[0], "--epochs", "4")
    message = "sgp resumes after step 8 of allreduce: 4 nodes became 4"
    assert message in capsys.readouterr().out
    training_lines = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training_lines] == [*range(9, 17)]
    assert training_lines[-1]["epoch"] == 4
    assert run["consensus_distance"] > 0


def test_a_restart_resumes_only_what_the_same_job_has_started(tmp_path, monkeypatch, capsys):
    """A job that failed before it created the folder has started nothing: --overwrite holds."""
    monkeypatch.setenv("GOSSIPJAX_JOB", "former")
    assert train_interrupted(tmp_path, monkeypatch, 4, signal.SIGTERM) == 143
    monkeypatch.setenv("GOSSIPJAX_RESTART", "1")
    monkeypatch.setenv("GOSSIPJAX_JOB", "another")
    assert train_interrupted(tmp_path, monkeypatch, 2, signal.SIGTERM, "--overwrite") == 143
    assert "resumes after" not in capsys.readouterr().out
    assert not (folders(tmp_path)[0] / "4").exists()
    for step in (5, 7):
        assert train_interrupted(tmp_path, monkeypatch, step, signal.SIGTERM, "--overwrite") == 143
    summary = json.loads((tmp_path / "summary.json").read_text())
    messages = summary["environment"]["resumed"]
    assert messages == ["sgp resumes after step 2", "sgp resumes after step 5"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after two steps."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr)
        patch.setattr(placement, "request_cpu_devices", lambda count: None)
        assert train_interrupted(out, patch, 2, signal.SIGTERM) == 143
    return out


class TestBadInput:
    def train_and_fail(self, capsys, out, *arguments):
        with pytest.raises(SystemExit) as stop:
            train(out, *arguments)
        assert stop.value.code == 2
        return " ".join(capsys.readouterr().err.replace("\u2502", " ").split())

    def test_another_option(self, capsys, stopped):
        before = modification_times(stopped)
        for option, saved, given in (
            ("--learning-rate", "0.1", "0.2"),
            ("--algorithm", "['sgp']", "dpsgd"),
        ):
            message = self.train_and_fail(capsys, stopped, "--resume", option, given)
            assert f"{option} must be {saved}, as in the run in {stopped}, got " in message
            assert "keep it to resume that run, or choose another --out" in message
        assert modification_times(stopped) == before

    def test_neither_resumed_nor_overwritten(self, capsys, stopped):
        message = self.train_and_fail(capsys, stopped)
        assert "holds another run (metrics.jsonl, summary.json, checkpoints)" in message

    def test_edited_files(self, capsys, tmp_path):
        whole = {"options": {}, "environment": {}, "runs": []}
        for content, message in (
            ("", "must be JSON"),
            ("{}", "must have environment, options, runs"),
            (whole | {"options": {"nodes": "four"}}, 'nodes must be an integer >= 0, got "four"'),
            (whole | {"options": {"nodes": 0}}, "--nodes must be an integer >= 1, got 0"),
            (whole | {"runs": [{"run": None}]}, "runs[0]"),
        ):
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "summary.json").write_text(text)
            assert message in self.train_and_fail(capsys, tmp_path, "--resume")
        (tmp_path / "summary.json").write_text("{}")
        for line, message in (
            (b"\xff\xfe", "metrics.jsonl must be text in UTF-8"),
            (b'{"run": "a"}', "line 1 must have epoch, seconds, step"),
        ):
            (tmp_path / "metrics.jsonl").write_bytes(line)
            assert message in self.train_and_fail(capsys, tmp_path, "--resume")

    def test_init_from_the_checkpoint_of_another_program(self, capsys, tmp_path):
        with Checkpoints(tmp_path / "other") as checkpoints:
            checkpoints.save(1, {"a": np.ones(3)}, {"nodes": 4})
        message = self.train_and_fail(capsys, tmp_path / "out", "--init-from", tmp_path / "other")
        assert (
            "the metadata of a checkpoint must have algorithm, seed, got an object without"
            in message
        )

    def test_init_from_without_a_checkpoint(self, capsys, tmp_path):
        out = tmp_path / "out"
        for folder in (tmp_path / "missing", tmp_path):
            message = self.train_and_fail(capsys, out, "--overwrite", "--init-from", folder)
            assert f"must be a folder of checkpoints, got {folder}, which holds none" in message
        assert not (tmp_path / "missing").exists()

    def test_init_from_another_model(self, capsys, stopped, tmp_path):
        other = ("--normalization", "batch", "--init-from", folders(stopped)[0])
        message = self.train_and_fail(capsys, tmp_path / "out", *other)
        assert "the checkpoint of step 2" in message
        assert "must have [2]['BatchNorm_0']['mean']: [4, 1] float32, as this run" in message

    def test_init_from_what_leaves_nothing_to_train(self, capsys, stopped, tmp_path):
        short = ("--epochs", "1", "--batch-size-per-node", "64", "--init-from", folders(stopped)[0])
        message = self.train_and_fail(capsys, tmp_path / "out", *short)
        assert "must be of a step before the end of this run, 2, got " in message
        assert "of step 2: train for more --epochs" in message

    def test_init_from_what_is_overwritten(self, capsys, stopped):
        folder = folders(stopped)[0]
        message = self.train_and_fail(capsys, stopped, "--overwrite", "--init-from", folder)
        assert "which is in the folder whose results --overwrite removes" in message
        assert folder.exists()


def modification_times(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}
