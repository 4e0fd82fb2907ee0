"""Which round a step uses: static and traced, with local steps and switches."""

import copy
import itertools
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipjax as gx
from gossipjax.mixing import _traced_index
from gossipjax.schedule import Piece, Round

topology = gx.topology
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


def test_rounds_repeat_with_the_period():
    schedule = SCHEDULES["one peer"]
    for step in range(-6, 12):
        np.testing.assert_array_equal(
            schedule.round_at(step).matrix, schedule.matrices()[step % schedule.period]
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_traced_step_picks_the_same_round(name):
    schedule = SCHEDULES[name]
    pick = jax.jit(lambda step: _traced_index(schedule, step))
    for step in range(-4, 40):
        assert int(pick(step)) == schedule.index_at(step)


def test_equal_rounds_are_kept_once():
    assert len(SCHEDULES["repeating"].rounds) == 2
    assert len(SCHEDULES["one peer"].every(100).rounds) == 4
    assert SCHEDULES["one peer"].every(100).period == 300


def test_every_puts_silence_between_the_rounds():
    schedule = SCHEDULES["one peer"]
    local = schedule.every(3)
    assert local.period == 9
    assert local.size == 8
    for step in range(20):
        expected = schedule.round_at(step // 3).matrix if step % 3 == 0 else np.eye(8)
        np.testing.assert_array_equal(local.round_at(step).matrix, expected)
    assert schedule.every(1) is schedule


def test_every_with_a_phase_exchanges_at_the_end():
    schedule = SCHEDULES["one peer"]
    local = schedule.every(4, phase=3)
    for step in range(20):
        expected = schedule.round_at(step // 4).matrix if step % 4 == 3 else np.eye(8)
        np.testing.assert_array_equal(local.round_at(step).matrix, expected)


def test_every_of_a_hybrid_counts_rounds():
    hybrid, local = HYBRID, HYBRID.every(2)
    for step in range(40):
        expected = hybrid.round_at(step // 2).matrix if step % 2 == 0 else np.eye(8)
        np.testing.assert_array_equal(local.round_at(step).matrix, expected)


@pytest.mark.parametrize("lookback", [0, 1, 2, 4])
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 50))
def test_canonical_step_of_any_cycle(cycle, lookback, step):
    rounds = [topology.ring(4), topology.complete(4), topology.directed_ring(4)]
    schedule = topology.from_matrices([rounds[i].matrices()[0] for i in cycle])
    canonical = schedule.canonical_step(step, lookback)
    assert canonical <= step % len(cycle)
    for i in range(lookback + 1):
        assert schedule.round_at(step - i) is schedule.round_at(canonical - i)


def test_schedules_with_the_same_rounds_are_equal():
    for name, schedule in SCHEDULES.items():
        again = pickle.loads(pickle.dumps(schedule))
        assert schedule == again
        assert hash(schedule) == hash(again)
        assert all(schedule != other for key, other in SCHEDULES.items() if key != name)


def test_doubly_stochastic():
    nearly = [[0.501, 0.5], [0.499, 0.5]]
    assert not topology.from_matrices(nearly).is_doubly_stochastic
    assert topology.one_peer_exponential(7).is_doubly_stochastic
    assert not topology.from_matrices([[0.5, 0.25], [0.5, 0.75]]).is_doubly_stochastic


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_copied_and_pickled(name):
    schedule = SCHEDULES[name]
    schedule.canonical_step(7)
    for other in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        np.testing.assert_array_equal(other.matrices(12), schedule.matrices(12))


def test_rounds_are_immutable():
    with pytest.raises(ValueError, match="read-only"):
        topology.ring(3).round_at(0).matrix[0, 0] = 1


def test_matrices_near_the_tolerance_pass():
    """Weights that were stored in float32 are no error."""
    matrix = topology.ring(3).matrices()[0].astype(np.float32)
    assert topology.from_matrices(matrix).is_doubly_stochastic


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.every(0), "whole number of at least 1; given 0"),
        (lambda s: s.every(True), "whole number of at least 1; given True"),
        (lambda s: s.every(3, phase=3), "phase of 0 to 2; given 3"),
        (lambda s: s.canonical_step(-1), "step is a whole number of at least 0; given -1"),
        (lambda s: s.canonical_step(0, -2), "lookback is a whole number of at least 0"),
        (
            lambda s: gx.Schedule([*s.rounds, Round(np.eye(8))], [Piece(0, (0,)), Piece(5, (3,))]),
            "never connects all 8 nodes",
        ),
        (lambda s: gx.Schedule([Round(np.eye(1)), Round(np.full((2, 2), 0.5))]), "different sizes"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(SCHEDULES["one peer"])
