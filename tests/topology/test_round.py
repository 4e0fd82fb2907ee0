"""Rounds kept by their nonzero entries: the same as dense ones, in a fraction of the memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipjax import topology
from gossipjax.topology import Round


def draw_matrix(rng: np.random.Generator, n: int, density: float) -> np.ndarray:
    """Irregular column-stochastic matrix `[N, N]` with a positive diagonal."""
    matrix = rng.random((n, n)) * (rng.random((n, n)) < density) + 0.1 * np.eye(n)
    return matrix / matrix.sum(axis=0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_entries_in_any_order_make_the_round_of_their_matrix(n, density, seed):
    rng = np.random.default_rng(seed)
    matrix = draw_matrix(rng, n, density)
    receivers, senders = np.nonzero(matrix)
    order = rng.permutation(len(receivers))
    receivers = receivers[order]
    senders = senders[order]
    sparse = Round.from_entries(n, receivers, senders, matrix[receivers, senders])
    assert sparse == Round(matrix)
    assert hash(sparse) == hash(Round(matrix))
    np.testing.assert_array_equal(sparse.matrix, matrix)
    np.testing.assert_array_equal(sparse.self_weights, np.diag(matrix))
    for kept, expected in [
        (sparse.receivers, np.nonzero(matrix)[0]),
        (sparse.senders, np.nonzero(matrix)[1]),
        (sparse.weights, matrix[np.nonzero(matrix)]),
    ]:
        np.testing.assert_array_equal(kept, expected)
    degrees = [np.count_nonzero(matrix, axis=axis).max() - 1 for axis in (0, 1)]
    assert sparse.max_peers == len(sparse.slots) == max(degrees)


@pytest.mark.parametrize(
    ("build", "period", "megabytes"),
    [
        (lambda: topology.one_peer_exponential(1024), 10, 5),
        (lambda: topology.base_graph(1023, 2), 12, 10),
        (lambda: topology.random_peer(1024, 100, 0), 100, 50),
        (lambda: topology.complete_cycle(512), 511, 60),
    ],
)
def test_a_schedule_takes_far_less_memory_than_its_matrices(build, period, megabytes):
    """`[T, N, N]` would take 8 MiB for each round of 1024 nodes."""
    tracemalloc.start()
    try:
        schedule = build()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < megabytes * 2**20
    assert schedule.period == period
    assert len(schedule.canonical_steps(1)) >= len(schedule.rounds)
