"""The image program as a job: on several processes, killed, restarted, and stopped by SIGTERM."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import jax
import pytest
from image_runs import SGP, assert_same_end, read_results
from launching import environment, is_alive
from small import make_small

from experiments import image
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection.job import RESTARTED, RESUMED, LaunchedJob, find_pids
from experiments.training import placement

TIMEOUT = 300  # seconds; what takes about ten has hung then


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    # The devices are there already.
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


# The program as its users start it, on a tenth of the data. With WAIT it does not end until it is
# restarted; the process that FULL names has a full disk.
PROGRAM = """
import os, sys, time
import small
from experiments import image
from gossipjax.checkpoint import Checkpoints
small.make_small(setattr)
after = Checkpoints.after
def wait_after(self, state, last=False):
    if last and os.environ.get("GOSSIPJAX_RESTART", "0") == "0":
        time.sleep(1000)
    after(self, state, last)
def fail_after(self, state, last=False):
    if state.step == 5:
        raise OSError("No space left on device")
    after(self, state, last)
if "WAIT" in os.environ:
    Checkpoints.after = wait_after
if os.environ.get("FULL") == os.environ.get("GOSSIPJAX_PROCESS_ID", "none"):
    Checkpoints.after = fail_after
image.main(sys.argv[1:])
"""
TWO_NODES = ("--nodes", "2", "--model", "linear", "--epochs", "1", "--log-every", "4")
TWO_NODES += ("--checkpoint-every", "4")


@pytest.fixture(scope="module", autouse=True)
def cache():
    with compilation_cache():
        yield


@contextlib.contextmanager
def started(arguments, *launcher, **more):
    """Starts the program compiled as in this process: else results would differ by bits."""
    more |= {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(jax.config.read("jax_disable_most_optimizations")),
    }
    with subprocess.Popen(
        [*launcher, sys.executable, "-c", PROGRAM, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            job.kill()


def launcher(*options, processes=2):
    arguments = ("--processes", str(processes), *options, "--")
    return (sys.executable, "-m", "gossipjax.launch", *arguments)


def wait_for(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_of_which_one_is_killed_train_what_one_does(tmp_path):
    """SIGKILL, at a random moment after the first checkpoint. Then all is equal bit for bit."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    arguments = (*TWO_NODES, "--algorithm", "sgp", "allreduce")
    image.main([*arguments, "--out", str(one)])
    restarting = launcher("--max-restarts", "1")
    with started([*arguments, "--out", two], *restarting, WAIT="") as job:
        wait_for((two / "checkpoints" / SGP / "4").exists, job)
        time.sleep(random.uniform(0, 0.3))
        pids = find_pids(job.pid, LaunchedJob.PLACE)
        os.kill(pids[random.choice([0, 1])], signal.SIGKILL)
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "2 processes, one CPU device per node" in output
    assert "[launch] restart 1 of 1, with 2 processes" in output
    assert "sgp resumes after step 4" in output
    # As the fault injection reads it.
    lines = output.splitlines()
    assert [match[1] for match in map(RESTARTED.match, lines) if match] == ["1"]
    assert [match[1] for match in map(RESUMED.match, lines) if match] == ["4"]
    assert not any(map(is_alive, pids.values()))
    assert_same_end(one, two)


def test_an_elastic_job_resumes_on_the_surviving_processes(tmp_path):
    """Three nodes on three processes, of which one is killed."""
    arguments = (*TWO_NODES, "--algorithm", "sgp", "--out", tmp_path, "--nodes", "3")
    elastic = launcher("--max-restarts", "1", "--elastic", processes=3)
    with started(arguments, *elastic, WAIT="") as job:
        wait_for((tmp_path / "checkpoints" / SGP / "4").exists, job)
        os.kill(find_pids(job.pid, LaunchedJob.PLACE)[1], signal.SIGKILL)
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "[launch] restart 1 of 1, with 2 processes" in output
    message = "sgp resumes after step 4 of sgp: 3 nodes became 2: all start from the average"
    assert message in output
    (run,), lines = read_results(tmp_path)
    assert (run["nodes"], len(run["test_accuracy_nodes"])) == (2, 2)
    assert [line["step"] for line in lines if "loss" in line] == [4, run["steps"]]


def test_a_process_that_fails_alone_does_not_wait_for_the_others(tmp_path):
    """It fails right after a checkpoint was started, which is complete all the same."""
    arguments = (*TWO_NODES, "--algorithm", "sgp", "--log-every", "1", "--out", tmp_path)
    with started(arguments, *launcher(), FULL="0") as job:
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 1, output
    assert "[0] error: No space left on device" in output
    assert (tmp_path / "checkpoints" / SGP / "4").exists()


def test_sigterm_saves(tmp_path):
    arguments = (*TWO_NODES, "--algorithm", "sgp", "--epochs", "9999", "--checkpoint-every", "9")
    with started([*arguments, "--out", tmp_path]) as program:
        folder = tmp_path / "checkpoints" / SGP
        wait_for((folder / "9").exists, program)
        program.terminate()
        output, _ = program.communicate(timeout=TIMEOUT)
    assert program.returncode == 143, output
    last = int(output.rpartition("asked to end: saved after step ")[2].split()[0])
    assert (folder / str(last)).exists()
