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
        matrix[receivers, np.arange(n)] += weights
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
    cycles = itertools.count()
    while not product.all():
        assert next(cycles) < n, "connected graphs have a positive product after n cycles"
        for matrix in matrices:
            product = (matrix @ product > 0).astype(float)
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
    "two_random_peers": lambda n: topology.random_peer(n, 20, 0, graph="complete", peers=2),
    "erdos_renyi": lambda n: topology.erdos_renyi(n, 40, 0, probability=0.3),
    "random_rounds": lambda n: topology.random_rounds(topology.ring(n), 9, 0, probability=0.4),
}
IMPOSSIBLE = {
    "bipartite_exponential": lambda n: n % 2 and n > 1,
    "random_pairs": lambda n: n % 2 and n > 1,
    "hypercube": lambda n: n.bit_count() > 1,
    "two_peer_exponential": lambda n: n == 2,
    "two_peer_base_graph": lambda n: n == 2,
    "two_random_peers": lambda n: n == 2,
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


def list_powers(n: int) -> list[int]:
    """The hops of an exponential graph, floor(log2(n - 1)) + 1 (arXiv:1811.10792v1, A.1)."""
    return [2**i for i in range(n) if 2**i <= n - 1]


def bipartite_peer(n, k, j):
    return j + (2 ** (k + 1) - 1) * (1 if j % 2 else -1)


# The rounds of a cycle, and the nodes (modulo n) among which node j divides its model in round k.
DEFINITIONS = {
    "ring": (lambda n: 1, lambda n, k, j: {j - 1, j, j + 1}),
    "directed_ring": (lambda n: 1, lambda n, k, j: {j, j + 1}),
    "complete": (lambda n: 1, lambda n, k, j: range(n)),
    "exponential": (lambda n: 1, lambda n, k, j: {j, *(j + hop for hop in list_powers(n))}),
    "one_peer_exponential": (
        lambda n: (n - 1).bit_length(),
        lambda n, k, j: {j, j + list_powers(n)[k]},
    ),
    "two_peer_exponential": (
        lambda n: (n - 1).bit_length(),
        lambda n, k, j: {j, j + list_powers(n)[k], j + (2 * list_powers(n))[k + 1]},
    ),
    "bipartite_exponential": (
        lambda n: int(np.floor(np.log2(n - 1))) + 1,
        lambda n, k, j: {j, bipartite_peer(n, k, j)},
    ),
    "complete_cycle": (lambda n: n - 1, lambda n, k, j: {j, j + k + 1}),
    "star": (lambda n: 1, lambda n, k, j: range(n) if j == 0 else {0, j}),
    "hypercube": (
        lambda n: 1,
        lambda n, k, j: {j, *(j ^ 2**b for b in range(n.bit_length() - 1))},
    ),
}


def check_definition(schedule, receivers_of):
    n = schedule.size
    for k, matrix in enumerate(schedule.matrices()):
        expected = np.zeros((n, n))
        for j in range(n):
            receivers = {i % n for i in receivers_of(n, k, j)}
            expected[sorted(receivers), j] = 1 / len(receivers)
        np.testing.assert_allclose(matrix, expected, rtol=1e-12)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_definition(name):
    find_period, receivers_of = DEFINITIONS[name]
    for n in (2, 3, 4, 8, 9, 12, 16, 17, 33, 64):
        if not IMPOSSIBLE.get(name, lambda n: False)(n):
            schedule = BUILDERS[name](n)
            assert schedule.period == find_period(n)
            check_definition(schedule, receivers_of)


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
    hops = list_hops_of_phone_book(n, peers, period)
    check_definition(schedule, lambda n, k, j: {j, *(j + hop for hop in hops[k])})
    assert (np.count_nonzero(schedule.matrices(), axis=1) == peers + 1).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (2, 2), (2, 5), (4, 6)])
def test_torus(rows, columns):
    def receivers_of(n, k, j):
        r, c = divmod(j, columns)
        cells = [(r, c), (r, c - 1), (r, c + 1), (r - 1, c), (r + 1, c)]
        return [(a % rows) * columns + b % columns for a, b in cells]

    schedule = topology.torus(rows, columns)
    check_definition(schedule, receivers_of)
    assert schedule.is_doubly_stochastic
    check_schedule(schedule, rows * columns)


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


def test_random_graphs_and_rounds_have_their_probability():
    n = 6
    graphs = topology.erdos_renyi(n, 3000, 1, probability=0.3).matrices()
    is_edge = (graphs > 0) & ~np.eye(n, dtype=bool)
    np.testing.assert_array_equal(graphs, graphs.transpose(0, 2, 1))
    np.testing.assert_allclose(is_edge.mean(axis=0), np.where(np.eye(n), 0, 0.3), atol=0.03)
    degree = is_edge.sum(axis=2)
    smaller = 1 / (1 + np.maximum(degree[:, :, None], degree[:, None]))
    np.testing.assert_allclose(graphs[is_edge], smaller[is_edge])
    cycle = topology.one_peer_exponential(8)
    some = topology.random_rounds(cycle, 3000, 1, probability=0.3)
    is_used = [not some.round_at(k).is_identity for k in range(3000)]
    assert abs(np.mean(is_used) - 0.3) < 0.03
    assert all(not used or some.round_at(k) == cycle.round_at(k) for k, used in enumerate(is_used))
    assert len(some.rounds) == 4
    for make in (
        topology.erdos_renyi,
        lambda *args, **p: topology.random_rounds(cycle, *args[1:], **p),
    ):
        with pytest.raises(ValueError, match=r"above 0 and at most 1, got 0\.0"):
            make(8, 10, 0, probability=0.0)
    with pytest.raises(ValueError, match="piecewise"):
        topology.random_rounds(topology.piecewise({0: cycle, 4: cycle}), 10, 0, probability=0.5)


@pytest.mark.parametrize(
    "build",
    [
        topology.random_ring,
        topology.random_pairs,
        topology.random_peer,
        lambda *args: topology.random_peer(*args, graph="complete"),
        lambda *args: topology.random_peer(*args, peers=2),
        lambda *args: topology.erdos_renyi(*args, probability=0.4),
    ],
)
def test_the_seed_determines_a_random_schedule(build):
    schedule = build(8, 10, 7)
    assert schedule == build(8, 10, 7)
    assert schedule != build(8, 10, 8)
    assert schedule.period == 10
    assert len(schedule.rounds) > 5
    np.testing.assert_array_equal(build(8, 20, 7).matrices(10), schedule.matrices())


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_base_graph_averages_every_size_exactly(peers):
    for n in range(peers + 1, 65):
        schedule = topology.base_graph(n, peers)
        assert schedule.period <= 2 * np.log(n) / np.log(peers + 1) + 2 + 1e-9
        product = np.eye(n)
        for matrix in schedule.matrices():
            np.testing.assert_array_equal(matrix, matrix.T)
            assert np.count_nonzero(matrix, axis=0).max() <= peers + 1
            product = matrix @ product
        np.testing.assert_allclose(product, 1 / n, rtol=0, atol=1e-12)


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


def test_metropolis_weights():
    graph = networkx.Graph([(0, 1), (0, 2), (0, 3), (1, 2), (3, 4)])  # degrees 3, 2, 2, 2, 1
    schedule = topology.from_graph(graph, weights="metropolis")
    assert schedule.is_doubly_stochastic
    expected = np.zeros((5, 5))
    for i, j in graph.edges:
        expected[i, j] = expected[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    expected += np.diag(1 - expected.sum(axis=0))
    np.testing.assert_allclose(schedule.matrices()[0], expected)
    star = topology.star(5, weights="metropolis")
    assert star == topology.from_graph(networkx.star_graph(4), weights="metropolis")


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
