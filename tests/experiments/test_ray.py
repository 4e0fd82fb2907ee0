"""The programs for Ray, on a Ray of this machine, undisturbed and with a worker that is killed.

The tests marked `ray` need `ray[train]`.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import gossipjax as gx
from experiments.cluster import digits
from gossipjax.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="not installed: ray"),
]
ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2
STEPS = 60
KILL_AT = 50


@pytest.fixture
def run_program():
    """`run_program(name, *arguments)` returns what a program printed, and its accuracy."""

    def run(name, *arguments):
        command = [sys.executable, "-m", f"experiments.cluster.{name}", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder}
        environment.pop("XLA_FLAGS", None)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        (accuracy,) = re.findall(r"accuracy of the average model (0\.\d+)", printed)
        return printed, float(accuracy)

    # Not `tmp_path`: Ray's sockets are in it, and the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield run


def read_last(folder):
    """The newest checkpoint of a run, as NumPy arrays."""
    nodes = gx.Nodes(WORKERS)
    start = *nodes.init(digits.make_tx({"nodes": WORKERS}), digits.init()), None
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(lambda: start))
    assert restored is not None
    assert restored.step == STEPS
    return jax.tree.leaves(restored.state)


def read_steps(event, printed):
    """The steps of all nodes at an event that a node told."""
    (steps,) = re.findall(rf"node 1 {event}; together they have taken (\d+) steps", printed)
    return int(steps)


def test_ray_train_goes_on_bit_for_bit_after_the_death_of_a_worker(run_program, tmp_path):
    options = ("--workers", WORKERS, "--steps", STEPS, "--checkpoint-every", 10, "--storage")
    _, undisturbed = run_program("ray_train", *options, tmp_path / "undisturbed")
    arguments = (*options, tmp_path / "killed", "--kill-at", KILL_AT)
    printed, accuracy = run_program("ray_train", *arguments)
    assert f"worker 1 dies before step {KILL_AT}" in printed
    starts = {int(step) for step in re.findall(r"go on from step (\d+)", printed)}
    assert min(starts) == 0
    assert KILL_AT - 20 <= max(starts) < KILL_AT  # one may still be written
    pairs = zip(read_last(tmp_path / "undisturbed"), read_last(tmp_path / "killed"), strict=True)
    for expected, actual in pairs:
        np.testing.assert_array_equal(actual, expected)
    assert accuracy == undisturbed > 0.85


def test_ray_replaces_an_asynchronous_node_while_the_others_train(run_program):
    options = ("--workers", 2, "--steps", 200, "--seconds", 0.1)
    printed, accuracy = run_program("ray_asynchronous", *options, "--kill-at", 40)
    assert read_steps("is back", printed) > read_steps("dies", printed) + 1
    assert accuracy > 0.85
