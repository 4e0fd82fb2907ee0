"""Schedules of one graph that never changes, and schedules of given matrices. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gossipjax.topology._round import Round, make_regular_round, require_int
from gossipjax.topology._weights import optimal_weights, read_graph
from gossipjax.topology.schedule import Schedule, named

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Weights = Literal["uniform", "metropolis"]
GraphWeights = Literal[Weights, "optimal"]
MIN_SELF_WEIGHT = 1e-3  # optimal weights, too, must keep part of a node's model


def make_circulant_round(n: int, hops: Iterable[int]) -> Round:
    """Makes a round in which node `i` weighs itself and `(i - hop) mod n` equally, for each hop.

    Hops that are equal modulo `n` count once.
    """
    distinct = np.array(sorted({0, *(hop % n for hop in hops)}))
    return make_regular_round(np.sort((np.arange(n)[:, None] - distinct) % n, axis=1))


def make_weighted_round(
    n: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
) -> Round:
    """Makes a round of weighted edges without self-loops; a node keeps what it does not send."""
    nodes = np.arange(n)
    order = np.argsort(receivers, kind="stable")  # so the order of edges does not change the sums
    kept = 1 - np.bincount(senders[order], weights[order], n)
    return Round.from_entries(
        n,
        np.concatenate([receivers, nodes]),
        np.concatenate([senders, nodes]),
        np.concatenate([weights, kept]),
    )


def make_metropolis_round(n: int, receivers: np.ndarray, senders: np.ndarray) -> Round:
    """Makes a round of undirected edges, given in both directions, with Metropolis weights."""
    degree = np.bincount(senders, minlength=n)
    shares = 1 / (1 + np.maximum(degree[receivers], degree[senders]))
    return make_weighted_round(n, receivers, senders, shares)


def _make_graph_schedule(
    n: int, receivers: np.ndarray, senders: np.ndarray, weights: Weights
) -> Schedule:
    """Makes a schedule of one round over edges; drops self-loops and repeated edges."""
    edge_numbers = (receivers * n + senders)[receivers != senders]
    receivers, senders = np.divmod(np.unique(edge_numbers), n)
    if weights == "uniform":
        nodes = np.arange(n)
        all_senders = np.concatenate([senders, nodes])
        all_receivers = np.concatenate([receivers, nodes])
        shares = 1 / np.bincount(all_senders, minlength=n)
        return Schedule([Round.from_entries(n, all_receivers, all_senders, shares[all_senders])])
    if weights == "metropolis":
        return Schedule([make_metropolis_round(n, receivers, senders)])
    raise ValueError(f"weights must be 'uniform' or 'metropolis', got {weights!r}.")


@named
def ring(nodes: int) -> Schedule:
    """Undirected ring: each node averages itself and its two neighbours; `T = 1`.

    `P[i, j] = 1/3` for `j` in `{i - 1, i, i + 1} mod N`. `ring(2)` is one pair with weights 1/2.

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017,
      arXiv:1705.09056.

    >>> ring(4).matrices()[0].round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    n = require_int(nodes, "nodes of ring", 1)
    return Schedule([make_circulant_round(n, [1, -1])])


@named
def directed_ring(nodes: int) -> Schedule:
    """Directed ring: `P[i, i] = P[i, i - 1 mod N] = 1/2`; `T = 1`.

    >>> directed_ring(3).matrices()[0].tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    n = require_int(nodes, "nodes of directed_ring", 1)
    return Schedule([make_circulant_round(n, [1])])


@named
def complete(nodes: int) -> Schedule:
    """Complete graph: all nodes take the exact average, `P = 1 1^T / N`; `T = 1`.

    >>> complete(4).round_at(0).is_uniform
    True
    """
    n = require_int(nodes, "nodes of complete", 1)
    return Schedule([make_regular_round(np.broadcast_to(np.arange(n, dtype=np.int32), (n, n)))])


def exponential_hops(n: int) -> list[int]:
    """Returns 2^0, 2^1, ..., 2^floor(log2(n - 1)), or nothing for one node."""
    return [1 << i for i in range((n - 1).bit_length())]


@named
def exponential(nodes: int) -> Schedule:
    """Static exponential graph: nodes use hops `2^0, ..., 2^floor(log2(N - 1))` at once; `T = 1`.

    With `h` hops, `P[i, j] = 1 / (h + 1)` for `j = i` and every `j = (i - hop) mod N`.

    >>> len(exponential(8).round_at(0).slots)
    3
    """
    n = require_int(nodes, "nodes of exponential", 1)
    return Schedule([make_circulant_round(n, exponential_hops(n))])


@named
def star(nodes: int, *, weights: Weights = "uniform") -> Schedule:
    """Star: every other node exchanges with the hub, node 0; `T = 1`.

    The hub is like a parameter server that averages with its workers in every round.

    Args:
      weights: with `"uniform"`, `P[i, 0] = 1 / N`, and every other node keeps 1/2 and sends 1/2 to
        the hub. Rows do not sum to 1, so only push-sum can use it. With `"metropolis"`, every edge
        has weight `1 / N`, because one of its ends, the hub, has N - 1 neighbours. A node keeps the
        rest, so that rows and columns sum to 1.

    Raises:
      ValueError: for an unknown `weights`.

    >>> star(3).matrices()[0].round(2).tolist()
    [[0.33, 0.5, 0.5], [0.33, 0.5, 0.0], [0.33, 0.0, 0.5]]
    """
    n = require_int(nodes, "nodes of star", 1)
    leaves = np.arange(1, n)
    hub = np.zeros(n - 1, dtype=int)
    return _make_graph_schedule(
        n, np.concatenate([leaves, hub]), np.concatenate([hub, leaves]), weights
    )


@named
def torus(rows: int, columns: int) -> Schedule:
    """Grid of `N = rows * columns` nodes whose opposite sides are joined; `T = 1`.

    Node `r * columns + c` is at `(r, c)`, and its neighbours are at `(r +- 1 mod rows, c)` and
    `(r, c +- 1 mod columns)`. If `d` neighbours are distinct, `P[i, j] = 1 / (d + 1)` for the node
    itself and each neighbour: `d` is 4, or less if a side is shorter than 3.

    >>> torus(3, 4).round_at(0).matrix[0].round(1).tolist()
    [0.2, 0.2, 0.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0]
    """
    rows = require_int(rows, "rows of torus(rows, columns)", 1)
    columns = require_int(columns, "columns of torus(rows, columns)", 1)
    n = rows * columns
    nodes = np.arange(n).reshape(rows, columns)
    neighbors = [np.roll(nodes, shift, axis) for axis in (0, 1) for shift in (1, -1)]
    return _make_graph_schedule(
        n, np.concatenate(neighbors, axis=None), np.tile(nodes.ravel(), 4), "uniform"
    )


@named
def hypercube(nodes: int) -> Schedule:
    """Static hypercube: node `i` exchanges with `i xor 2^b` for every bit `b`; `T = 1`.

    All weights are `1 / (log2(N) + 1)`.

    Raises:
      ValueError: if `nodes` is not a power of two.

    >>> hypercube(4).round_at(0).matrix.round(2)[0].tolist()
    [0.33, 0.33, 0.33, 0.0]
    """
    n = require_int(nodes, "nodes of hypercube", 1)
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise ValueError(
            f"nodes of hypercube must be a power of two, got {n}. Use {below} or {2 * below} "
            f"nodes, or exponential({n})."
        )
    bits = 1 << np.arange(n.bit_length() - 1)
    numbers = np.arange(n)
    return _make_graph_schedule(
        n, (numbers ^ bits[:, None]).ravel(), np.tile(numbers, len(bits)), "uniform"
    )


@named
def from_graph(graph: Any, *, weights: GraphWeights = "uniform") -> Schedule:
    """Makes a static schedule from a networkx graph, directed or not; `T = 1`.

    An edge `(u, v)` of a directed graph means that `u` sends to `v`. Self-loops and edge attributes
    are ignored. Nodes labelled `0, ..., N - 1` keep their numbers; other labels are numbered in the
    order of `graph.nodes`.

    Args:
      weights: with `"uniform"`, `P[i, j] = 1 / (1 + out-degree of j)` for `i = j` and every edge
        `(j, i)`. The other two need an undirected graph, and rows and columns of P sum to 1. With
        `"metropolis"`, `P[i, j] = 1 / (1 + max(degree of i, degree of j))` for every edge, and a
        node keeps the rest. `"optimal"` takes the weights of `gx.topology.optimal_weights`, which
        mix fastest, with at least 0.001 on the diagonal; it needs the extra `weights`.

    Raises:
      ValueError: for an unknown `weights`, for Metropolis or optimal weights on a directed graph,
        or if the graph has no nodes or is not (strongly) connected.
      ImportError: for optimal weights if the extra is not installed.

    References:
      Xiao, Boyd, Lall, "A Scheme for Robust Distributed Sensor Fusion Based on Average Consensus",
      IPSN 2005 (Metropolis weights).

    >>> import networkx
    >>> from_graph(networkx.star_graph(2), weights="metropolis").matrices()[0].round(2).tolist()
    [[0.33, 0.33, 0.33], [0.33, 0.67, 0.0], [0.33, 0.0, 0.67]]
    """
    if weights == "optimal":
        return from_matrices(optimal_weights(graph, min_self_weight=MIN_SELF_WEIGHT))
    n, edges = read_graph(graph)
    if weights == "metropolis" and graph.is_directed():
        raise ValueError(
            "graph must be undirected for weights='metropolis', got a directed one. Use "
            "weights='uniform' with sgp, or graph.to_undirected()."
        )
    senders, receivers = edges.T
    if not graph.is_directed():
        senders, receivers = np.concatenate([edges, edges[:, ::-1]]).T
    return _make_graph_schedule(n, receivers, senders, weights)


@named
def from_matrices(matrices: ArrayLike) -> Schedule:
    """Makes a schedule from mixing matrices, `[N, N]` or `[T, N, N]`.

    Raises:
      ValueError: if a column does not sum to 1 (within 1e-6), a weight is negative, a diagonal has
        a zero, or the rounds never connect all nodes. The message names the round, and the column,
        entry or node.

    >>> from_matrices([[0.5, 0.25], [0.5, 0.75]]).is_doubly_stochastic
    False
    """
    stacked = np.array(matrices, np.float64)
    if stacked.ndim == 2:
        stacked = stacked[None]
    return Schedule([Round(matrix, f"round {t}") for t, matrix in enumerate(stacked)])
