"""The studies as their users run them: their numbers and files."""

import json

import numpy as np
import pytest

from experiments import asynchronous_liars, liars, outer_momentum, scaling


def test_lies_ruin_the_average_and_not_the_median(tmp_path, capsys):
    out = tmp_path / "out"
    options = ("--honest", "6", "--liars", "1", "--seeds", "2", "--steps", "40")
    which = ("--graph", "two worlds", "--rule", "average", "CoordinateMedian")
    liars.main([*options, *which, "--attack", "none", "sign flip", "--out", str(out)])
    runs = json.loads((out / "summary.json").read_text())["runs"]
    worst = {(run["rule"], run["attack"]): np.mean(run["worst_accuracy"]) for run in runs}
    assert len(worst) == 4
    assert worst["average", "sign flip"] < worst["CoordinateMedian", "sign flip"] - 0.1
    assert all(min(run["mean_accuracy"]) >= min(run["worst_accuracy"]) for run in runs)
    assert (out / "worst.png").stat().st_size > 5000
    assert "sign flip" in capsys.readouterr().out


@pytest.mark.parametrize("graph", ["two worlds", "erdos-renyi"])
def test_every_honest_node_hears_every_liar(graph):
    (matrix,) = liars.make_schedule(graph, 8, 2).matrices()
    assert (matrix[:8, 8:] > 0).all()
    assert matrix[8, 9] == 0


def test_clipping_holds_an_asynchronous_node_that_shouts(tmp_path):
    out = tmp_path / "out"
    options = "--case shouts --algorithm sgp --seeds 1 --steps 30 --clip 0 1"
    asynchronous_liars.main([*options.split(), "--out", str(out)])
    off, on = json.loads((out / "summary.json").read_text())["runs"]
    assert (off["clip"], on["clip"]) == (0, 1)
    assert off["mean"][0] < 30 < 50 < on["mean"][0]
    assert off["clipped"] == [0] < on["clipped"]


def test_gossip_and_averages_over_more_nodes(tmp_path, capsys):
    """All nodes together have the same images, so AllReduce learns the same with 4 and 8 nodes."""
    options = "--nodes 4 8 --steps 16 --seed 0 1 --total-batch-size 64 --batch total --every 4"
    methods = ("--method", "allreduce", "sgp", "local-sgd", "--graph", "ring")
    scaling.main([*options.split(), *methods, "--out", str(tmp_path / "out")])
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    found = {(run["method"], run["nodes"]): run for run in runs}
    assert len(found) == 6
    assert found["allreduce", 4]["loss"] == pytest.approx(found["allreduce", 8]["loss"], abs=0.2)
    for (method, nodes), run in found.items():
        assert run["batch_size_per_node"] == 64 // nodes
        assert run["curve"][-1] < run["curve"][0]
        assert len(run["curve"]) == len(run["points"]) == 3
        assert (run["distance"][0] > 1e-3) == (method == "sgp")
        assert run["worst_accuracy"] <= run["mean_accuracy"]
    assert "Scaling" in capsys.readouterr().out


def test_effective_rates_are_of_the_measured_cosine(tmp_path):
    options = "--every 4 --momentum 0 0.9 --outer-rate 0.5 1 --steps 32 --nodes 2 --seed 0 1"
    outer_momentum.main([*options.split(), "--out", str(tmp_path / "out")])
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    rows = outer_momentum.list_rows(runs)
    assert len(rows) == 4
    for row in rows:
        assert -1 <= row["cosine"] <= 1
        factor = 1 + row["momentum"] / (1 - row["momentum"] * row["cosine"])
        assert row["effective"] == pytest.approx(row["outer_rate"] * factor)
    best = outer_momentum.pick_best(rows)
    assert [row["momentum"] for row in best] == [0.0, 0.9]
    assert (tmp_path / "out" / "losses.png").stat().st_size > 5000
