"""The image program as a job: on several processes, killed, restarted, and stopped by SIGTERM."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import jax
import pytest
from image_runs import SGP, assert_same_end
from launching import TIMEOUT, environment, is_alive
from small import make_small

from experiments import image
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection.job import RESTARTED, RESUMED, LaunchedJob, find_pids
from experiments.training import placement


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)
    # The devices are there already.
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)


# The program as its users start it, on a tenth of the data. The process that FULL names has a full
# disk at its last step, until it is restarted.
PROGRAM = """
import os, sys
import small
from experiments import image
from gossipjax.checkpoint import Checkpoints
small.make_small(setattr)
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
TWO_NODES += ("--checkpoint-every", "4", "--algorithm", "sgp")


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


def launcher(*options, processes):
    arguments = ("--processes", str(processes), "--restart-delay", "0", *options, "--")
    return (sys.executable, "-m", "gossipjax.launch", *arguments)


def wait_for(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def newest(folder):
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def test_two_processes_of_which_one_fails_train_what_one_does(tmp_path):
    """The disk is full; the checkpoint before is complete all the same. All is equal to the bit."""
    one = tmp_path / "one"
    two = tmp_path / "two"
    image.main([*TWO_NODES, "--out", str(one)])
    restarting = launcher("--max-restarts", "1", processes=2)
    with started([*TWO_NODES, "--out", two], *restarting, FULL="0") as job:
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, output
    assert "2 processes, one CPU device per node" in output
    assert "[0] error: No space left on device" in output
    # As the fault injection reads it.
    lines = output.splitlines()
    assert [match[1] for match in map(RESTARTED.match, lines) if match] == ["1"]
    assert [match[1] for match in map(RESUMED.match, lines) if match] == ["4"]
    assert_same_end(one, two)


def test_an_elastic_job_resumes_on_the_surviving_process(tmp_path):
    """Two nodes on two processes, of which one is killed; then SIGTERM, which saves."""
    arguments = [*TWO_NODES, "--out", str(tmp_path)]
    arguments[arguments.index("--epochs") + 1] = "9999"
    folder = tmp_path / "checkpoints" / SGP
    with started(arguments, *launcher("--max-restarts", "1", "--elastic", processes=2)) as job:
        wait_for(lambda: newest(folder) > 0, job)
        pids = find_pids(job.pid, LaunchedJob.PLACE)
        os.kill(pids[1], signal.SIGKILL)
        lines = []
        assert job.stdout is not None
        while not lines or "sgp resumes after step " not in lines[-1]:
            lines.append(job.stdout.readline())
            assert lines[-1], lines
        step = int(lines[-1].rpartition("sgp resumes after step ")[2].split()[0])
        wait_for(lambda: newest(folder) > step, job)
        job.terminate()
        output, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 143, output
    assert any("[launch] restart 1 of 1, with 1 processes" in line for line in lines)
    assert "of sgp: 2 nodes became 1: all start from the average" in lines[-1]
    last = int(output.rpartition("asked to end: saved after step ")[2].split()[0])
    assert newest(folder) == last > step
    assert not any(map(is_alive, pids.values()))
