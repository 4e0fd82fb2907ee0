"""The measurement of simulated nodes as its users run it, and the input that is prefetched."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.data.prefetch import prefetch
from experiments.speed.__main__ import main
from experiments.speed.local import simulation
from experiments.speed.local.simulation import LoopSettings
from experiments.training.methods import MethodOptions, make_method

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("placement", "described"),
    [("auto", "one CPU device per node"), ("vmap", "simulated on one CPU device by vmap")],
)
def test_both_loops_are_measured(tmp_path, capsys, placement, described):
    out = tmp_path / "out"
    arguments = ["--nodes", "3", "--batch-size-per-node", "2", "--placement", placement]
    main(["local", "simulation", *arguments, "--steps", "1", "--out", str(out)])
    (run,) = json.loads((out / "summary.json").read_text())["runs"]
    assert (run["nodes"], run["placement"]) == (3, described)
    assert run["algorithm"] == "sgp"
    assert run["images_per_second"] > 0
    assert run["ratio_p10"] <= run["ratio"] <= run["ratio_p90"]
    assert "Images per second" in capsys.readouterr().out


def test_placements_are_compared(tmp_path):
    out = tmp_path / "out"
    arguments = ["--nodes", "4", "--devices", "2", "--batch-size-per-node", "2", "--steps", "1"]
    main(["local", "simulation", *arguments, "--out", str(out)])
    runs = json.loads((out / "summary.json").read_text())["runs"]
    assert [run["placement"] for run in runs] == [
        "2 nodes on each CPU device",
        "one CPU device per node",
        "simulated on one CPU device by vmap",
    ]
    several, single, simulated = (run["bytes_per_device"] for run in runs)
    assert single < several < simulated
    assert min(run["peak_bytes"] for run in runs) > 10**7


def test_the_ratio_is_plain_over_simulated_turn_by_turn():
    options = simulation.Options(batch_size_per_node=10, steps=5)
    method = make_method("sgp", MethodOptions(4), simulation.OPTIMIZER)
    seconds = [(2.0, 1.0), (4.0, 3.0), (5.0, 1.0)]
    run = simulation.summarize_case(options, method, 4, {"placement": "here"}, seconds)
    assert run["placement"] == "here"
    assert run["images_per_second"] == 200 / 4.0
    assert run["plain_images_per_second"] == 200 / 1.0
    assert run["ratio"] == 0.5


COUNT = """
import os, sys, jax
from experiments.speed.local import simulation as loops
settings = loops.LoopSettings({algorithm!r}, 6, 1, "auto")
loop, *_ = loops.make_loop(settings)
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
            assert loop.wait_until_compiled()["placement"] == "one device"
        assert one.run(1)["seconds"] > 0
        assert other.run(2)["seconds"] > 0
    assert len({os.getpid(), *(process.pid for process in processes)}) == 3
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_loop_ends_with_its_parent():
    with simulation.LoopProcess(LoopSettings(None, 2, 1, "auto")) as loop:
        loop.wait_until_compiled()
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
        (["--steps", "0"], "--steps must be an integer >= 1, got 0"),
        (["--algorithm", "sgd"], "no algorithm is named 'sgd'"),
        (["--nodes", "4", "6", "--devices", "4"], "--devices must divide --nodes, got 4 devices a"),
        (
            ["--nodes", "4", "--devices", "2", "--placement", "vmap"],
            "--placement must be auto beside --devices, got vmap",
        ),
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


def test_a_placement_that_is_impossible_is_refused(tmp_path, capsys, monkeypatch):
    """Found by the process of the loop only; on a CPU there are always enough virtual devices."""
    script = tmp_path / "refusing.py"
    script.write_text('print(\'{"error": "--placement mesh needs a device per node"}\')')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(simulation, "LOOP", "refusing")
    with pytest.raises(SystemExit) as stopped:
        main(["local", "simulation", "--nodes", "2", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "--placement mesh needs a device per node" in capsys.readouterr().err


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
