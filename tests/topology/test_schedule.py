"""The round that each step uses: static and traced, with local steps and switches."""

import copy
import itertools
import pickle
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx
from gossipjax import topology

HYBRID = topology.piecewise(
    {
        0: topology.k_peer_exponential(8, 2),
        5: topology.complete(8),
        9: topology.one_peer_exponential(8),
    }
)
SCHEDULES = {
    "one peer": topology.one_peer_exponential(8),
    "static": topology.ring(8),
    "repeating": topology.from_matrices(
        np.stack([topology.ring(4).matrices()[0]] * 2 + [topology.complete(4).matrices()[0]])
    ),
    "hybrid": HYBRID,
    "local steps": topology.one_peer_exponential(8).every(3),
    "hybrid with local steps": HYBRID.every(2, phase=1),
}


@pytest.mark.parametrize("name", ["repeating", "hybrid", "hybrid with local steps"])
def test_a_traced_step_picks_the_same_round(name):
    schedule = SCHEDULES[name]

    def apply_round(unit_vector, step):
        return gx.mix(unit_vector, None, schedule, step)[0]

    traced = jax.jit(jax.vmap(apply_round, in_axes=(0, None), axis_name="nodes"))
    for step in range(-4, 40):
        matrix = traced(jnp.eye(schedule.size), step)
        np.testing.assert_allclose(matrix, schedule.round_at(step).matrix, rtol=1e-6)


def test_equal_rounds_are_kept_once():
    assert len(SCHEDULES["repeating"].rounds) == 2
    assert len(SCHEDULES["one peer"].every(100).rounds) == 4
    assert SCHEDULES["one peer"].every(100).period == 300


@pytest.mark.parametrize(("k", "phase"), [(3, 0), (4, 3)])
@pytest.mark.parametrize("name", ["one peer", "hybrid"])
def test_every_puts_idle_rounds_between_the_rounds(name, k, phase):
    schedule = SCHEDULES[name]
    local = schedule.every(k, phase)
    assert local is schedule.every(k, phase=phase)
    assert local is not schedule.every(k, phase=1)
    assert schedule.every(1) is schedule
    assert [s.start for s in local.segments] == [k * s.start for s in schedule.segments]
    for step in range(60):
        expected = schedule.round_at(step // k).matrix if step % k == phase else np.eye(8)
        np.testing.assert_array_equal(local.round_at(step).matrix, expected)


@pytest.mark.parametrize("lookback", [0, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_canonical_step_is_the_smallest_with_the_same_rounds(name, lookback):
    schedule = SCHEDULES[name]

    def window(step):
        return [schedule.index_at(step - i) for i in range(lookback + 1)]

    values = set()
    for step in range(60):
        smallest = next(s for s in itertools.count() if window(s) == window(step))
        assert schedule.canonical_step(step, lookback) == smallest
        values.add(smallest)
    assert schedule.canonical_steps(lookback) == sorted(values)
    assert schedule.canonical_step(10**12 + 60, lookback) in values


def test_a_lookback_beyond_the_cycle_changes_nothing():
    schedule = topology.one_peer_exponential(8)
    for lookback in (2, 3, 10**18):
        assert schedule.canonical_steps(lookback) == [0, 1, 2]
        assert schedule.canonical_step(10**18 + 1, lookback) == (10**18 + 1) % 3
    assert HYBRID.canonical_step(10**6, 512) < 10**4
    with pytest.raises(ValueError, match="lookback must be at most 1024"):
        HYBRID.canonical_step(0, 2000)


def test_steps_are_integers():
    schedule = topology.one_peer_exponential(8)
    assert schedule.round_at(-1) is schedule.round_at(2)
    with pytest.raises(ValueError, match="step must be an integer, got"):
        schedule.round_at(cast(Any, 1.0))
    with pytest.raises(ValueError, match="Rounds of a traced step are known only when"):
        jax.jit(lambda step: schedule.round_at(step).size)(3)


def test_copied_and_pickled_schedules_are_equal():
    for name, schedule in SCHEDULES.items():
        schedule.canonical_step(7)
        for same in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
            assert schedule == same
            assert hash(schedule) == hash(same)
            np.testing.assert_array_equal(same.matrices(12), schedule.matrices(12))
        assert all(schedule != other for key, other in SCHEDULES.items() if key != name)


def test_doubly_stochastic():
    almost = [[0.501, 0.5], [0.499, 0.5]]
    assert not topology.from_matrices(almost).is_doubly_stochastic
    assert topology.one_peer_exponential(7).is_doubly_stochastic
    assert not topology.from_matrices([[0.5, 0.25], [0.5, 0.75]]).is_doubly_stochastic
