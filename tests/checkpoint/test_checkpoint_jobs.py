"""Jobs of real processes: two that write and agree, one killed in a save, one ended in the last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launching import PROLOGUE, ROOT, run_job
from short_runs import names_in

from gossipjax.checkpoint import Checkpoints


@pytest.mark.smoke
def test_two_processes_write_their_rows_and_agree(tmp_path):
    """On what is damaged, on one model, and to end when one of them is asked to."""
    worker = Path(__file__).with_name("worker.py").read_text()
    options = ("--processes", 2, "--local-devices", 2)
    job = run_job(worker, *options, FOLDER=str(tmp_path))
    assert "failed (exit status 143)" in job.stderr, job.stderr
    for rank in range(2):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        lines = [line.removeprefix(f"[{rank}] ") for line in lines if "Gloo" not in line]
        # The end of a message of Gloo, a number, may come as a line.
        assert [line for line in lines if not line.isdigit()] == [
            f"process {rank} holds nodes {[2 * rank, 2 * rank + 1]}",
            "this job has the lock",
            "restored step 4 with 0 warnings",
            "restored step 2 with 1 warnings",
            "resumed step 2 with {'nodes': 4}",
            "ends after step 5",
        ]
    assert names_in(tmp_path) == ["2", "4.corrupted", "5"]


KILLED = """
import jax, jax.numpy as jnp, numpy as np, optax
import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

gx.launch.initialize()
nodes = gx.Nodes(mesh=gx.launch.mesh())
folder = os.environ["FOLDER"]
STEPS = 8

def make_tx(saved):
    gossip = gx.osgp(gx.topology.one_peer_exponential(saved["nodes"]))
    return optax.chain(optax.sgd(0.1, momentum=0.9), gossip)

def train(state, checkpoints=None):
    train_step = gx.TrainStep(lambda x, goal: (x - goal, None), make_tx({"nodes": 2}), nodes=nodes)
    goals = nodes.put(np.arange(2.0, dtype=np.float32)[nodes.local])
    while state.step < STEPS:
        arrays = train_step(state.step, state.params, state.opt_state, goals)[:2]
        state = TrainState(state.step + 1, *arrays)
        if checkpoints is not None:
            checkpoints.after(state)
    return state

def make_start():
    return TrainState(0, *nodes.init(make_tx({"nodes": 2}), jnp.ones(1000)))

def rename_or_die(source, target, rename=os.rename):
    # Ends process 0 when the arrays of step 4 are written, and have no name yet.
    if restart == 0 and Path(target) == Path(folder, "4.orbax-checkpoint-tmp", "state"):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)

os.rename = rename_or_die
with Checkpoints(folder, every=2) as checkpoints:
    state = checkpoints.resume(make_start(), nodes, make_tx)
    if rank == 0:
        print("starts at", state.step, sorted(os.listdir(folder)), flush=True)
    state = train(state, checkpoints)
expected = train(make_start())
for a, b in zip(jax.tree.leaves(state.arrays), jax.tree.leaves(expected.arrays), strict=True):
    np.testing.assert_array_equal(a.addressable_data(0), b.addressable_data(0))
print("as if never killed")
"""


def test_sigkill_in_a_save(tmp_path):
    """The launcher starts the job again at once: its own lock, which was left, does not stop it."""
    options = ("--processes", 2, "--max-restarts", 1, "--restart-delay", 0)
    job = run_job(PROLOGUE + KILLED, *options, FOLDER=str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert "rank 0 failed (SIGKILL, signal 9)" in job.stderr
    lines = [line for line in job.stdout.splitlines() if "Gloo" not in line]
    assert sorted(lines) == [
        "[0] as if never killed",
        "[0] starts at 0 ['.lock']",
        "[0] starts at 2 ['.lock', '2', '4.orbax-checkpoint-tmp']",
        "[1] as if never killed",
    ]
    assert names_in(tmp_path) == ["4", "6", "8"]


SLOW_LAST_WRITE = """
import os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np, optax
import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState, _store
nodes = gx.Nodes(2)
real_make = _store.ocp.CheckpointManager._finalize
def slow(self, *args, **kwargs):
    time.sleep(2)
    return real_make(self, *args, **kwargs)
_store.ocp.CheckpointManager._finalize = slow
try:
    with Checkpoints(sys.argv[1], every=1) as checkpoints:
        state = TrainState(1, *nodes.init(optax.sgd(0.1), jnp.ones(3)))
        checkpoints.after(state, last=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("in the last write", os.path.isdir(sys.argv[1] + "/1"), flush=True)
    print("not reached", flush=True)
finally:
    print("cleaned up", flush=True)
"""


def test_sigterm_in_the_last_write_completes_it_and_ends_with_143(tmp_path):
    """As after any other step: the program unwinds, no signal kills it."""
    run = subprocess.run(
        [sys.executable, "-c", SLOW_LAST_WRITE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert run.stdout.splitlines() == ["in the last write False", "cleaned up"], run.stderr
    assert run.returncode == 143, run.stderr
    assert names_in(tmp_path) == ["1"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.wait() == [1]
