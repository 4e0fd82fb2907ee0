"""A process that is alive but stuck: who it is, its stack, and the restart."""

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from launching import PROLOGUE, ROOT

import gossipjax as gx
from gossipjax.launch.__main__ import main
from gossipjax.launch._progress import NO_STEP, Beat
from gossipjax.launch._stall import Watched, find_stall

# Without JAX: the module is loaded from its file.
LOAD = f"""
import runpy
advance = runpy.run_path({str(ROOT / "gossipjax/launch/_progress.py")!r})["advance"]
def read_next_batch(): time.sleep(1000)
"""
SECOND = 10**9


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Runs a small program under the launcher; returns its status and what the launcher said."""

    def run(code, *options, processes=3):
        monkeypatch.setenv("FOLDER", str(tmp_path))
        launcher = ["--processes", str(processes), "--restart-delay", "0", *map(str, options)]
        status = main([*launcher, "--", sys.executable, "-c", PROLOGUE + LOAD + code])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


def watched(rank, *, step=NO_STEP, at: float | None = 0.0, quiet=21.0, slow=False):
    """A process that has advanced at a time, in seconds, or never (None)."""
    nanoseconds = 0 if at is None else int((1000 + at) * SECOND)
    return Watched(rank, Path(), Beat(100 + rank, nanoseconds, step, slow), quiet)


@pytest.mark.parametrize(
    ("processes", "ranks"),
    [
        # It goes on: one advances, or has more time.
        ([watched(0), watched(1, quiet=19.0)], None),
        ([watched(0, step=1), watched(1, step=1, slow=True)], None),
        ([watched(0), watched(1, at=None)], None),
        ([], None),
        # Behind in steps; where steps are equal or unknown, in time.
        ([watched(0, step=7, at=0.1), watched(1, step=6), watched(2, step=9)], [1]),
        ([watched(0, step=7, at=2.5), watched(1, step=7, at=0.0), watched(2, step=7, at=2.4)], [1]),
        ([watched(0, at=30.0), watched(1), watched(2, step=5, at=30.0)], [1]),
        ([watched(0, step=7, at=0.0), watched(1, step=7, at=1.0)], []),
        ([watched(0, step=8), watched(1, step=7, slow=True, quiet=601.0)], [1]),
        ([watched(0)], [0]),
        # At the start.
        ([watched(0, at=None, quiet=601.0), watched(1)], [0]),
        ([watched(0, at=None, quiet=601.0), watched(1, at=None, quiet=601.0)], []),
    ],
)
def test_who_is_stuck(processes, ranks):
    found = find_stall(processes, 20.0, 600.0)
    assert (None if found is None else found[0]) == ranks


def test_a_hung_loader_is_named_with_its_line_and_the_job_restarts(run):
    """The others are a step further, and wait for it."""
    code = (
        "for step in range(20):\n"
        "    advance(step); time.sleep(0.02)\n"
        "    if restart == 0 and step == 10 + (rank != 1): read_next_batch()\n"
        "print('processes', os.environ['GOSSIPJAX_NUM_PROCESSES'])"
    )
    options = ("--stall", 1, "--max-restarts", 1)
    status, output, report = run(code, *options)
    assert status == 0, report
    lines = report.splitlines()
    own = [line for line in lines if not line.startswith("[") or line.startswith("[launch]")]
    assert own[0] == "[launch] rank 1 stalled: behind the others in steps, stopping the job"
    assert re.fullmatch(r"    rank 1, no advance for 1\.\d s, the last at step 10", own[1])
    assert [line.partition("the last ")[2] for line in own[2:4]] == ["at step 11"] * 2
    assert own[-1] == "[launch] restart 1 of 1 in 0 s"
    for rank in range(3):
        assert any(re.fullmatch(rf"\[{rank}\] .* in read_next_batch", line) for line in lines)
    assert sorted(output.splitlines()) == [f"[{rank}] processes 3" for rank in range(3)]


def test_a_stopped_process_is_named_with_its_stack(run):
    """The status says that it was stuck."""
    code = (
        "for step in range(3): advance(step)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "advance(3); time.sleep(1000)"
    )
    status, _, report = run(code, "--stall", 0.5)
    assert status == 124
    assert report.startswith("[launch] rank 1 stalled: behind the others in steps, stopping")
    assert report.count('File "<string>", line ') == 3


def test_what_is_slow_has_more_time(run):
    """The start, what the program says is slow, and a process that waits for another."""
    # All three take longer than the limit, and a step a thirtieth of it: a busy machine needs that.
    code = (
        "time.sleep(2.5)\n"
        "for step in range(3):\n"
        "    advance(step, slow=step == 1); time.sleep(2.5 if step == 1 else 0)\n"
        "for batch in range(40 * (rank == 0)):\n"
        "    advance(); time.sleep(0.06)\n"
        "announce(rank); wait_for(0)"
    )
    status, _, report = run(code, "--stall", 2, processes=2)
    assert (status, report) == (0, "")


def test_a_program_that_never_advances_is_named(run):
    status, _, report = run("time.sleep(1000)", "--stall", 0.2, "--stall-slow", 0.6)
    assert status == 124
    assert report.count("s: the program must call gx.TrainStep") == 3


def test_a_stuck_node_is_started_again_and_the_others_go_on(run):
    code = (
        "for step in range(40):\n"
        "    advance(step); time.sleep(0.05)\n"
        "    if rank == 1 and restart == 0 and step == 5: read_next_batch()\n"
        "print('done', restart)"
    )
    options = ("--asynchronous", "--stall", 0.8, "--max-restarts", 1)
    status, output, report = run(code, *options)
    assert status == 0
    assert report.startswith("[launch] rank 1 stalled: not advancing, the others go on\n")
    assert "in read_next_batch\n" in report
    assert report.endswith("[launch] rank 1: restart 1 of 1 in 0 s\n")
    assert sorted(output.splitlines()) == ["[0] done 0", "[1] done 1", "[2] done 0"]


def test_a_train_step_says_that_it_advances(monkeypatch):
    """Each call, and that it is slow where a program is compiled: per shape of inputs."""
    calls = []
    monkeypatch.setattr(gx.launch, "advance", lambda *args, **more: calls.append((*args, more)))
    nodes = gx.Nodes(4)
    tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(4)))
    train_step = gx.TrainStep(lambda z, x: (z - x.mean(), None), tx, nodes=nodes)
    z, opt_state = nodes.init(tx, jnp.zeros(()))
    for step, width in enumerate([1, 1, 1, 1, 2, 1, 2]):
        z, opt_state, _ = train_step(step, z, opt_state, jnp.ones((4, width)))
    steps = [(step, more["slow"]) for step, more in calls if more]
    assert steps == list(enumerate([True, False, False, False, True, False, False]))
    # What is slow ends when it is done, and not with the next step, before which a loader may hang.
    assert [step for step, more in calls if not more] == [0, 4]
