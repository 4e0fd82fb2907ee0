"""Factors are drawn from the seed; expectations are those of many draws."""

import numpy as np
import pytest

from experiments.speed.stragglers.slowness import compute_ideal_ratio
from gossipjax.cost_model import Slowness, parse_slowness

NAMES = ["none", "2x", "4x", "random", "lognormal"]


def test_factors_depend_on_the_seed_alone():
    """Other processes draw the same: these are NumPy's own streams."""
    drawn = parse_slowness("random").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).choice((1, 2, 4), (7, 3)))
    drawn = parse_slowness("lognormal").draw(nodes=3, steps=7, seed=5)
    np.testing.assert_array_equal(drawn, np.random.default_rng(5).lognormal(0, 0.5, (7, 3)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_expectations_are_means_of_many_draws(name, nodes):
    slowness = parse_slowness(name)
    factors = slowness.draw(nodes, steps=40_000)
    slowest = 1 / compute_ideal_ratio(factors, is_lockstep=True)
    assert slowness.expect_slowest(nodes) == pytest.approx(slowest, rel=0.02)
    pace = compute_ideal_ratio(factors, is_lockstep=False)
    assert slowness.expect_pace(nodes) == pytest.approx(pace, rel=0.02)


def test_a_fast_node_does_not_slow_others():
    assert Slowness("constant", 0.5).expect_slowest(4) == 1
    assert Slowness("constant", 0.5).expect_slowest(1) == 0.5
