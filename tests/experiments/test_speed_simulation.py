"""The measurement of simulated nodes as its users run it, and the input that is made ahead."""

import json
import threading
import time

import pytest

from experiments import speed, training


@pytest.fixture(autouse=True)
def devices_are_there(monkeypatch):
    monkeypatch.setattr(training, "request_cpu_devices", lambda count: None)


def test_both_loops_are_measured(tmp_path, capsys):
    out = tmp_path / "out"
    speed.main(["simulation", "--nodes", "2", "9", "--batch-per-node", "2", "--out", str(out)])
    mesh, vmap = json.loads((out / "summary.json").read_text())["runs"]
    assert (mesh["nodes"], mesh["placement"]) == (2, "one CPU device per node")
    assert (vmap["nodes"], vmap["placement"]) == (9, "simulated on one CPU device by vmap")
    for run in (mesh, vmap):
        assert run["algorithm"] == "sgp"
        assert run["images_per_second"] > 0
        assert run["ratio_10"] <= run["ratio"] <= run["ratio_90"]
    assert "Images per second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "0"], "--nodes is at least 1, not 0"),
        (["--steps", "0"], "--steps is at least 1, not 0"),
        (["--nodes", "9", "--where", "mesh"], "--where mesh needs a device per node: 9 nodes"),
        (["--algorithm", "sgd"], "no algorithm is named 'sgd'"),
        (
            ["--algorithm", "dpsgd@bipartite_exponential", "--nodes", "3"],
            "needs an even n; given 3",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, said):
    with pytest.raises(SystemExit) as stop:
        speed.main(["simulation", "--out", str(tmp_path / "out"), *arguments])
    captured = capsys.readouterr()
    assert said in f"{stop.value.code} {captured.out} {captured.err}"
    assert not (tmp_path / "out" / "summary.json").exists()


def test_input_is_made_before_it_is_asked_for():
    made = []

    def items():
        for i in range(5):
            made.append((i, threading.current_thread().name))
            yield i

    ahead = training.ahead(items(), count=2)
    assert next(ahead) == 0
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [i for i, _ in made] == [0, 1, 2]  # the one that was taken, and two
    assert all(name.startswith("input") for _, name in made)
    assert list(ahead) == [1, 2, 3, 4]


def test_an_error_in_the_input_is_raised_where_it_is_asked_for():
    def items():
        yield 1
        raise OSError("the disk is gone")

    ahead = training.ahead(items())
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
