"""Bad inputs of topologies and schedules."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import jax
import networkx as nx
import numpy as np

import gossipjax as gx
from bad_input.rows import Call, calls

T = gx.topology
RING = T.ring(4)
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
NO_COUNTS = [0, -1, 2.0, True, "4", None]


def from_traced() -> object:
    return jax.jit(lambda m: T.from_matrices(m) and m)(np.eye(2)[None])


ROWS: list[Call] = [
    row
    for builder in BUILDERS
    for row in calls(builder.__name__, builder, NO_COUNTS, "must be an integer >= 1")
]
ROWS += calls(
    "k_peer_exponential n", lambda n: T.k_peer_exponential(n, 2), NO_COUNTS[:3], "must be"
)
ROWS += calls("k_peer peers", lambda k: T.k_peer_exponential(8, k), [0, 1.5, None, 100], "peers")
ROWS += calls("base_graph peers", lambda k: T.base_graph(8, k), [0, 1.5, None], "peers")
ROWS += calls("torus rows", lambda n: T.torus(n, 3), [0, 1.5, None], "rows")
ROWS += calls("torus columns", lambda n: T.torus(3, n), [0, "3", True], "columns")
ROWS += calls("random_ring rounds", lambda r: T.random_ring(4, r, 0), [0, 2.0, None], "rounds")
ROWS += calls("random_ring seed", lambda s: T.random_ring(4, 3, s), [-1, 1.5, None], "seed")
ROWS += calls("random_peer seed", lambda s: T.random_peer(4, 3, s), [-1, "0"], "seed")
ROWS += calls("random_peer graph", lambda g: T.random_peer(4, 3, 0, g), ["ring", None], "graph")
ROWS += calls("random_pairs n", lambda n: T.random_pairs(n, 3, 0), [0, 3, 2.5], "must be")
ROWS += calls("random_pairs rounds", lambda r: T.random_pairs(4, r, 0), [0, 2.0, None], "rounds")
ROWS += calls("random_pairs seed", lambda s: T.random_pairs(4, 9, s), [-1, "0"], "seed")
ROWS += calls("periodic schedule", lambda s: T.periodic(s, 3), [None, "ring", np.eye(4)], "must be")
ROWS += calls("periodic every", lambda k: T.periodic(RING, k), [0, 1.5, True, 2**21], "every of")
ROWS += calls("hypercube size", T.hypercube, [3, 6], "power of two")
ROWS += calls("bipartite size", T.bipartite_exponential, [3, 7], "must be even")
ROWS += calls("star weights", lambda w: T.star(4, w), ["equal", None], "weights")
ROWS += calls(
    "piecewise", T.piecewise, [[RING], None, {}, {1: RING}, {0: "ring"}, {-1: RING}], "must"
)
ROWS += calls("piecewise key", lambda k: T.piecewise({0: RING, k: RING}), [1.5, "8", 2**40], "must")
ROWS += calls(
    "from_matrices",
    T.from_matrices,
    [
        [],
        None,
        "ring",
        np.eye(2)[0],
        np.zeros((1, 2, 3)),
        [[[1.0, 0.0], [0.0]]],
        np.zeros((1, 2, 2)),
        np.full((1, 2, 2), np.nan),
        np.full((1, 2, 2), np.inf),
        np.array([[[2.0, 0.0], [-1.0, 1.0]]]),
        np.eye(2)[None].astype(complex),
        np.array([[["a", "b"], ["c", "d"]]]),
    ],
    "must",
)
ROWS += [
    Call("from_matrices traced", from_traced, "must"),
    Call("piecewise sizes", lambda: T.piecewise({0: RING, 2: T.ring(5)}), "must"),
    Call("from_graph without edges weights", lambda: T.from_graph(nx.path_graph(3), "equal"), "w"),
    Call("from_graph of a list", lambda: T.from_graph([(0, 1)]), "graph"),
    Call("from_graph of nothing", lambda: T.from_graph(None), "graph"),
    Call("from_graph empty", lambda: T.from_graph(nx.Graph()), "must"),
    Call(
        "from_graph in two parts", lambda: T.from_graph(nx.Graph([("a", "b"), ("c", "d")])), "must"
    ),
    Call("ring of 74 GiB and more", lambda: T.complete(10**9), "must"),
    Call("absurd ring", lambda: T.ring(2**70), "must"),
    Call("absurd rounds", lambda: T.random_ring(4, 10**12, 0), "must"),
]
ROWS += calls("index_at", RING.index_at, ["0", 1.5, None, True], "step")
ROWS += calls("round_at", RING.round_at, [0.0, "0"], "step")
ROWS += calls("matrices", RING.matrices, [-1, 1.5, 10**13], "must")
ROWS += calls("every", RING.every, [0, -1, 1.5, None, 10**13], "must")
ROWS += calls("every phase", functools.partial(RING.every, 2), [-1, 1.5, None], "must")
ROWS += calls("canonical_step", RING.canonical_step, [-1, 1.5, None], "step")
ROWS += calls(
    "lookback",
    functools.partial(T.piecewise({0: RING, 2: T.complete(4)}).canonical_step, 3),
    [-1, 0.5, 10**13],
    "lookback",
)
ROWS += calls("canonical_steps", RING.canonical_steps, [-1, 0.5], "lookback")
ROWS += calls("spectral_gap", T.spectral_gap, [None, np.eye(2), 4], "must be a")
ROWS += calls("rounds_to_exact_average", T.rounds_to_exact_average, [None, "ring"], "must be a")
ROWS += calls(
    "second_singular_value", lambda s: T.second_singular_value(s, 2), [None, 4], "must be"
)
ROWS += calls("steps", lambda k: T.second_singular_value(RING, k), [-1, 1.5, None], "steps")
