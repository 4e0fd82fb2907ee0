"""The program of liars as its users run it: its graphs, numbers and files."""

import json

import numpy as np
import pytest

from experiments import asynchronous_liars, liars


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
    options = (
        "--case",
        "shouts",
        "--algorithm",
        "sgp",
        "--seeds",
        "1",
        "--steps",
        "30",
        "--clip",
        "0",
        "1",
    )
    asynchronous_liars.main([*options, "--out", str(out)])
    off, on = json.loads((out / "summary.json").read_text())["runs"]
    assert (off["clip"], on["clip"]) == (0, 1)
    assert off["mean"][0] < 30 < 50 < on["mean"][0]
    assert off["clipped"] == [0] < on["clipped"]
