"""The averaging program as its users run it: its numbers, files, options and errors."""

import math

import numpy as np
import oracle
import pytest
from report_files import read_run

import gossipjax as gx
from experiments.averaging import __main__ as averaging


def run(tmp_path, *arguments):
    """Runs the program with few seeds; returns the summary and the lines of the metrics."""
    out = tmp_path / "out"
    averaging.main(["--out", str(out), "--seeds", "3", "--rounds", "8", *arguments])
    return read_run(out)


def median_errors(lines, topology, nodes):
    curve = [line for line in lines if (line["topology"], line["nodes"]) == (topology, nodes)]
    assert [line["round"] for line in curve] == list(range(len(curve)))
    return [line["error_median"] for line in curve]


def test_default_topologies(tmp_path, capsys):
    summary, lines = run(tmp_path)
    assert len(lines) == 9 * (8 + 1)
    for record in summary["runs"]:
        errors = median_errors(lines, record["topology"], 32)
        assert (record["error_after_5_rounds"], record["final_error"]) == (errors[5], errors[-1])
    for topology in ("one_peer_exponential", "bipartite_exponential", "base_graph"):
        errors = median_errors(lines, topology, 32)
        assert errors[0] == 1
        assert errors[4] > 0.1
        assert max(errors[5:]) < 1e-15
    ring = median_errors(lines, "ring", 32)
    assert (np.diff(ring) < 0).all()
    assert ring[-1] > 0.2
    runs = {record["topology"]: record for record in summary["runs"]}
    assert (runs["ring"]["period"], runs["ring"]["peers_per_round"]) == (1, 2)
    assert runs["ring"]["spectral_gap_per_round"] == pytest.approx(
        2 / 3 * (1 - math.cos(math.pi / 16))
    )
    exact = {topology: r["rounds_to_exact_average"] for topology, r in runs.items()}
    assert exact["one_peer_exponential"] == exact["base_graph"] == 5
    assert exact["complete_cycle"] == 16
    assert exact["ring"] is exact["random_ring"] is None
    printed = capsys.readouterr().out
    for text in ("bipartite_exponential", "<1e-15", "never"):
        assert text in printed


def test_errors_are_of_the_debiased_values():
    """With weights whose rows do not sum to 1."""
    star = gx.topology.star(4)
    start = np.random.default_rng([5, averaging.VALUES_PER_NODE]).standard_normal(
        (4, averaging.VALUES_PER_NODE)
    )
    mean = start.mean(axis=0)
    rounds = oracle.sgp(star.matrices(), start, np.zeros((3, *start.shape)))
    models = np.stack([z for z, *_ in rounds])
    expected = np.linalg.norm(models - mean, axis=(1, 2)) / np.linalg.norm(start - mean)
    errors = averaging.averaging_error(star, 3, seed=5)
    np.testing.assert_allclose(errors[1:], expected, rtol=1e-10)


def test_random_topologies_are_drawn_for_every_seed():
    curve = averaging.measure_curve("random_peer_complete", 8, 4, 5)
    assert curve.errors.shape == (5, 5)
    for seed in range(5):
        drawn = gx.topology.random_peer(8, averaging.MIN_RANDOM_ROUNDS, seed, graph="complete")
        expected = averaging.averaging_error(drawn, 4, seed)
        np.testing.assert_array_equal(curve.errors[seed], expected)
    assert len(set(curve.errors[:, 1])) == 5


def test_factors_of_sgp18():
    one, cycle, exponential, complete = averaging.compute_sgp18_factors(60)
    assert one["mean"] < 1e-12
    assert cycle["mean"] == pytest.approx(0.579, abs=1e-3)
    assert one["standard_deviation"] is cycle["standard_deviation"] is None
    assert exponential["mean"] == pytest.approx(0.43, abs=0.05)
    assert complete["mean"] == pytest.approx(0.20, abs=0.03)
    assert 0.02 < complete["standard_deviation"] < exponential["standard_deviation"] < 0.2


def test_impossible_topologies_are_refused_before_the_first(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--nodes", "32", "7", "--topology", "bipartite_exponential")
    assert stop.value.code == 2
    assert "must be even, got 7" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
