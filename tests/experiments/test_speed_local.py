"""Simulated nodes, the input and an update, measured as their users do it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.speed.__main__ import main
from experiments.speed.local import gossip, simulation
from experiments.speed.local.simulation import LoopSettings
from experiments.speed.local.step import MIN_PASSES, measure_updates
from experiments.training.methods import MethodOptions, make_method
from experiments.training.placement import place_nodes
from gossipjax import prefetch

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"a": (64, 32), "b": (100,), "c": (8, 8, 8)}


def test_both_loops_are_measured(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--nodes", "4", "--batch-size-per-node", "2", "--steps", "1"]
    main(["local", "simulation", *arguments, "--out", str(out)])
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    assert run["placement"] == "one CPU device per node"
    assert (run["nodes"], run["algorithm"]) == (4, "sgp")
    assert run["images_per_second"] > 0
    assert run["ratio_p10"] <= run["ratio"] <= run["ratio_p90"]
    assert "Images per second" in capsys.readouterr().out


def test_gossip_is_compared_with_the_step_without_it_and_with_that_by_hand(tmp_path, capsys):
    out = tmp_path / "out"
    methods = ["sgp", "dpsgd", "1-osgp", "quasi-global", "sgp/int8"]
    arguments = ["--nodes", "4", "--models", "mlp", "--batch-size-per-node", "2", "--turns", "2"]
    main(["local", "gossip", *arguments, "--methods", *methods, "--out", str(out)])
    runs = json.loads((out / "summary.json").read_text())["runs"]
    assert [run["method"] for run in runs] == methods
    for run in runs:
        assert run["ratio_p10"] <= run["ratio"] <= run["ratio_p90"]
        is_by_hand = run["method"] in ("sgp", "dpsgd")
        assert (run["ratio_by_hand"] is not None) == is_by_hand
        assert (run["update_ratio_to_hand"] is not None) == is_by_hand
    assert "over the same without gossip" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "nodes"), [("sgp", 6), ("dpsgd", 4)])
def test_what_is_written_by_hand_is_the_algorithm(name, nodes):
    problem = gossip.Problem("linear", nodes, 2)
    form = gossip.write_by_hand(name, nodes)
    assert form is not None
    method = gossip.make_simulated_method(name, nodes)
    ours, theirs = problem.step(method), problem.step_by_hand(form)
    for number in range(5):
        compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(compare, ours(number)[0], theirs(number)[0])


def test_the_ratio_is_plain_over_simulated_turn_by_turn():
    options = simulation.SimulationOptions(batch_size_per_node=10, steps=5)
    method = make_method("sgp", MethodOptions(4), simulation.OPTIMIZER)
    seconds = [(2.0, 1.0), (4.0, 3.0), (5.0, 1.0)]
    run = simulation.summarize_case(options, method, 4, "here", seconds)
    assert run["placement"] == "here"
    assert run["images_per_second"] == 200 / 4.0
    assert run["plain_images_per_second"] == 200 / 1.0
    assert run["ratio"] == 0.5


COUNT = """
import os, sys, jax
from experiments.speed.local import simulation as loops
settings = loops.LoopSettings({algorithm!r}, 6, 1, "auto")
loops.make_loop(settings)
print(len(jax.devices()), os.environ.get("NPROC"))
"""


@pytest.mark.parametrize(("algorithm", "counts"), [(None, "1 None"), ("sgp", "6 12")])
def test_the_plain_loop_has_the_device_and_threads_of_a_plain_program(algorithm, counts):
    """With the N devices and 2 N threads of the nodes it was a quarter slower."""
    hidden = {"NPROC", "JAX_NUM_CPU_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    code = COUNT.format(algorithm=algorithm)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == counts, done.stderr


def test_the_two_loops_are_two_processes():
    """Of which one runs while the other waits, and none is left behind."""
    settings = LoopSettings(None, 2, 1, "auto")
    with simulation.LoopProcess(settings) as one, simulation.LoopProcess(settings) as other:
        processes = [one._process, other._process]
        for loop in (one, other):
            assert loop.read() == "one device"
        assert one.run(1) > 0
        assert other.run(2) > 0
    assert len({os.getpid(), *(process.pid for process in processes)}) == 3
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_loop_ends_with_its_parent():
    with simulation.LoopProcess(LoopSettings(None, 2, 1, "auto")) as loop:
        loop.read()
        assert loop._process.stdin is not None
        loop._process.stdin.close()
        assert loop._process.wait(30) == 0
        loop._process.stdin = None


def test_a_loop_that_fails_is_reported(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(simulation, "LOOP", "experiments.speed.no_such_loop")
    with pytest.raises(SystemExit) as stopped:
        main(["local", "simulation", "--nodes", "2", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 1
    assert "got its end with status 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes must be an integer >= 1, got 0"),
        (["--algorithm", "sgd"], "no algorithm is named 'sgd'"),
        (
            ["--algorithm", "dpsgd@bipartite_exponential", "--nodes", "3"],
            "n of bipartite_exponential(n) must be even, got 3",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["local", "simulation", "--out", str(tmp_path / "out"), *arguments])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out" / "summary.json").exists()


def test_input_is_made_before_it_is_asked_for():
    made = []

    def items():
        for i in range(5):
            made.append((i, threading.current_thread().name))
            yield i

    prefetched = prefetch(items(), count=2)
    assert next(prefetched) == 0
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [i for i, _ in made] == [0, 1, 2]  # the one that was taken, and two
    assert all(name.startswith("prefetch") for _, name in made)
    assert list(prefetched) == [1, 2, 3, 4]


def test_an_error_in_the_input_is_raised_where_it_is_asked_for():
    def items():
        yield 1
        raise OSError("the disk is gone")

    prefetched = prefetch(items())
    assert next(prefetched) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(prefetched)


@pytest.mark.parametrize("placement", ["mesh", "vmap"])
def test_every_update_is_compared_with_both_copies(placement):
    measurement = measure_updates(place_nodes(placement, 4), SMALL, 2)
    runs = [run for _, measure in measurement.cases for run in measure()]
    assert [run["update"] for run in runs] == list(MIN_PASSES)
    for run in runs:
        assert run["seconds_p10"] <= run["seconds"] <= run["seconds_p90"]
        for copy in ("fresh_buffer", "in_place"):
            assert run[f"ratio_{copy}"] > 0
            assert run[f"copy_bytes_per_second_{copy}"] > 0
    assert measurement.make_table(runs).row_count == len(MIN_PASSES)
