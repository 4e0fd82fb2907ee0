"""Bad inputs of topologies and schedules."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax
import networkx as nx
import numpy as np

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax.topology import Round

T = gx.topology
RING = T.ring(4)
HYBRID = T.piecewise({0: RING, 4: T.complete(4)})
EYE = np.eye(2)
PAIRS = np.kron(EYE, np.full((2, 2), 0.5))  # two, which never meet
BUILDERS = [
    T.one_peer_exponential,
    T.exponential,
    T.bipartite_exponential,
    T.complete_cycle,
    T.ring,
    T.directed_ring,
    T.complete,
    T.star,
    T.hypercube,
    T.base_graph,
]


def entries(*arguments: Any) -> Callable[[], Round]:
    return lambda: Round.from_entries(*arguments)


def from_traced() -> object:
    return jax.jit(lambda m: T.from_matrices(m) and m)(EYE[None])


ROWS: list[Call] = [
    row
    for builder in BUILDERS
    for row in calls(builder.__name__, builder, [0, 2.0, "4"], "must be an integer >= 1")
]
for name, function, values, message in (
    ("k_peer n", lambda n: T.k_peer_exponential(n, 2), [0, 2.0], "must be"),
    ("k_peer peers", lambda k: T.k_peer_exponential(8, k), [0, 1.5], "peers"),
    ("k_peer many", lambda k: T.k_peer_exponential(8, k), [4], "8 nodes have 3 hops (1, 2, 4)"),
    ("hops", lambda h: T.k_peer_exponential(8, 2, h), ["ours"], "'paper' or 'authors'"),
    (
        "hops of the authors",
        lambda n: T.k_peer_exponential(n, 3, "authors"),
        [8, 12],
        "Use hops='paper'",
    ),
    ("base_graph peers", lambda k: T.base_graph(5, k), [0, 5, 1.5], "peers"),
    ("nodes, more than numbers", T.ring, [2**17 + 1], "n of ring(n) must be at most 131072"),
    ("weights, more than memory", T.complete, [10**5], "at most 33554432 nonzero weights"),
    ("torus rows", lambda n: T.torus(n, 3), [0, 1.5], "rows of torus"),
    ("torus columns", lambda n: T.torus(3, n), [0, "3"], "columns of torus"),
    ("random_ring rounds", lambda r: T.random_ring(4, r, 0), [0, 2.0, None], "rounds of random"),
    ("random_ring seed", lambda s: T.random_ring(4, 3, s), [-1, None], "seed of random"),
    ("random_peer graph", lambda g: T.random_peer(4, 3, 0, g), ["ring"], "or 'complete'"),
    ("random_pairs n", lambda n: T.random_pairs(n, 3, 0), [0, 3], "must be"),
    ("periodic every", lambda k: T.periodic(RING, k), [0, 1.5, 2**21], "every of"),
    ("hypercube size", T.hypercube, [12], "Use 8 or 16 nodes"),
    ("bipartite size", T.bipartite_exponential, [7], "Use 6 or 8 nodes, or sgp"),
    ("star weights", lambda w: T.star(4, w), ["equal"], "'uniform' or 'metropolis'"),
    ("piecewise start", T.piecewise, [{}, {3: RING}], "must start at step 0"),
    ("piecewise key", lambda k: T.piecewise({0: RING, k: RING}), [-1, 1.5, "8"], "each start"),
    ("piecewise late", lambda k: T.piecewise({0: RING, k: RING}), [2**31], "must be below 2^31"),
    ("piecewise of", lambda s: T.piecewise({0: s}), [np.eye(4), "ring"], "must be a Schedule"),
    ("piecewise sizes", lambda s: T.piecewise({0: RING, 2: s}), [T.ring(5)], "the same size"),
    ("piecewise twice", lambda s: T.piecewise({0: RING, 2: s}), [HYBRID], "be piecewise itself"),
    ("from_matrices type", T.from_matrices, ["ring", RING], "must be numbers"),
    ("from_matrices rows", T.from_matrices, [[[0.5, 0.5], [0.5]], [EYE, np.eye(3)]], "same length"),
    ("from_matrices shape", T.from_matrices, [EYE[0], np.zeros((1, 2, 3))], "[N, N]"),
    ("from_matrices none", T.from_matrices, [np.zeros((0, 2, 2))], "at least one Round"),
    ("matrix rows", T.from_matrices, [[[0.2, 0.8], [0.3, 0.7]]], "pass the transpose"),
    ("matrix sum", T.from_matrices, [[[0.5, 0.5], [0.4, 0.5]]], "got 0.9 for column 0"),
    ("matrix self", T.from_matrices, [[[0, 0.5], [1, 0.5]]], "got P[0, 0] = 0"),
    ("matrix sign", T.from_matrices, [[[1.5, 0.5], [-0.5, 0.5]]], "got P[1, 0] = -0.5"),
    ("matrix nan", T.from_matrices, [[[np.nan, 0.5], [0.5, 0.5]]], "P[0, 0] = nan"),
    ("matrix of a later round", T.from_matrices, [[np.full((2, 2), 0.5), -EYE]], "round 1"),
    ("matrix of two parts", T.from_matrices, [PAIRS], "node 0 can never send to node 2"),
    ("matrix one way", T.from_matrices, [[[0.5, 0], [0.5, 1]]], "can never receive from node 1"),
    ("from_graph", T.from_graph, [[(0, 1)], 3], "must be a networkx graph"),
    ("from_graph empty", T.from_graph, [nx.Graph()], "at least one node, got an empty graph"),
    ("from_graph parts", T.from_graph, [nx.Graph([(0, 1), (2, 3)])], "must connect all 4 nodes"),
    ("from_graph weights", lambda w: T.from_graph(nx.path_graph(3), w), ["equal"], "'uniform' or"),
    (
        "from_graph directed",
        lambda graph: T.from_graph(graph, "metropolis"),
        [nx.DiGraph([(0, 1), (1, 0)])],
        "graph must be undirected for weights='metropolis'",
    ),
    ("index_at", RING.index_at, ["0", 1.5, None], "step"),
    ("round_at", RING.round_at, [0.5], "step must be an integer"),
    ("matrices", RING.matrices, [-1, 1.5], "must"),
    ("every", RING.every, [0, 1.5], "k of every(k, phase) must be an integer >= 1"),
    ("every phase", lambda phase: RING.every(3, phase), [3], "phase of every(3, phase)"),
    ("every negative phase", lambda phase: RING.every(3, phase), [-1], "phase of every(k, phase)"),
    ("canonical_step", RING.canonical_step, [-1, 1.5, None], "step must be an integer >= 0"),
    ("lookback", lambda k: HYBRID.canonical_step(3, k), [-1, 0.5, 10**13], "lookback"),
    ("spectral_gap of a hybrid", T.spectral_gap, [HYBRID], "2 segments. Compute"),
    ("steps", lambda k: T.second_singular_value(RING, k), [-1, 1.5], "steps"),
):
    ROWS += calls(name, function, values, message)

ROWS += [
    Call("from_matrices traced", from_traced, "build schedules outside of jitted functions"),
    Call("rounds of other sizes", lambda: gx.Schedule([Round(np.eye(1)), Round(EYE)]), "same size"),
    Call("rounds that are none", lambda: gx.Schedule([3]), "at least one Round object"),
    Call("entries twice", entries(2, [0, 1, 0], [0, 1, 0], 1), "got two of P[0, 0]"),
    Call("receivers", entries(2, [0, 2], [0, 1], 1), "receivers of round 0 must be a list of int"),
    Call("senders", entries(2, [0, 1], [0, 0.5], 1), "senders of round 0 must be a list of int"),
    Call("lengths of entries", entries(2, [0, 1], [0], 1), "the same length, got 2, 1 and []"),
    Call("nan of entries", entries(2, [0, 1], [0, 1], [1, np.nan]), "got P[1, 1] = nan"),
    Call("sum of entries", entries(2, [0, 1], [0, 1], 0.5), "got 0.5 for column 0"),
    Call("self weight of entries", entries(2, [0, 0, 1], [0, 1, 1], [1, 1, 0]), "P[1, 1] = 0"),
]
ROWS += [
    Call(
        "a million local steps", lambda: T.complete_cycle(9).every(2**20), "at most 1048576 steps"
    ),
    Call("gap of many", lambda: T.spectral_gap(T.star(5000)), "at most 4096 nodes, got 5000"),
    Call("average of many", lambda: T.rounds_to_exact_average(T.star(5000)), "at most 4096 nodes"),
]
