"""Asynchronous training by the programs: real jobs, one with a kill, and options."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_files import read_run
from small import make_small

import gossipjax as gx
from experiments import image
from experiments.fault_injection.asynchronous import AsynchronousJob
from experiments.fault_injection.job import find_pids
from experiments.training import asynchronous_job as job_module
from experiments.training.asynchronous import ASYNCHRONOUS

ROOT = Path(__file__).parent.parent.parent
TIMEOUT = 120  # seconds, for what takes about twenty
NODES = 3
BATCH = 32
TRAINING_EXAMPLES = 512
SHORT = ("--nodes", str(NODES), "--model", "linear", "--log-every", "2")

# The program as its users start it, on a tenth of the data. Steps last long enough for a few
# messages; with GO, those after the tenth take thirty times as long until that file exists.
PROGRAM = """
import os, sys, time
import small
import gossipjax as gx
from experiments import image
from experiments.training import asynchronous as loop
small.make_small(setattr)
loop.PATIENCE = 2.0
node_type = gx.asynchronous.Node
step = node_type.step
def step_slowly(self, *arguments):
    waits = "GO" in os.environ and not os.path.exists(os.environ["GO"])
    time.sleep(0.3 if waits and self.statistics.steps >= 10 else 0.01)
    return step(self, *arguments)
node_type.step = step_slowly
image.main(sys.argv[1:])
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@contextlib.contextmanager
def started(folder, *arguments, restarts=0, **more):
    """Starts a job whose results are in `folder / "out"`."""
    launcher = ["-m", "gossipjax.launch", "--asynchronous", "--processes", str(NODES)]
    launcher += ["--max-restarts", str(restarts), "--restart-delay", "0", "--grace", "5"]
    program = [sys.executable, "-c", PROGRAM, *SHORT, *arguments, "--out", str(folder / "out")]
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    more |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    more |= {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, *launcher, "--", *program],
        env=kept | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.terminate()  # the processes, too


def wait_for(condition, job):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def require_closed_account(folder, run):
    journals = sorted((folder / "out" / "nodes").glob(f"{run['algorithm']}-*/journals/*/*.jsonl"))
    account = gx.asynchronous.account(journals)
    assert account.founded == NODES
    assert abs(account.difference) < 1e-6
    finals = dict(zip(run["places_nodes"], run["weight_nodes"], strict=True))
    assert {place: float(w) for place, w in account.living.items()} == pytest.approx(finals)
    return account


def test_a_job_trains_with_all_algorithms(tmp_path):
    algorithms = ["async-sgp", "async-adpsgd", "async-outer"]
    options = ["--epochs", "8", "--outer-every", "4", "--outer-rate", "0.7"]
    options += ["--outer-momentum", "0.5", "--outer-nesterov"]
    with started(tmp_path, "--algorithm", *algorithms, *options) as job:
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "3 asynchronous nodes, 40 steps each on average" in output
    summary, lines = read_run(tmp_path / "out")
    assert [run["algorithm"] for run in summary["runs"]] == algorithms
    asked = 40 * NODES  # 43 steps of 8 epochs, in whole periods of 4
    for run in summary["runs"]:
        assert run["topology"] == ASYNCHRONOUS[run["algorithm"]].topology
        assert run["nodes"] == NODES
        assert asked <= sum(run["steps_nodes"]) <= 1.5 * asked
        assert len(run["test_accuracy_nodes"]) == len(run["staleness_nodes"]) == NODES
        assert min(*run["test_accuracy_nodes"], run["test_accuracy_average_model"]) > 0.5
        assert all(0 <= staleness <= asked for staleness in run["staleness_nodes"])
        for sent, sent_bytes in zip(run["messages_nodes"], run["bytes_nodes"], strict=True):
            assert 0 < sent <= asked
            assert sent_bytes >= sent * 4 * 7850  # the parameters of the model
        assert run["examples_per_second"] > 0
        losses = [line["loss"] for line in lines if line["run"] == run["run"]]
        assert losses[-1] < losses[0]
        account = require_closed_account(tmp_path, run)
        assert account.dead == account.in_flight == 0


def read_events(folder, place):
    """The lines of a node, without one that is being written."""
    events = []
    for path in (folder / "out").glob(f"nodes/*/journals/*/{place}.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                events.append(json.loads(line))
    return events


def count_steps(folder, place):
    return sum(event["event"] == "end" for event in read_events(folder, place))


def test_a_killed_node_is_back_and_no_mass_is_lost(tmp_path):
    arguments = ("--algorithm", "async-sgp", "--epochs", "30")
    with started(tmp_path, *arguments, restarts=1, GO=str(tmp_path / "go")) as job:
        wait_for(lambda: all(count_steps(tmp_path, place) > 10 for place in range(NODES)), job)
        os.kill(find_pids(job.pid, AsynchronousJob.PLACE)[1], signal.SIGKILL)
        before = [count_steps(tmp_path, place) for place in (0, 2)]
        wait_for(lambda: any(e["event"] == "admit" for e in read_events(tmp_path, 1)), job)
        after = [count_steps(tmp_path, place) for place in (0, 2)]
        (tmp_path / "go").touch()
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "[launch] rank 1 failed (SIGKILL, signal 9), the others go on" in output
    assert output.count("[launch] rank 1: restart 1 of 1") == 1
    assert all(later >= earlier + 5 for earlier, later in zip(before, after, strict=True))
    (run,) = read_run(tmp_path / "out")[0]["runs"]
    assert len(run["test_accuracy_nodes"]) == NODES  # it is a member at the end
    assert min(run["test_accuracy_nodes"]) > 0.5
    events = read_events(tmp_path, 1)
    assert len({event["process"] for event in events if event["event"] == "life"}) == 2
    assert count_steps(tmp_path, 1) > 11
    account = require_closed_account(tmp_path, run)
    assert account.dead > 0


# Command lines, without processes: what is refused before training starts.


@pytest.fixture
def as_node(monkeypatch):
    """This process is at a place of a job of `nodes`."""
    make_small(monkeypatch.setattr)
    monkeypatch.setattr(job_module, "START_SECONDS", 0.2)
    for name in list(os.environ):
        if name.startswith(("GOSSIPJAX_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def set_place(place=0, nodes=NODES, job="this job"):
        addresses = [f"127.0.0.1:{5000 + number}" for number in range(nodes)]
        monkeypatch.setenv("GOSSIPJAX_NODE_ADDRESSES", ",".join(addresses))
        monkeypatch.setenv("GOSSIPJAX_NODE", str(place))
        monkeypatch.setenv("GOSSIPJAX_JOB", job)

    return set_place


def require_refusal(capsys, message, *arguments, status=2):
    with pytest.raises(SystemExit) as stop:
        image.main([*SHORT, *arguments])
    error = capsys.readouterr().err
    assert stop.value.code == status, error
    assert re.search(message, " ".join(error.split())), error


def test_options_that_do_not_fit(as_node, capsys, tmp_path):
    message = "must run as one process per node, got one process: python -m gossipjax"
    require_refusal(capsys, message, "--algorithm", "async-sgp")
    as_node()
    out = tmp_path / "out"
    for arguments, message in (
        ("--algorithm async-sgp sgp", "--algorithm must be of one kind, got async-sgp sgp: .*"),
        ("--nodes 4", "--nodes must be the number of processes, 3, got 4"),
        ("--normalization batch --batch-stats mix", "--batch-stats must be local with async-sgp"),
        ("--topology ring", "--topology must not be given with async-sgp"),
        ("--fsdp 2", "--fsdp must be 1 with async-sgp, whose messages are of whole models, got 2"),
        ("--algorithm async-outer", "async-outer must come with --outer-every"),
        ("--wire top_k", "--wire must be float32 or bfloat16 or int8 or int4 with .*, got top_k"),
    ):
        given = ["--epochs", "1", "--algorithm", "async-sgp", *arguments.split()]
        require_refusal(capsys, message, "--out", str(out), *given)
    assert not out.exists()


def test_results_need_a_folder_that_all_share(as_node, capsys, tmp_path):
    as_node(place=1)
    message = "--out must be a folder that all nodes share, got .* node 0 has not created for 0.2 s"
    arguments = ("--algorithm", "async-sgp", "--out", str(tmp_path / "out"))
    require_refusal(capsys, message, *arguments, status=1)


def test_a_run_is_resumed_with_its_options_and_data(as_node, capsys, tmp_path):
    as_node()
    for changes, message in (
        ({"nodes": 5}, "--processes of the launcher must be 5, .* got 3"),
        ({}, "dataset must be 'another', as in the run in .*, got"),
    ):
        options = {"nodes": NODES, "learning_rate": 0.1} | changes
        summary = {"options": options, "environment": {"dataset": "another"}, "runs": []}
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        arguments = ("--algorithm", "async-sgp", "--out", str(tmp_path), "--resume")
        require_refusal(capsys, message, *arguments)
