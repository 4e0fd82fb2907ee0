"""The image program stopped and resumed: in one process, and as a job of several."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from launching import TIMEOUT, environment, launch_command
from resumed_runs import TERMINATED, read_results, stop_after, without_clock
from small import make_small

from experiments import image
from experiments.fault_injection.lockstep import RESTARTED, RESUMED
from experiments.training import main, placement
from gossipjax.checkpoint import Checkpoints

STEPS = 8


def train(out, *arguments):
    """Trains four nodes for eight steps, with a checkpoint after every third one."""
    short = ["--epochs", "2", "--nodes", "4", "--log-every", "1", "--algorithm", "sgp"]
    short += ["--model", "linear", "--placement", "vmap", "--checkpoint-every", "3"]
    image.main([*short, "--out", str(out), *map(str, arguments)])
    return read_results(out)


def train_interrupted(out, step, *arguments, **options):
    return stop_after(step, lambda: train(out, *arguments), **options)


def folders(out):
    return sorted((out / "checkpoints").iterdir())


def read_checkpoint(folder):
    """The arrays, by name, and the metadata without the clock."""
    manifest = json.loads((folder / "manifest" / "metadata").read_text())
    manifest = json.loads(manifest["json"])
    metadata = without_clock(manifest["metadata"])
    metadata["metrics"] = without_clock(metadata["metrics"])
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        shapes = reader.metadata(folder / "state").item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        state = reader.restore(folder / "state", restore_args=as_numpy)
    arrays = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): x.tobytes() for path, x in arrays}, metadata


def assert_same_end(one, other):
    """The same results and last checkpoints, bit for bit."""
    assert read_results(one) == read_results(other)
    assert [folder.name for folder in folders(one)] == [folder.name for folder in folders(other)]
    for first, second in zip(folders(one), folders(other), strict=True):
        assert read_checkpoint(first / str(STEPS)) == read_checkpoint(second / str(STEPS))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)


def test_stopped_runs_end_as_if_they_had_never_been_stopped(tmp_path, monkeypatch):
    """SIGTERM saves, Ctrl-C does not. Finished runs are not trained again."""
    once = tmp_path / "once"
    often = tmp_path / "often"
    several = ("--algorithm", "d1d-psgd", "2-osgp")
    train(once, *several)
    assert train_interrupted(often, 5, *several, run=1) == TERMINATED
    trained = []
    real_train = main.train

    def recorded_train(experiment, run, log):
        trained.append(run.name.partition(",")[0])
        return real_train(experiment, run, log)

    monkeypatch.setattr(main, "train", recorded_train)
    resume = (*several, "--resume")
    assert train_interrupted(often, 7, *resume, number=signal.SIGINT) == 130
    newest = [max(int(path.name) for path in folder.glob("[0-9]*")) for folder in folders(often)]
    assert sorted(newest) == [6, STEPS]
    train(often, *resume)
    assert trained == ["2-osgp", "2-osgp"]
    assert_same_end(once, often)
    train(often, *resume)
    assert len(trained) == 2, "nothing is left to do"
    assert read_results(once) == read_results(often)


def test_another_number_of_nodes(tmp_path, capsys):
    out = tmp_path / "out"
    assert train_interrupted(out, 4) == TERMINATED
    run, *lines = train(out, "--resume", "--nodes", "3")
    message = "sgp resumes after step 4 of sgp: 4 nodes became 3: all start from the average"
    assert message in capsys.readouterr().out
    assert (run["nodes"], run["steps"], len(run["test_accuracy_nodes"])) == (3, STEPS, 3)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    epochs = [line["epoch"] for line in lines if "loss" in line]
    assert epochs[-1] == pytest.approx((4 * 4 + 4 * 3) * 32 / 512)


def test_a_restart_resumes_only_what_the_same_job_has_started(tmp_path, monkeypatch, capsys):
    """A job that failed before it created the folder has started nothing: --overwrite holds."""
    monkeypatch.setenv("GOSSIPJAX_JOB", "former")
    assert train_interrupted(tmp_path, 4) == TERMINATED
    monkeypatch.setenv("GOSSIPJAX_RESTART", "1")
    monkeypatch.setenv("GOSSIPJAX_JOB", "another")
    assert train_interrupted(tmp_path, 2, "--overwrite") == TERMINATED
    assert "resumes after" not in capsys.readouterr().out
    assert not (folders(tmp_path)[0] / "4").exists()
    for step in (5, 7):
        assert train_interrupted(tmp_path, step, "--overwrite") == TERMINATED
    summary = json.loads((tmp_path / "summary.json").read_text())
    messages = summary["environment"]["resumed"]
    assert messages == ["sgp resumes after step 2", "sgp resumes after step 5"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped after two steps."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr)
        assert train_interrupted(out, 2) == TERMINATED
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

    def test_init_from_the_checkpoint_of_another_program(self, capsys, tmp_path):
        with Checkpoints(tmp_path / "other") as checkpoints:
            checkpoints.save(1, {"a": np.ones(3)}, {"nodes": 4})
        message = self.train_and_fail(capsys, tmp_path / "out", "--init-from", tmp_path / "other")
        assert "the metadata of a checkpoint must have algorithm, seed, got one without" in message

    def test_init_from_what_is_overwritten(self, capsys, stopped):
        folder = folders(stopped)[0]
        message = self.train_and_fail(capsys, stopped, "--overwrite", "--init-from", folder)
        assert "which is in the folder whose results --overwrite removes" in message
        assert folder.exists()


def modification_times(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}


# The program as its users start it, on a tenth of the data. The process that FULL names has a full
# disk at its last step, until it is restarted. Each process says which test examples it reads, and
# examines a part of some texts.
PROGRAM = """
import os, sys
import jax
import small
from experiments import image
from experiments.data.prefetch import LazyBatch
from experiments.training.evaluation import map_texts
from gossipjax.checkpoint import Checkpoints
small.make_small(setattr)
read_tests = set()
def test_batches(self):
    for images, labels in self.images.test_batches():
        def read(rows):
            read_tests.update(rows.ravel().tolist())
            return images[rows], labels[rows]
        yield LazyBatch(len(labels), read)
def examine(self, variables, is_last):
    mine = []
    def repeat(texts):
        mine.extend(texts)
        return [2 * text for text in texts]
    texts = ["a", "bä", "", "c" * 2000, "d"]
    assert map_texts(repeat, texts, variables) == [2 * text for text in texts]
    assert mine == texts[jax.process_index() :: jax.process_count()]
    if is_last:
        print("of the test set:", len(read_tests), flush=True)
image.ImageClassification.test_batches = test_batches
image.ImageClassification.examine = examine
after = Checkpoints.after
def fail_after(self, state, last=False):
    is_full = os.environ.get("FULL") == os.environ["GOSSIPJAX_PROCESS_ID"]
    if is_full and last and os.environ["GOSSIPJAX_RESTART"] == "0":
        raise OSError("No space left on device")
    after(self, state, last)
Checkpoints.after = fail_after
image.main(sys.argv[1:])
"""
TWO_NODES = ("--nodes", "2", "--model", "linear", "--epochs", "1", "--log-every", "4")
TWO_NODES += ("--checkpoint-every", "4", "--algorithm", "sgp", "--shuffle", "global")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        # The devices are there already.
        patch.setattr(placement, "request_cpu_devices", lambda count: None)
        yield


def test_two_processes_of_which_one_fails_train_what_one_does(tmp_path):
    """The disk is full; the checkpoint before is complete all the same. All is equal to the bit.

    Each process reads a half of the 101 test examples.
    """
    one = tmp_path / "one"
    two = tmp_path / "two"
    image.main([*TWO_NODES, "--out", str(one)])
    options = ("--processes", 2, "--restart-delay", 0, "--max-restarts", 1)
    # Compiled as in this process: else results would differ by bits.
    more = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations")),
    }
    job = subprocess.run(
        [*launch_command(PROGRAM, *options), *TWO_NODES, "--out", str(two)],
        env=environment(**more, FULL="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    output = job.stdout
    assert job.returncode == 0, output
    assert "2 processes, one CPU device per node" in output
    assert "[0] error: No space left on device" in output
    read = re.findall(r"\[([01])\] of the test set: (\d+)", output)
    assert set(read) == {("0", "51"), ("1", "51")}  # an example fills up the shorter part
    # As the fault injection reads it.
    lines = output.splitlines()
    assert [match[1] for match in map(RESTARTED.match, lines) if match] == ["1"]
    assert [match[1] for match in map(RESUMED.match, lines) if match] == ["4"]
    assert_same_end(one, two)
