"""The image program stopped and resumed, in one process."""

import json
import random
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

from experiments import image
from experiments.training import main, placement
from gossipjax.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    # The devices are there already.
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


@pytest.mark.parametrize(
    ("algorithm", "number"), [("d1d-psgd", signal.SIGINT), ("2-osgp", signal.SIGTERM)]
)
def test_a_resumed_run_ends_as_if_it_had_never_been_stopped(
    algorithm, number, tmp_path, monkeypatch
):
    """After a random step. SIGTERM saves, Ctrl-C does not."""
    once = tmp_path / "once"
    twice = tmp_path / "twice"
    train(once, "--algorithm", algorithm)
    step = random.Random(algorithm).randrange(4, STEPS)
    status = train_interrupted(twice, monkeypatch, step, number, "--algorithm", algorithm)
    assert status == 128 + number
    saved = step if number == signal.SIGTERM else (step - 1) // 3 * 3
    newest = max(int(folder.name) for folder in folders(twice)[0].iterdir())
    assert newest == saved
    train(twice, "--algorithm", algorithm, "--resume")
    assert_same_end(once, twice)


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch):
    once = tmp_path / "once"
    often = tmp_path / "often"
    several = ("--algorithm", "sgp", "allreduce", "dpsgd")
    train(once, *several)
    assert train_interrupted(often, monkeypatch, 5, signal.SIGTERM, *several, run=1) == 143
    assert len(folders(often)) == 2, "one run is finished, one has started, one has not"
    trained = []
    real_train = main.train

    def recorded_train(experiment, run, log):
        trained.append(run.name)
        return real_train(experiment, run, log)

    monkeypatch.setattr(main, "train", recorded_train)
    train(often, *several, "--resume")
    assert trained == ["allreduce, complete, seed 0", "dpsgd, ring, seed 0"]
    assert_same_end(once, often)
    train(often, *several, "--resume")
    assert len(trained) == 2, "nothing is left to do"
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


def test_overwriting_resumes_from_no_old_checkpoint(tmp_path, monkeypatch, capsys):
    assert train_interrupted(tmp_path, monkeypatch, 4, signal.SIGTERM) == 143
    _, lines = train(tmp_path, "--overwrite")
    assert "resumes after" not in capsys.readouterr().out
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
    assert not (folders(tmp_path)[0] / "4").exists()


def test_a_restart_resumes_only_what_the_same_job_has_started(tmp_path, monkeypatch, capsys):
    """A job that failed before it created the folder has started nothing: --overwrite holds."""
    monkeypatch.setenv("GOSSIPJAX_JOB", "former")
    assert train_interrupted(tmp_path, monkeypatch, 4, signal.SIGTERM) == 143
    monkeypatch.setenv("GOSSIPJAX_RESTART", "1")
    monkeypatch.setenv("GOSSIPJAX_JOB", "another")
    assert train_interrupted(tmp_path, monkeypatch, 2, signal.SIGTERM, "--overwrite") == 143
    assert "resumes after" not in capsys.readouterr().out
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

    @pytest.mark.parametrize(
        ("option", "saved", "given"),
        [
            ("--learning-rate", "0.1", "0.2"),
            ("--algorithm", "['sgp']", "dpsgd"),
            ("--epochs", "2", "3"),
            ("--normalization", "None", "batch"),
        ],
    )
    def test_another_option(self, capsys, stopped, option, saved, given):
        before = modification_times(stopped)
        message = self.train_and_fail(capsys, stopped, "--resume", option, given)
        assert f"{option} must be {saved}, as in the run in {stopped}, got " in message
        assert "keep it to resume that run, or choose another --out" in message
        assert modification_times(stopped) == before

    def test_neither_resumed_nor_overwritten(self, capsys, stopped):
        message = self.train_and_fail(capsys, stopped)
        assert "holds another run (metrics.jsonl, summary.json, checkpoints)" in message

    def test_an_impossible_number_of_nodes(self, capsys, tmp_path, monkeypatch):
        algorithm = ("--algorithm", "dpsgd@bipartite_exponential")
        assert train_interrupted(tmp_path, monkeypatch, 2, signal.SIGTERM, *algorithm) == 143
        message = self.train_and_fail(capsys, tmp_path, *algorithm, "--resume", "--nodes", "5")
        assert "must be even, got 5" in message

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "must be JSON"),
            (b"\xff\xfe", "must be text in UTF-8"),
            ("[]", "must be a JSON object, got []"),
            ("{}", "must have environment, options, runs"),
            ({"options": {"nodes": "four"}}, 'nodes must be an integer >= 0, got "four"'),
            ({"options": {"nodes": 0}}, "--nodes must be an integer >= 1, got 0"),
            ({"environment": {"resumed": [1]}}, "resumed must be a list of texts, got [1]"),
            ({"runs": [3]}, "runs[0] must be a JSON object, got 3"),
            ({"runs": [{"run": None}]}, "runs[0]"),
        ],
    )
    def test_an_edited_summary(self, capsys, tmp_path, content, message):
        if isinstance(content, dict):
            content = json.dumps({"options": {}, "environment": {}, "runs": []} | content)
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "summary.json").write_bytes(content)
        error = self.train_and_fail(capsys, tmp_path, "--resume")
        assert message in error

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\xff\xfe", "metrics.jsonl must be text in UTF-8"),
            (b'{"run": "a"}', "line 1 must have epoch, seconds, step"),
            (b'{"run": "a", "epoch": 1, "seconds": 1, "step": "1"}', "line 1: step must be an int"),
        ],
    )
    def test_edited_metrics(self, capsys, tmp_path, content, message):
        (tmp_path / "summary.json").write_text("{}")
        (tmp_path / "metrics.jsonl").write_bytes(content)
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

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--checkpoint-every", "5"), "--checkpoint-every needs --out, the folder in which"),
            (("--resume",), "--resume needs --out"),
            (
                ("--checkpoint-every", "0", "--out", "x"),
                "--checkpoint-every must be an integer >= ",
            ),
            (("--max-to-keep", "0"), "--max-to-keep must be an integer >= 1, got 0"),
            (("--resume", "--overwrite", "--out", "x"), "choose one"),
        ],
    )
    def test_values(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as stop:
            image.main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def modification_times(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}
