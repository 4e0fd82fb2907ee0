"""Rounds kept by their nonzero entries: the same as dense ones, in a fraction of the memory."""

import copy
import pickle
import tracemalloc
from typing import Any

import networkx
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


def test_rounds_of_other_weights_nodes_or_sizes_differ():
    pair = Round([[0.5, 0.5], [0.5, 0.5]])
    others = [
        Round([[0.5, 0.25], [0.5, 0.75]]),
        Round([[0.5, 0.0], [0.5, 1.0]]),
        Round([[1.0, 0.5], [0.0, 0.5]]),
        Round(np.eye(2)),
        Round(np.eye(3)),
    ]
    assert len({pair, *others}) == 1 + len(others)
    assert pair != "a round"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copied_round_is_equal_and_immutable(clone):
    round_ = topology.random_peer(8, 20, 0).rounds[0]
    assert len(round_.slots) > 1
    other = clone(round_)
    assert other == round_
    for array in (other.receivers, other.senders, other.weights, other.self_weights):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def measure_peak(build) -> tuple[Any, int]:
    """What `build` returns, and the most bytes that were allocated meanwhile."""
    tracemalloc.start()
    try:
        return build(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class TestThousandNodes:
    """`[T, N, N]` would take 8 MiB for each round."""

    N = 1024

    @pytest.mark.parametrize(
        ("build", "period", "megabytes"),
        [
            (topology.one_peer_exponential, 10, 5),
            (lambda n: topology.base_graph(n - 1, 2, inner_edges=True), 12, 10),
            (lambda n: topology.random_peer(n, 100, 0), 100, 50),
            (topology.complete_cycle, 1023, 200),
        ],
    )
    def test_a_schedule_takes_far_less_memory_than_its_matrices(self, build, period, megabytes):
        schedule, peak = measure_peak(lambda: build(self.N))
        assert peak < megabytes * 2**20
        assert schedule.period == period
        assert len(schedule.canonical_steps(1)) >= len(schedule.rounds)

    def test_a_long_schedule_is_used_without_its_matrices(self):
        schedule = topology.complete_cycle(self.N)
        local = schedule.every(3)
        assert local.period == 3 * 1023
        assert schedule == pickle.loads(pickle.dumps(schedule))
        assert schedule.is_doubly_stochastic
        assert not any(round_.is_uniform or round_.is_identity for round_ in schedule.rounds)
        assert local.canonical_step(10**6, 10) == 10**6 % local.period
        for hop, round_ in enumerate(schedule.rounds, start=1):
            ((receivers, weights),) = round_.slots
            np.testing.assert_array_equal(receivers, (np.arange(self.N) + hop) % self.N)
            assert (weights == 0.5).all()

    @pytest.mark.parametrize(
        "round_",
        [
            topology.hypercube(N).round_at(0),
            topology.star(N).round_at(0),
            topology.complete(256).round_at(0),
            topology.random_ring(N, 1, 0).round_at(0),
            Round(draw_matrix(np.random.default_rng(0), N, 0.1)),
        ],
    )
    def test_slots_are_permutations_that_make_up_the_matrix(self, round_):
        matrix = np.diag(round_.self_weights)
        nodes = np.arange(round_.size)
        for receivers, weights in round_.slots:
            np.testing.assert_array_equal(np.sort(receivers), nodes)
            matrix[receivers, nodes] += weights
        np.testing.assert_array_equal(matrix, round_.matrix)
        assert len(round_.slots) == round_.max_peers

    def test_one_missing_node_is_found(self):
        path = networkx.path_graph(self.N)
        path.remove_edge(0, 1)
        with pytest.raises(ValueError, match=r"all 1024 nodes.* node 0 can never send to node 1"):
            topology.from_graph(path)
        digraph = networkx.DiGraph(networkx.path_graph(self.N))
        digraph.remove_edge(699, 700)
        with pytest.raises(ValueError, match="node 0 can never send to node 700"):
            topology.from_graph(digraph)
        with pytest.raises(ValueError, match="node 0 can never receive from node 700"):
            topology.from_graph(digraph.reverse())


def test_large_schedules_are_built_in_seconds():
    """They took more than 20 seconds, or more memory than there is."""
    for schedule, size, period in [
        (topology.one_peer_exponential(5000), 5000, 13),
        (topology.torus(200, 200), 40_000, 1),
        (topology.base_graph(2003), 2003, 21),
        (topology.random_ring(64, 100_000, 0), 64, 100_000),
        (topology.ring(8).every(100_000), 8, 100_000),
    ]:
        assert (schedule.size, schedule.period) == (size, period)
        assert len(repr(schedule)) < 1000
