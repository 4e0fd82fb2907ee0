"""Spectra against closed forms, the numbers of the papers, and averaging."""

import numpy as np
import pytest

import gossipjax as gx
from gossipjax import topology
from gossipjax.topology.spectra import follow_differences, growth_of_differences


def renumber(schedule: gx.Schedule) -> gx.Schedule:
    """The same schedule, with the nodes in another order: the same spectra, but no circulants."""
    order = np.random.default_rng(0).permutation(schedule.size)
    return topology.from_matrices([matrix[np.ix_(order, order)] for matrix in schedule.matrices()])


@pytest.mark.parametrize(
    "schedule",
    [
        topology.directed_ring(9),
        topology.one_peer_exponential(16),
        topology.one_peer_exponential(12).every(2),
        topology.k_peer_exponential(20, 2),
        topology.from_matrices(sum(np.roll(np.eye(7), h, 0) * (4 - h) / 10 for h in range(4))),
    ],
)
def test_spectra_do_not_depend_on_the_order_of_the_nodes(schedule):
    """Circulant matrices are diagonalised by Fourier's, others by LAPACK."""
    other = renumber(schedule)
    assert other != schedule
    gap = topology.spectral_gap(schedule)
    assert topology.spectral_gap(other) == pytest.approx(gap, abs=1e-6)
    for steps in (1, 2, schedule.period, 3 * schedule.period + 1):
        sigma = topology.second_singular_value(schedule, steps)
        assert topology.second_singular_value(other, steps) == pytest.approx(sigma, abs=1e-12)
    rounds = topology.rounds_to_exact_average(schedule)
    assert topology.rounds_to_exact_average(other) == rounds


def test_complete_cycle_of_many_nodes():
    """Eigenvalues of the round of hop `h`: `(1 + exp(-2 pi i h k / n)) / 2`."""
    n = 1024
    schedule = topology.complete_cycle(n)
    hops = np.arange(1, 6)
    products = abs(np.cos(np.pi * np.outer(np.arange(1, n), hops) / n)).prod(axis=1)
    sigma = topology.second_singular_value(schedule, 5)
    assert sigma == pytest.approx(products.max(), rel=1e-12)
    assert topology.spectral_gap(schedule) == 1
    assert topology.rounds_to_exact_average(schedule) == n // 2


def test_many_steps_are_multiplied_by_powers():
    ring = topology.ring(64)
    rho = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / 64)
    for schedule in (ring, renumber(ring)):
        sigma = topology.second_singular_value(schedule, 10_000)
        assert sigma == pytest.approx(rho**10_000, rel=1e-9)
        assert topology.second_singular_value(schedule, 2**31 - 1) < 1e-12
    hybrid = topology.piecewise(
        {
            0: topology.random_ring(9, 3, 0),
            8: topology.star(9),
            11: topology.random_peer(9, 20, 0),
        }
    )
    product = np.eye(9)
    for step, matrix in enumerate(hybrid.matrices(55)):
        product = matrix @ product
        expected = np.linalg.svd(product, compute_uv=False)[1]
        assert topology.second_singular_value(hybrid, step + 1) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("n", [4, 33])
def test_spectral_gap_of_the_ring(n):
    """Zhang et al. 2020 (arXiv:2002.01119), equation 6."""
    gap = topology.spectral_gap(topology.ring(n))
    assert type(gap) is float
    assert gap == pytest.approx(1 - (1 / 3 + 2 / 3 * np.cos(2 * np.pi / n)), abs=1e-12)


def test_spectral_gap_is_of_a_whole_cycle():
    ring = topology.ring(9)
    rho = 1 - topology.spectral_gap(ring)
    three_times = topology.from_matrices([ring.matrices()[0]] * 3)
    assert topology.spectral_gap(three_times) == pytest.approx(1 - rho**3)
    assert topology.spectral_gap(ring.every(4)) == pytest.approx(1 - rho)
    assert topology.spectral_gap(topology.hypercube(8)) == pytest.approx(1 / 2)
    assert topology.spectral_gap(three_times, per_round=True) == pytest.approx(1 - rho)
    assert topology.spectral_gap(ring.every(4), per_round=True) == pytest.approx(1 - rho**0.25)
    for schedule in (topology.complete(5), topology.base_graph(6), topology.complete(1)):
        assert topology.spectral_gap(schedule) == pytest.approx(1, abs=1e-6)
        assert topology.spectral_gap(schedule, per_round=True) == pytest.approx(1, abs=1e-6)


def test_spectral_gap_per_round_of_more_rounds_than_a_float_can_hold():
    """The second eigenvalue of the long cycle is about 1e-400."""
    short = topology.random_ring(12, 8, seed=0)
    long = topology.from_matrices(np.tile(short.matrices(), (200, 1, 1)))
    assert topology.spectral_gap(long) == 1
    gap = topology.spectral_gap(short, per_round=True)
    assert topology.spectral_gap(long, per_round=True) == pytest.approx(gap, rel=1e-6)


def random_start(schedule: gx.Schedule) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(schedule.size, 4))


@pytest.mark.parametrize(
    "schedule",
    [
        topology.ring(16),
        topology.star(9),
        topology.one_peer_exponential(12),
        topology.random_ring(10, 4, seed=0),
        topology.ring(9).every(4),
    ],
)
def test_growth_of_differences_is_the_second_eigenvalue(schedule):
    expected = 1 - topology.spectral_gap(schedule, per_round=True)
    growth = growth_of_differences(schedule, lambda mix, x, step: mix(x), random_start(schedule))
    assert growth == pytest.approx(expected, abs=0.02)
    grown = growth_of_differences(schedule, lambda mix, x, step: 3 * mix(x), random_start(schedule))
    assert grown == pytest.approx(3 * expected, abs=0.06)


def test_growth_of_differences_of_nodes_that_agree_is_0():
    for schedule in (topology.complete(1), topology.ring(2)):
        start = random_start(schedule)
        assert growth_of_differences(schedule, lambda mix, x, step: 0 * mix(x), start) == 0


def test_growth_of_differences_is_of_the_worst_segment():
    """Each is followed by itself; one that ends within its cycle is not repeated."""
    ring = topology.ring(16)
    parts = {0: topology.one_peer_exponential(16), 2: ring, 9: topology.complete(16)}
    schedule = topology.piecewise(parts)
    steps = []

    def move(mix, x, step):
        steps.append(step)
        return mix(x)

    growth = growth_of_differences(topology.piecewise({0: parts[9], 5: ring}), move, np.eye(16))
    assert growth == pytest.approx(1 - topology.spectral_gap(ring), abs=1e-3)
    steps.clear()
    logs = follow_differences(schedule, move, np.eye(16), 4, measure=np.ptp)
    assert [len(rounds) for rounds in logs] == [2, 4, 4]
    assert steps == [0, 1, 2, 2, 2, 2, 9, 9, 9, 9]


@pytest.mark.parametrize(("graph", "expected"), [("exponential", 0.43), ("complete", 0.20)])
def test_second_singular_value_of_random_peers(graph, expected):
    """arXiv:1811.10792v1, appendix A: n = 32, 5 rounds; its lambda_2 is the square of sigma_2."""
    drawn = [topology.random_peer(32, 20, seed, graph=graph) for seed in range(40)]
    squares = [topology.second_singular_value(schedule, 5) ** 2 for schedule in drawn]
    assert np.mean(squares) == pytest.approx(expected, abs=0.02)


class TestRoundsToExactAverage:
    @pytest.mark.parametrize("n", [2, 8, 64])
    def test_powers_of_two(self, n):
        rounds = n.bit_length() - 1
        assert topology.rounds_to_exact_average(topology.one_peer_exponential(n)) == rounds
        assert topology.rounds_to_exact_average(topology.bipartite_exponential(n)) == rounds

    @pytest.mark.parametrize("peers", [1, 2, 3])
    def test_base_graph(self, peers):
        for n in (5, 6, 7, 11, 12, 24, 31, 33):
            schedule = topology.base_graph(n, peers)
            assert topology.rounds_to_exact_average(schedule) == schedule.period

    @pytest.mark.parametrize(
        "schedule",
        [
            topology.ring(8),
            topology.ring(6),  # a third of its modes vanish in one round, the others never do
            topology.one_peer_exponential(6),
            topology.star(5),
            topology.star(5, weights="metropolis"),
            topology.complete_cycle(6),
            topology.random_ring(10, 5, 0),
            topology.random_peer(10, 30, 0),
        ],
    )
    def test_averages_that_are_only_approached(self, schedule):
        assert topology.rounds_to_exact_average(schedule) is None

    def test_piecewise(self):
        """An error that is already tiny is still seen to vanish."""
        ring = topology.ring(8)
        one_peer = topology.one_peer_exponential(8)
        for start, part, expected in [
            (3, topology.complete(8), 4),
            (500, topology.complete(8), 501),
            (500, one_peer, 503),
            (500, ring.every(2), None),
        ]:
            hybrid = topology.piecewise({0: ring, start: part})
            assert topology.rounds_to_exact_average(hybrid) == expected
        assert topology.rounds_to_exact_average(topology.piecewise({0: one_peer, 2: ring})) is None
        # Hops 1 and 2, then 1 and 2 again, and 4, the missing one.
        assert topology.rounds_to_exact_average(topology.piecewise({0: one_peer, 2: one_peer})) == 5

    def test_weights_that_are_not_doubly_stochastic(self):
        """`v 1^T` with an uneven `v`: the push-sum weight makes it the average."""
        uneven = np.outer([0.1, 0.2, 0.3, 0.4], np.ones(4))
        assert topology.rounds_to_exact_average(topology.from_matrices(uneven)) == 1
