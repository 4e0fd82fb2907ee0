"""The program of the rates: its problem, its numbers against NumPy, its fits, files and errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_files import read_run

from experiments.rates import __main__ as rates
from experiments.rates import fits, problem
from experiments.rates.measurement import BLOCK, Simulation


def run(tmp_path, *arguments):
    """Runs the program with few seeds; returns the summary and the lines of the metrics."""
    out = tmp_path / "out"
    common = ["--out", str(out), "--seeds", "2", "--algorithm", "sgp", "--nodes", "2"]
    rates.main([*common, *arguments])
    return read_run(out)


def test_gradient_is_that_of_the_objective():
    x = np.random.default_rng(0).normal(0, 2, (20, problem.COORDINATES))
    step = 1e-5 * np.eye(problem.COORDINATES)
    expected = [(problem.objective(x + one) - problem.objective(x - one)) / 2e-5 for one in step]
    np.testing.assert_allclose(
        problem.gradient(jnp.asarray(x, jnp.float32)), np.transpose(expected), atol=1e-5
    )


def test_the_optimum_is_known_and_the_start_is_not_convex():
    line = np.linspace(-100, 100, 200_001)
    values = problem.objective(line[:, None])  # the mean over kinds of one coordinate
    assert line[values.argmin()] == pytest.approx(0, abs=1e-9)
    slopes = np.sign(np.diff(values))
    assert (np.diff(slopes) != 0).sum() == 1  # no other stationary point
    around = problem.START + np.array([-0.01, 0, 0.01])
    assert np.diff(problem.objective(around[:, None]), 2) < 0


def test_the_mean_of_the_nodes_is_the_objective():
    kinds = problem.draw_kinds(6, 3)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, problem.COORDINATES)), jnp.float32)
    centers = jnp.asarray(problem.CENTERS[kinds], jnp.float32)
    coefficients = jnp.asarray(problem.COEFFICIENTS[kinds], jnp.float32)
    local = problem.local_gradient(x, centers, coefficients)
    np.testing.assert_allclose(local.mean(axis=0), [problem.gradient(x)[0, 0]] * 3, atol=1e-6)
    at_zero = problem.local_gradient(0 * x, centers, coefficients)
    np.testing.assert_allclose(abs(at_zero), problem.PULL, rtol=1e-6)
    np.testing.assert_array_equal(problem.draw_kinds(6, 2), kinds[:, :2])


def draw_noise(nodes, seed, steps):
    """The noise of one seed, `[steps, nodes, COORDINATES]`, block by block."""
    blocks = []
    for first in range(0, steps, BLOCK):
        key = jax.random.fold_in(jax.random.key(seed), first)
        shape = (BLOCK, problem.COORDINATES)
        parts = [jax.random.normal(jax.random.fold_in(key, i), shape) for i in range(nodes)]
        blocks.append(np.stack(parts, axis=1))
    return problem.NOISE * np.concatenate(blocks).astype(np.float64)


def follow(method, nodes, seed, steps):
    """The two means over the steps, in float64, for 4 nodes: hops 1 and 2, or a ring."""
    kinds = problem.draw_kinds(nodes, seed + 1)[:, seed]
    b = problem.CENTERS[kinds]
    c = problem.COEFFICIENTS[kinds]
    noise = draw_noise(nodes, seed, steps)
    x = np.full((nodes, problem.COORDINATES), problem.START)
    totals = np.zeros(2)
    for k in range(steps):
        mean = x.mean(axis=0)
        distance = mean[:, None] - problem.CENTERS
        gradient = (2 * problem.COEFFICIENTS * distance / (1 + distance**2)).mean(axis=1)
        totals += [np.sum(gradient**2), np.sum((x - mean) ** 2) / nodes]
        grads = 2 * c * (x - b) / (1 + (x - b) ** 2) + noise[k]
        u = -math.sqrt(nodes / steps) * grads
        if method == "sgp":
            peer = np.roll(x + u, (1, 2)[k % 2], axis=0)
            x = (x + u + peer) / 2
        elif method == "dpsgd":
            x = (x + np.roll(x, 1, axis=0) + np.roll(x, -1, axis=0)) / 3 + u
        else:
            x = x + u.mean(axis=0)
    return totals / steps


@pytest.mark.parametrize("method", ["sgp", "dpsgd", "allreduce"])
def test_means_are_those_of_numpy(method):
    nodes = 4
    means = list(Simulation(method, nodes, seeds=2).run(2 * BLOCK))
    assert [one.step for one in means] == [BLOCK, 2 * BLOCK]
    for seed in range(2):
        gradient, distance = follow(method, nodes, seed, 2 * BLOCK)
        assert means[-1].squared_gradient[seed] == pytest.approx(gradient, rel=1e-4)
        assert means[-1].squared_distance[seed] == pytest.approx(distance, rel=1e-4, abs=1e-9)


def make_points(exponent_of_steps, exponent_of_nodes, noise=0.0, seeds=4):
    rng = np.random.default_rng(0)
    return [
        fits.Point(
            nodes,
            steps,
            3 * steps**exponent_of_steps * nodes**exponent_of_nodes
            * np.exp(noise * rng.normal(size=seeds)),
        )
        for nodes in (2, 4, 8)
        for steps in (512, 1024, 2048)
    ]  # fmt: skip


def test_power_laws_are_found():
    points = make_points(-0.5, -0.5)
    assert fits.fit_slope(points) == pytest.approx((-0.5,) * 3)
    in_steps, in_nodes = fits.fit_both_slopes(make_points(-0.7, 0.3))
    assert in_steps == pytest.approx((-0.7,) * 3)
    assert in_nodes == pytest.approx((0.3,) * 3)


def test_steps_needed():
    points = make_points(-0.5, -0.5)
    target = 3 * (2 * 1500) ** -0.5
    needed = fits.find_steps_needed(points, fits.log_means(points), target)
    assert needed == pytest.approx({2: 1500, 4: 750})  # 8 nodes need fewer than 512
    assert fits.fit_steps_needed(points, target).value == pytest.approx(-1)


def test_limits_hold_the_true_slope_and_shrink_with_the_noise():
    wide = fits.fit_slope(make_points(-0.5, -0.5, noise=0.1))
    narrow = fits.fit_slope(make_points(-0.5, -0.5, noise=0.01))
    for estimate in (wide, narrow):
        assert estimate.low < estimate.value < estimate.high
    assert wide.low < -0.5 < wide.high
    assert 0 < narrow.high - narrow.low < (wide.high - wide.low) / 3


def test_program(tmp_path, capsys):
    """With a pair of n and K that is below the regime, and a method whose models are equal."""
    arguments = ("--steps", "64", "192", "--nodes", "2", "6", "--algorithm", "sgp", "allreduce")
    summary, lines = run(tmp_path, *arguments)
    in_regime = [(one["nodes"], one["steps"], one["is_in_regime"]) for one in summary["runs"][:4]]
    assert in_regime == [(2, 64, True), (2, 192, True), (6, 64, False), (6, 192, False)]
    summary["runs"], lines = summary["runs"][:2], lines[:4]
    for record in summary["runs"]:
        assert record["label"] == "sgp@one_peer_exponential"
        assert record["learning_rate"] == pytest.approx(math.sqrt(2 / record["steps"]))
        assert len(record["squared_gradient"]) == len(record["squared_distance"]) == 2
        assert 0 < max(record["squared_gradient"]) < record["bound"]
    assert [(line["steps"], line["step"]) for line in lines] == [
        (64, 64), (192, 64), (192, 128), (192, 192)
    ]  # fmt: skip
    assert lines[-1]["squared_gradient"] == pytest.approx(
        np.mean(summary["runs"][1]["squared_gradient"])
    )
    slopes, _ = summary["slopes"]
    assert slopes["nodes_times_steps"] is not None
    assert slopes["nodes"] is None
    printed = capsys.readouterr().out
    assert "simulated nodes" in printed
    assert "K = 192" in printed
    assert "2 of 4 pairs of n and K are below K = n^3" in printed
    assert "0*" in printed  # the distance of AllReduce
