"""The image program as a job: stopped and gone on with, restarted, and on several processes."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small import make_small
from test_launch import environment, is_alive

from experiments import image, interruptions, saving, training

PATIENCE = 120  # seconds, for what takes some ten
STEPS = 8
TIMES = {"seconds", "examples_per_second", "seconds_per_step", "share_outside_the_step"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(training, "request_cpu_devices", lambda count: None)  # they are there


def train(out, *arguments):
    """Eight steps of four nodes, saved after every third one."""
    short = ["--epochs", "2", "--nodes", "4", "--log-every", "1", "--algorithm", "sgp"]
    short += ["--where", "vmap", "--checkpoint-every", "3", "--out", str(out)]
    image.main([*short, *map(str, arguments)])
    return result(out)


def result(out):
    """The summary's runs and the lines of the metrics, without what depends on the clock."""
    runs = json.loads((out / "summary.json").read_text())["runs"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[{k: v for k, v in x.items() if k not in TIMES} for x in xs] for xs in (runs, lines)]


def interrupted(out, monkeypatch, step, number, *arguments, run=0):
    """Begins or goes on, and gets a signal when this step of this run ends: the exit status."""
    after, steps = saving.Saver.after, []

    def signalled(self, at, last):
        steps.append(at)
        if at == step and sum(a >= b for a, b in itertools.pairwise(steps)) == run:
            signal.raise_signal(number)
        after(self, at, last)

    with monkeypatch.context() as patch:
        patch.setattr(saving.Saver, "after", signalled)
        with pytest.raises(SystemExit) as stop:
            train(out, *arguments)
    return stop.value.code


def folders(out):
    return sorted((out / "checkpoints").iterdir())


def arrays(folder):
    """What a checkpoint holds: the arrays by their paths, and the place without the seconds."""
    about = json.loads((folder / "about" / "metadata").read_text())
    about = json.loads(about["text"])
    kept = {str(i): leaf for i, leaf in enumerate(about["leaves"]) if 0 not in leaf[1]}
    item = {i: np.empty(shape, dtype) for i, (_, shape, dtype) in kept.items()}
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        read = reader.restore(folder / "state", args=ocp.args.PyTreeRestore(item, how))
    place = {k: v for k, v in about["place"].items() if k not in TIMES}
    place["line"] = {k: v for k, v in place["line"].items() if k not in TIMES}
    return {kept[i][0]: array for i, array in read.items()}, place


def assert_same_end(one, other):
    """To the bit."""
    assert result(one) == result(other)
    assert [folder.name for folder in folders(one)] == [folder.name for folder in folders(other)]
    for first, second in zip(folders(one), folders(other), strict=True):
        (a, here), (b, there) = arrays(first / str(STEPS)), arrays(second / str(STEPS))
        assert here == there
        assert a.keys() == b.keys()
        for path in a:
            assert a[path].tobytes() == b[path].tobytes(), path


@pytest.mark.parametrize(
    ("algorithm", "number"),
    [
        ("sgp", signal.SIGINT),
        ("2-osgp", signal.SIGTERM),
        ("easgd", signal.SIGINT),
    ],
)
def test_a_run_that_is_taken_up_again_ends_as_if_it_was_never_stopped(
    algorithm, number, tmp_path, monkeypatch
):
    """After a random step. SIGTERM saves, Ctrl-C does not."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    of = ("--algorithm", algorithm)
    train(once, *of)
    step = random.Random(algorithm).randrange(4, STEPS)
    status = interrupted(twice, monkeypatch, step, number, *of)
    assert status == 128 + number
    saved = step if number == signal.SIGTERM else (step - 1) // 3 * 3
    newest = max(int(folder.name) for folder in folders(twice)[0].iterdir())
    assert newest == saved
    train(twice, *of, "--resume")
    assert_same_end(once, twice)


def test_of_several_runs_the_finished_ones_are_not_trained_again(tmp_path, monkeypatch):
    once, often = tmp_path / "once", tmp_path / "often"
    several = ("--algorithm", "sgp", "allreduce", "dpsgd")
    train(once, *several)
    assert interrupted(often, monkeypatch, 5, signal.SIGTERM, *several, run=1) == 143
    made = [len(list(folder.iterdir())) for folder in folders(often)]
    assert len(made) == 2, "one is finished, one has begun, one has not"
    trained = []
    real = image.train
    monkeypatch.setattr(image, "train", lambda job, run: trained.append(run.name) or real(job, run))
    train(often, *several, "--resume")
    assert trained == ["allreduce, complete, seed 0", "dpsgd, ring, seed 0"]
    assert_same_end(once, often)
    train(often, *several, "--resume")
    assert len(trained) == 2, "nothing is left to do"
    assert result(once) == result(often)


def test_another_number_of_nodes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    assert interrupted(out, monkeypatch, 2, signal.SIGTERM) == 143
    more = ("--resume", "--nodes")
    assert interrupted(out, monkeypatch, 5, signal.SIGTERM, *more, "3") == 143
    (run,), lines = train(out, *more, "4")
    said = capsys.readouterr().out
    assert "sgp goes on after step 2 of sgp: 4 nodes became 3: all start from the average" in said
    assert "sgp goes on after step 5 of sgp: 3 nodes became 4" in said
    assert (run["nodes"], run["steps"], len(run["test_accuracy_nodes"])) == (4, STEPS, 4)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    epochs = [line["epoch"] for line in lines if "loss" in line]
    assert epochs[-1] == pytest.approx((5 * 4 + 3 * 3) * 32 / 512)


def test_from_another_algorithm(tmp_path, capsys):
    first, out = tmp_path / "first", tmp_path / "out"
    train(first, "--algorithm", "allreduce")
    of = ("--initial", folders(first)[0], "--epochs", "4")
    (run,), lines = train(out, *of)
    said = "sgp goes on after step 8 of allreduce: 4 nodes became 4"
    assert said in capsys.readouterr().out
    of_loss = [line for line in lines if "loss" in line]
    assert [line["step"] for line in of_loss] == [*range(9, 17)]
    assert of_loss[-1]["epoch"] == 4
    assert run["consensus_distance"] > 0


def test_overwriting_takes_up_no_old_checkpoint(tmp_path, monkeypatch, capsys):
    assert interrupted(tmp_path, monkeypatch, 4, signal.SIGTERM) == 143
    _, lines = train(tmp_path, "--overwrite")
    assert "goes on" not in capsys.readouterr().out
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
    assert not (folders(tmp_path)[0] / "4").exists()


def test_only_a_job_that_began_there_goes_on_after_a_restart(tmp_path, monkeypatch, capsys):
    """One that died before it took the folder has not, and --overwrite still stands."""
    monkeypatch.setenv("GOSSIPJAX_JOB", "former")
    assert interrupted(tmp_path, monkeypatch, 4, signal.SIGTERM) == 143
    monkeypatch.setenv("GOSSIPJAX_RESTART", "1")
    monkeypatch.setenv("GOSSIPJAX_JOB", "another")
    assert interrupted(tmp_path, monkeypatch, 2, signal.SIGTERM, "--overwrite") == 143
    assert "goes on" not in capsys.readouterr().out
    for step in (5, 7):
        assert interrupted(tmp_path, monkeypatch, step, signal.SIGTERM, "--overwrite") == 143
    summary = json.loads((tmp_path / "summary.json").read_text())
    said = summary["environment"]["resumed"]
    assert said == ["sgp goes on after step 2", "sgp goes on after step 5"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that was stopped."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr)
        patch.setattr(training, "request_cpu_devices", lambda count: None)
        assert interrupted(out, patch, 2, signal.SIGTERM) == 143
    return out


class TestBadInput:
    def fails(self, capsys, out, *arguments):
        with pytest.raises(SystemExit) as stop:
            train(out, *arguments)
        assert stop.value.code not in (0, None)
        return f"{stop.value.code} {capsys.readouterr().err}"

    @pytest.mark.parametrize(
        ("option", "began", "now"),
        [
            ("--rate", "0.1", "0.2"),
            ("--algorithm", "['sgp']", "dpsgd"),
            ("--seed", "[0]", "1"),
            ("--epochs", "2", "3"),
            ("--dirichlet", "None", "0.5"),
            ("--normalization", "none", "batch"),
        ],
    )
    def test_another_option(self, capsys, stopped, option, began, now):
        before = result_files(stopped)
        said = self.fails(capsys, stopped, "--resume", option, now)
        assert f"began with {option} {began}, not " in said
        assert "go on with that, or choose another --out" in said
        assert result_files(stopped) == before

    def test_neither_resumed_nor_overwritten(self, capsys, stopped):
        said = self.fails(capsys, stopped)
        assert "holds another run (metrics.jsonl, summary.json, checkpoints)" in said

    def test_a_number_of_nodes_that_cannot_be(self, capsys, tmp_path, monkeypatch):
        of = ("--algorithm", "dpsgd@bipartite_exponential")
        assert interrupted(tmp_path, monkeypatch, 2, signal.SIGTERM, *of) == 143
        said = self.fails(capsys, tmp_path, *of, "--resume", "--nodes", "5")
        assert "needs an even n; given 5" in said

    def test_initial_without_a_checkpoint(self, capsys, tmp_path):
        for folder in (tmp_path / "missing", tmp_path):
            said = self.fails(capsys, tmp_path / "out", "--overwrite", "--initial", folder)
            assert f"--initial {folder} holds no checkpoint" in said
        assert not (tmp_path / "missing").exists()

    def test_initial_of_another_model(self, capsys, stopped, tmp_path):
        of = ("--normalization", "batch", "--initial", folders(stopped)[0])
        said = self.fails(capsys, tmp_path / "out", *of)
        assert "the checkpoint of step 2 has " in said
        assert "where this run has [0][1]['batch_stats']" in said

    def test_initial_that_leaves_nothing_to_train(self, capsys, stopped, tmp_path):
        of = ("--epochs", "1", "--batch-per-node", "64", "--initial", folders(stopped)[0])
        said = self.fails(capsys, tmp_path / "out", *of)
        assert "is of step 2, and this run ends after step 2: it needs more --epochs" in said

    def test_initial_in_what_is_overwritten(self, capsys, stopped):
        said = self.fails(capsys, stopped, "--overwrite", "--initial", folders(stopped)[0])
        assert "--initial is in what --overwrite takes away" in said
        assert folders(stopped)[0].exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--checkpoint-every", "5"), "--checkpoint-every needs --out, where a run goes on"),
            (("--resume",), "--resume needs --out"),
            (("--checkpoint-every", "0", "--out", "x"), "--checkpoint-every is at least 1, not 0"),
            (("--checkpoint-keep", "0"), "--checkpoint-keep is at least 1, not 0"),
            (("--resume", "--overwrite", "--out", "x"), "choose one"),
        ],
    )
    def test_values(self, capsys, arguments, words):
        with pytest.raises(SystemExit):
            image.main(arguments)
        assert words in capsys.readouterr().err


def result_files(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("*")}


# The program as its users start it, but with the small model. With WAIT it is never at its end.
PROGRAM = """
import os, sys, time
import small
from experiments import image, saving
small.make_small(setattr)
after = saving.Saver.after
def waiting(self, step, last):
    if last and os.environ.get("GOSSIPJAX_RESTART", "0") == "0":
        time.sleep(1000)
    after(self, step, last)
def full(self, step, last):
    if step == 5:
        raise OSError("No space left on device")
    after(self, step, last)
if "WAIT" in os.environ:
    saving.Saver.after = waiting
if os.environ.get("FULL") == os.environ.get("GOSSIPJAX_PROCESS", "none"):
    saving.Saver.after = full
image.main(sys.argv[1:])
"""
TWO = ("--nodes", "2", "--epochs", "1", "--log-every", "4", "--checkpoint-every", "4")


@pytest.fixture(scope="module", autouse=True)
def cache():
    """Programs that were compiled once are read by all processes of all starts."""
    with interruptions.compilation_cache():
        yield


@contextlib.contextmanager
def started(arguments, *launcher, **more):
    """Compiled with the flags of this process, or the results would not be equal to the bit."""
    more |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [*launcher, sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=environment(**more, XLA_FLAGS=os.environ["XLA_FLAGS"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.kill()


def launcher(*options, processes=2):
    of = ("--processes", str(processes), *options, "--")
    return (sys.executable, "-m", "gossipjax.launch", *of)


def wait_for(condition, process):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_train_what_one_does(tmp_path):
    """To the bit. Not so OSGP, whose step is one program in one process and several in two."""
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = (*TWO, "--algorithm", "sgp", "allreduce")
    image.main([*arguments, "--out", str(one)])
    with started([*arguments, "--out", two], *launcher()) as job:
        said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert "2 processes, one CPU device per node" in said
    assert_same_end(one, two)


def test_a_job_outlives_the_end_of_a_process(tmp_path):
    """SIGKILL, at a random moment after the first checkpoint."""
    one, two = tmp_path / "one", tmp_path / "two"
    image.main([*TWO, "--algorithm", "sgp", "--out", str(one)])
    arguments = (*TWO, "--algorithm", "sgp", "--out", two)
    with started(arguments, *launcher("--max-restarts", "1"), WAIT="") as job:
        name = "sgp-one_peer_exponential-seed-0"
        wait_for((two / "checkpoints" / name / "4").exists, job)
        time.sleep(random.uniform(0, 0.3))
        ranks = interruptions.ranks(job.pid)
        killed = ranks[random.choice([0, 1])]
        os.kill(killed, signal.SIGKILL)
        said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert "[launch] restart 1 of 1, with 2 processes" in said
    assert "sgp goes on after step 4" in said
    assert not any(map(is_alive, ranks.values()))
    assert_same_end(one, two)


def test_an_elastic_job_goes_on_with_the_processes_that_are_left(tmp_path):
    """Three nodes on three processes, of which one is killed."""
    arguments = (*TWO, "--algorithm", "sgp", "--out", tmp_path, "--nodes", "3")
    elastic = launcher("--max-restarts", "1", "--elastic", processes=3)
    with started(arguments, *elastic, WAIT="") as job:
        name = "sgp-one_peer_exponential-seed-0"
        wait_for((tmp_path / "checkpoints" / name / "4").exists, job)
        os.kill(interruptions.ranks(job.pid)[1], signal.SIGKILL)
        said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert "[launch] restart 1 of 1, with 2 processes" in said
    assert "sgp goes on after step 4 of sgp: 3 nodes became 2: all start from the average" in said
    (run,), lines = result(tmp_path)
    assert (run["nodes"], len(run["test_accuracy_nodes"])) == (2, 2)
    assert [line["step"] for line in lines if "loss" in line] == [4, run["steps"]]


def test_a_process_that_fails_alone_waits_for_nobody(tmp_path):
    """Right after a checkpoint was begun; which is complete all the same."""
    arguments = (*TWO, "--algorithm", "sgp", "--log-every", "1", "--out", tmp_path)
    with started(arguments, *launcher(), FULL="0") as job:
        said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, said
    assert "[0] error: No space left on device" in said
    assert (tmp_path / "checkpoints" / "sgp-one_peer_exponential-seed-0" / "4").exists()


def test_sigterm_saves(tmp_path):
    arguments = ("--algorithm", "sgp", "--epochs", "9999", "--checkpoint-every", "9")
    with started([*arguments, "--nodes", "2", "--out", tmp_path]) as program:
        folder = tmp_path / "checkpoints" / "sgp-one_peer_exponential-seed-0"
        wait_for((folder / "9").exists, program)
        program.terminate()
        said, _ = program.communicate(timeout=PATIENCE)
    assert program.returncode == 143, said
    last = int(said.rpartition("asked to end: saved after step ")[2].split(";")[0])
    assert (folder / str(last)).exists()
