"""The measurement of simulated nodes as its users run it, and the input that is prefetched."""

import json
import threading
import time

import jax
import pytest

from experiments.speed import simulation
from experiments.speed.__main__ import main
from experiments.prefetch import prefetch


@pytest.fixture(autouse=True)
def _use_the_devices_of_the_tests(monkeypatch):
    monkeypatch.setattr(simulation, "request_cpu_devices", lambda count: None)


def test_both_loops_are_measured(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--nodes", "2", "9", "--batch-size-per-node", "2", "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # Flax's mean pooling divides by an integer
        main(["simulation", *arguments])
    mesh, vmap = json.loads((out / "summary.json").read_text())["runs"]
    assert (mesh["nodes"], mesh["placement"]) == (2, "one CPU device per node")
    assert (vmap["nodes"], vmap["placement"]) == (9, "simulated on one CPU device by vmap")
    for run in (mesh, vmap):
        assert run["algorithm"] == "sgp"
        assert run["images_per_second"] > 0
        assert run["ratio_p10"] <= run["ratio"] <= run["ratio_p90"]
    assert "Images per second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes must be an integer >= 1, got 0"),
        (["--steps", "0"], "--steps must be an integer >= 1, got 0"),
        (
            ["--nodes", "9", "--placement", "mesh"],
            "--placement mesh needs a device per node, got 9 nodes",
        ),
        (["--algorithm", "sgd"], "no algorithm is named 'sgd'"),
        (
            ["--algorithm", "dpsgd@bipartite_exponential", "--nodes", "3"],
            "n of bipartite_exponential(n) must be even, got 3",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["simulation", "--out", str(tmp_path / "out"), *arguments])
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
