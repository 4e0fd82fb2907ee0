"""Every topology against an independent definition, and the properties of every schedule."""

import itertools

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipjax as gx
from gossipjax import topology
from gossipjax.topology import Round


def rebuild_matrix(round_: Round) -> np.ndarray:
    """The matrix that the slots describe, with the remaining weight on the diagonal."""
    n = round_.size
    matrix = np.zeros((n, n))
    for receivers, weights in round_.slots:
        assert sorted(receivers) == list(range(n)), "a slot is a full permutation"
        for sender in range(n):
            matrix[receivers[sender], sender] += weights[sender]
    return matrix + np.diag(1 - matrix.sum(axis=0))


def check_schedule(schedule: gx.Schedule, n: int):
    """Check the properties of every schedule of `n` nodes."""
    matrices = schedule.matrices()
    assert schedule.size == n
    assert matrices.shape == (schedule.period, n, n)
    assert matrices.dtype == np.float64
    np.testing.assert_allclose(matrices.sum(axis=1), 1, rtol=1e-12)
    assert (np.einsum("tii->ti", matrices) > 0).all()
    product = np.eye(n)
    for _ in range(n):  # positive after n cycles: connected
        for matrix in matrices:
            product = (matrix @ product > 0).astype(float)
    assert product.all()
    for k, matrix in enumerate(matrices):
        round_ = schedule.round_at(k)
        np.testing.assert_array_equal(round_.matrix, matrix)
        np.testing.assert_allclose(rebuild_matrix(round_), matrix, rtol=0, atol=1e-12)
        degree = ((matrix > 0) & ~np.eye(n, dtype=bool)).sum
        assert len(round_.slots) == max(degree(axis=0).max(), degree(axis=1).max())


BUILDERS = {
    "ring": topology.ring,
    "directed_ring": topology.directed_ring,
    "complete": topology.complete,
    "exponential": topology.exponential,
    "one_peer_exponential": topology.one_peer_exponential,
    "two_peer_exponential": lambda n: topology.k_peer_exponential(n, 2),
    "bipartite_exponential": topology.bipartite_exponential,
    "complete_cycle": topology.complete_cycle,
    "star": topology.star,
    "metropolis_star": lambda n: topology.star(n, weights="metropolis"),
    "hypercube": topology.hypercube,
    "base_graph": topology.base_graph,
    "two_peer_base_graph": lambda n: topology.base_graph(n, 2),
    "random_ring": lambda n: topology.random_ring(n, 4, 0),
    "random_pairs": lambda n: topology.random_pairs(n, 20, 0),
    "gossip_pga": lambda n: topology.periodic(topology.one_peer_exponential(n), 3),
    "random_peer_exponential": lambda n: topology.random_peer(n, 20, 0),
    "random_peer_complete": lambda n: topology.random_peer(n, 20, 0, graph="complete"),
}
IMPOSSIBLE = {
    "bipartite_exponential": lambda n: n % 2 and n > 1,
    "random_pairs": lambda n: n % 2 and n > 1,
    "hypercube": lambda n: n.bit_count() > 1,
    "two_peer_exponential": lambda n: n == 2,
    "two_peer_base_graph": lambda n: n == 2,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_size(name):
    np.testing.assert_array_equal(BUILDERS[name](1).matrices(), 1)
    for n in (*range(1, 18), 24, 33, 47, 64):
        if not IMPOSSIBLE.get(name, lambda n: False)(n):
            check_schedule(BUILDERS[name](n), n)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 3), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_any_column_stochastic_digraph(n, rounds, density, seed):
    """Irregular degrees, odd sizes, unequal weights; a ring in the last round connects it."""
    rng = np.random.default_rng(seed)
    weights = rng.random((rounds, n, n)) + 0.01
    matrices = weights * (rng.random((rounds, n, n)) < density)
    matrices[-1] += np.roll(np.eye(n), 1, axis=0)
    matrices += np.eye(n) * 0.1
    matrices /= matrices.sum(axis=1, keepdims=True)
    schedule = topology.from_matrices(matrices)
    check_schedule(schedule, n)
    np.testing.assert_array_equal(schedule.matrices(), matrices)


def test_ring():
    for n in range(3, 20):
        expected = np.zeros((n, n))
        for i in range(n):
            expected[i, [i - 1, i, (i + 1) % n]] = 1 / 3
        np.testing.assert_allclose(topology.ring(n).matrices()[0], expected)
        eigenvalues = np.sort(np.linalg.eigvalsh(expected))
        assert eigenvalues[-2] == pytest.approx(
            1 / 3 + 2 / 3 * np.cos(2 * np.pi / n)
        )  # arXiv:2002.01119
    np.testing.assert_array_equal(topology.ring(2).matrices()[0], [[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_array_equal(
        topology.directed_ring(4).matrices()[0],
        [[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]],
    )


@pytest.mark.parametrize(
    ("n", "hops"),
    [(2, [1]), (3, [1, 2]), (8, [1, 2, 4]), (9, [1, 2, 4, 8]), (64, [1, 2, 4, 8, 16, 32])],
)
def test_exponential_hops(n, hops):
    """floor(log2(n - 1)) + 1 hops, at powers of two and next to them (arXiv:1811.10792v1, A.1)."""
    one = topology.one_peer_exponential(n)
    assert one.period == len(hops)
    for k, hop in enumerate(hops):
        expected = np.eye(n) / 2
        for i in range(n):
            expected[i, (i - hop) % n] += 0.5
        np.testing.assert_array_equal(one.matrices()[k], expected)
    static = topology.exponential(n).matrices()[0]
    for i in range(n):
        senders = {i, *((i - hop) % n for hop in hops)}
        assert set(np.flatnonzero(static[i])) == senders
    np.testing.assert_allclose(static[static > 0], 1 / (1 + len(hops)))


def test_two_peers_move_on_by_one_hop():
    matrices = topology.k_peer_exponential(8, 2).matrices()
    for k, hops in enumerate([(1, 2), (2, 4), (4, 1)]):
        expected = sum(np.roll(np.eye(8), hop, axis=0) for hop in (0, *hops)) / 3
        np.testing.assert_allclose(matrices[k], expected)
    assert topology.k_peer_exponential(8, 3).round_at(0).matrix[0, 0] == 0.25


def list_hops_of_phone_book(n: int, peers: int, rounds: int) -> list[list[int]]:
    """The authors' rule, as a list through which node 0 goes `peers` entries at a time."""
    powers = [(peers + 1) ** i for i in range(n) if (peers + 1) ** i <= n - 1]
    phone_book = [j * power % n for power in powers for j in range(1, peers + 1)]
    position = itertools.cycle(phone_book)
    return [[next(position) for _ in range(peers)] for _ in range(rounds)]


@pytest.mark.parametrize(
    ("n", "peers", "period"),
    [(8, 2, 2), (9, 2, 2), (10, 2, 3), (32, 2, 4), (244, 2, 6), (17, 3, 3), (4, 3, 1), (33, 1, 6)],
)
def test_hops_of_the_authors(n, peers, period):
    schedule = topology.k_peer_exponential(n, peers, hops="authors")
    assert schedule.period == period
    for k, hops in enumerate(list_hops_of_phone_book(n, peers, 2 * period)):
        expected = np.zeros((n, n))
        for sender in range(n):
            receivers = {sender, *((sender + hop) % n for hop in hops)}
            assert len(receivers) == peers + 1
            expected[sorted(receivers), sender] = 1 / (peers + 1)
        np.testing.assert_allclose(schedule.round_at(k).matrix, expected, rtol=1e-15)
    if n < 100:
        check_schedule(schedule, n)


def test_bipartite_exponential():
    for n in range(2, 65, 2):
        schedule = topology.bipartite_exponential(n)
        assert schedule.period == int(np.floor(np.log2(n - 1))) + 1
        assert schedule.is_doubly_stochastic
        for m, matrix in enumerate(schedule.matrices(), start=1):
            np.testing.assert_array_equal(matrix, matrix.T)
            for odd in range(1, n, 2):
                even = (odd + 2**m - 1) % n
                assert even % 2 == 0
                assert matrix[odd, even] == matrix[odd, odd] == 0.5


def test_complete_cycle():
    for n in range(2, 12):
        schedule = topology.complete_cycle(n)
        assert schedule.period == n - 1
        for k, matrix in enumerate(schedule.matrices()):
            expected = np.eye(n) / 2
            for i in range(n):
                expected[i, (i - k - 1) % n] = 0.5
            np.testing.assert_array_equal(matrix, expected)


def test_star():
    uniform = np.eye(5) / 2
    uniform[0] = 0.5
    uniform[:, 0] = 0.2
    np.testing.assert_allclose(topology.star(5).matrices()[0], uniform)
    assert not topology.star(5).is_doubly_stochastic
    metropolis = topology.star(5, weights="metropolis")
    expected = np.eye(5) * 0.8
    expected[0] = expected[:, 0] = 0.2
    np.testing.assert_allclose(metropolis.matrices()[0], expected)
    assert metropolis == topology.from_graph(networkx.star_graph(4), weights="metropolis")
    assert topology.star(2) == topology.ring(2)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2), (2, 5), (4, 6)])
def test_torus(rows, columns):
    n = rows * columns
    expected = np.zeros((n, n))
    for r in range(rows):
        for c in range(columns):
            cells = {(r, c), (r, c - 1), (r, c + 1), (r - 1, c), (r + 1, c)}
            receivers = {(a % rows) * columns + b % columns for a, b in cells}
            expected[sorted(receivers), r * columns + c] = 1 / len(receivers)
    schedule = topology.torus(rows, columns)
    np.testing.assert_allclose(schedule.matrices()[0], expected)
    assert schedule.is_doubly_stochastic
    check_schedule(schedule, n)


def test_hypercube():
    for bits in range(7):
        n = 2**bits
        expected = [[((i ^ j).bit_count() <= 1) / (bits + 1) for j in range(n)] for i in range(n)]
        np.testing.assert_allclose(topology.hypercube(n).matrices()[0], expected)


def test_random_ring_is_a_ring_over_an_order_of_the_nodes():
    for n in (3, 4, 7, 16):
        for matrix in topology.random_ring(n, 20, 5).matrices():
            np.testing.assert_array_equal(matrix, matrix.T)
            np.testing.assert_allclose(matrix[matrix > 0], 1 / 3)
            assert (np.count_nonzero(matrix, axis=0) == 3).all()
            assert networkx.is_connected(networkx.from_numpy_array(matrix))
    np.testing.assert_array_equal(topology.random_ring(2, 3, 0).matrices(), np.full((3, 2, 2), 0.5))


def test_random_pairs_are_uniform_over_the_pairs():
    n = 8
    matrices = topology.random_pairs(n, 4000, 1).matrices()
    np.testing.assert_array_equal(matrices, matrices.transpose(0, 2, 1))
    np.testing.assert_array_equal(np.sort(matrices, axis=2)[..., -2:], 0.5)
    expected = np.where(np.eye(n), 1 / 2, 1 / (2 * (n - 1)))
    np.testing.assert_allclose(matrices.mean(axis=0), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("graph", ["exponential", "complete"])
def test_random_peer_draws_among_the_out_neighbours(graph):
    n = 12
    matrices = topology.random_peer(n, 2000, 3, graph=graph).matrices()
    hops = [1, 2, 4, 8] if graph == "exponential" else range(1, n)
    for matrix in matrices:
        np.testing.assert_array_equal(np.diag(matrix), 0.5)
        np.testing.assert_array_equal(np.sort(matrix, axis=0)[-3:, 0], [0, 0.5, 0.5])
    expected = np.eye(n) / 2
    for hop in hops:
        expected += np.roll(np.eye(n), hop, axis=0) / (2 * len(hops))
    np.testing.assert_allclose(matrices.mean(axis=0), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "build",
    [
        topology.random_ring,
        topology.random_pairs,
        topology.random_peer,
        lambda *args: topology.random_peer(*args, graph="complete"),
    ],
)
def test_the_seed_determines_a_random_schedule(build):
    schedule = build(8, 10, 7)
    assert schedule == build(8, 10, 7)
    assert schedule != build(8, 10, 8)
    assert schedule.period == 10
    assert len(schedule.rounds) > 5
    np.testing.assert_array_equal(build(8, 20, 7).matrices(10), schedule.matrices())


def count_idle_nodes(schedule: gx.Schedule) -> int:
    """Nodes without a peer, summed over the rounds of a cycle."""
    return int((np.count_nonzero(schedule.matrices(), axis=1) == 1).sum())


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_base_graph_averages_every_size_exactly(peers):
    """Inner edges change neither the rounds, nor the average, nor the peers; fewer nodes wait."""
    waiting = []
    for n in range(peers + 1, 65):
        pair = [topology.base_graph(n, peers), topology.base_graph(n, peers, inner_edges=True)]
        assert pair[0].period == pair[1].period <= 2 * np.log(n) / np.log(peers + 1) + 2 + 1e-9
        for schedule in pair:
            product = np.eye(n)
            for matrix in schedule.matrices():
                np.testing.assert_array_equal(matrix, matrix.T)
                assert np.count_nonzero(matrix, axis=0).max() <= peers + 1
                product = matrix @ product
            np.testing.assert_allclose(product, 1 / n, rtol=0, atol=1e-12)
        waiting.append([count_idle_nodes(schedule) for schedule in pair])
        assert waiting[-1][1] <= waiting[-1][0]
        assert waiting[-1][0] > 0 or pair[0] == pair[1]
    without, within = np.sum(waiting, axis=0)
    assert within < 0.4 * without


def test_base_graph_is_as_short_as_in_its_paper():
    """Figure 4 of Takezawa et al. (n = 6 takes 4 rounds, not 5), and sizes that are products."""
    assert [topology.base_graph(n).period for n in (2, 3, 4, 5, 6, 7, 8)] == [1, 3, 2, 5, 4, 5, 3]
    assert [topology.base_graph(n, 2).period for n in (3, 6, 9, 12, 18, 27)] == [1, 2, 2, 3, 3, 3]
    np.testing.assert_allclose(topology.base_graph(7, 6).matrices(), 1 / 7)


def test_from_graph_keeps_numbers_and_orders_other_labels():
    digraph = networkx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (1, 1)])
    np.testing.assert_allclose(
        topology.from_graph(digraph).matrices()[0],
        [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]],
    )
    path = networkx.Graph()
    path.add_nodes_from([2, 0, 1])
    path.add_edges_from([(0, 1), (1, 2)])
    assert topology.from_graph(path).matrices()[0][0, 2] == 0
    letters = networkx.path_graph(["c", "a", "b"])
    assert topology.from_graph(letters).matrices()[0][0, 2] == 0


def test_metropolis_weights_are_doubly_stochastic():
    schedule = topology.from_graph(networkx.star_graph(5), weights="metropolis")
    assert schedule.is_doubly_stochastic
    graph = networkx.Graph([(0, 1), (0, 2), (0, 3), (1, 2), (3, 4)])  # degrees 3, 2, 2, 2, 1
    matrix = topology.from_graph(graph, weights="metropolis").matrices()[0]
    expected = np.zeros((5, 5))
    for i, j in graph.edges:
        expected[i, j] = expected[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    np.testing.assert_allclose(matrix, expected + np.diag(1 - expected.sum(axis=0)))


def test_piecewise_starts_each_schedule_at_its_round_0():
    one_peer = topology.one_peer_exponential(8)
    hybrid = topology.piecewise({0: topology.complete(8), 4: one_peer, 9: topology.ring(8)})
    complete = topology.complete(8).rounds[0]
    first, second, third = one_peer.rounds
    expected = [complete] * 4 + [first, second, third, first, second, topology.ring(8).rounds[0]]
    assert [hybrid.round_at(step) for step in range(10)] == expected
    assert hybrid.round_at(1000) == expected[-1]
    with pytest.raises(AttributeError, match="a piecewise schedule has no period"):
        hybrid.matrices()
    assert hybrid.matrices(10).shape == (10, 8, 8)


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize(
    "schedule",
    [
        topology.one_peer_exponential(8),
        topology.piecewise(
            {0: topology.ring(8), 5: topology.one_peer_exponential(8), 9: topology.exponential(8)}
        ),
    ],
)
def test_periodic_averages_exactly_in_place_of_every_kth_round(schedule, every):
    gossip_pga = topology.periodic(schedule, every)
    for step in range(60):
        expected = schedule.round_at(step).matrix
        if step % every == every - 1:
            expected = np.full((8, 8), 1 / 8)
        np.testing.assert_array_equal(gossip_pga.round_at(step).matrix, expected)
