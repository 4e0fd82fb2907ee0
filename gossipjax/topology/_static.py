"""Graphs that stay the same: builders of schedules of one round. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from gossipjax.topology.schedule import Round, Schedule, require_int

Weights = Literal["uniform", "metropolis"]


def make_circulant_round(n: int, hops: Iterable[int]) -> Round:
    """Round in which node `i` gives equal weights to itself and to `(i - hop) mod n` for each hop.

    Hops that are equal modulo `n` count once.
    """
    distinct = {0, *(hop % n for hop in hops)}
    matrix = sum(np.roll(np.eye(n), hop, axis=0) for hop in distinct) / len(distinct)
    return Round(matrix)


def _make_weighted_schedule(sends: np.ndarray, weights: Weights) -> Schedule:
    """Schedule of one round over the edges `sends[receiver, sender]`, without self-loops."""
    degree = sends.sum(axis=0)
    if weights == "uniform":
        matrix = (sends + np.eye(len(sends))) / (1 + degree)
    elif weights == "metropolis":
        matrix = sends / (1 + np.maximum(degree[:, None], degree[None, :]))
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=0))
    else:
        raise ValueError(f"weights must be 'uniform' or 'metropolis', got {weights!r}.")
    return Schedule([Round(matrix)])


def ring(n: int) -> Schedule:
    """Undirected ring: weight 1/3 for the node itself and each of its two neighbours; `T = 1`.

    `P[i, j] = 1/3` for `j` in `{i - 1, i, i + 1} mod n`. `ring(2)` is one pair with weights 1/2.

    References:
      Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017,
      arXiv:1705.09056.

    >>> ring(4).matrices()[0].round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    n = require_int(n, "n of ring(n)", 1)
    return Schedule([make_circulant_round(n, [1, -1])])


def directed_ring(n: int) -> Schedule:
    """Directed ring: `P[i, i] = P[i, i - 1 mod n] = 1/2`; `T = 1`.

    >>> directed_ring(3).matrices()[0].tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    n = require_int(n, "n of directed_ring(n)", 1)
    return Schedule([make_circulant_round(n, [1])])


def complete(n: int) -> Schedule:
    """Every node sends to every other: `P = 1 1^T / n`, the exact average; `T = 1`.

    >>> complete(4).round_at(0).is_uniform
    True
    """
    n = require_int(n, "n of complete(n)", 1)
    return Schedule([Round(np.full((n, n), 1 / n))])


def star(n: int, weights: Weights = "uniform") -> Schedule:
    """Star: every leaf is joined to the hub, node 0; `T = 1`.

    The mathematics of a parameter server that averages with its workers in every round.

    Args:
      weights: `"uniform"`: `P[i, 0] = 1 / n`, and every leaf keeps 1/2 and sends 1/2 to the hub.
        Columns sum to 1, rows do not: for push-sum only. `"metropolis"`: `1 / n` on every edge,
        the rest on the diagonal: doubly stochastic.

    Raises:
      ValueError: for an unknown `weights`.

    >>> star(3).matrices()[0].round(2).tolist()
    [[0.33, 0.5, 0.5], [0.33, 0.5, 0.0], [0.33, 0.0, 0.5]]
    """
    n = require_int(n, "n of star(n)", 1)
    sends = np.zeros((n, n), dtype=bool)
    sends[0, 1:] = True
    sends[1:, 0] = True
    return _make_weighted_schedule(sends, weights)


def torus(rows: int, columns: int) -> Schedule:
    """Grid of `N = rows * columns` nodes, closed in both directions; `T = 1`.

    Node `r * columns + c` has the neighbours `(r +- 1 mod rows, c)` and `(r, c +- 1 mod columns)`;
    if `d` of them are distinct, `P[i, j] = 1 / (d + 1)` for the node itself and each of them. `d`
    is 4, and less if a side is shorter than 3.

    >>> torus(3, 4).round_at(0).matrix[0].round(1).tolist()
    [0.2, 0.2, 0.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0]
    """
    rows = require_int(rows, "rows of torus(rows, columns)", 1)
    columns = require_int(columns, "columns of torus(rows, columns)", 1)
    vertical = ring(rows).round_at(0).matrix > 0
    horizontal = ring(columns).round_at(0).matrix > 0
    sends = np.kron(vertical, np.eye(columns)) + np.kron(np.eye(rows), horizontal) > 0
    np.fill_diagonal(sends, False)
    return _make_weighted_schedule(sends, "uniform")


def hypercube(n: int) -> Schedule:
    """Static hypercube: node `i` is joined to `i xor 2^b` for every bit `b`; `T = 1`.

    All weights are `1 / (log2(n) + 1)`.

    Raises:
      ValueError: if `n` is not a power of two.

    >>> hypercube(4).round_at(0).matrix.round(2)[0].tolist()
    [0.33, 0.33, 0.33, 0.0]
    """
    n = require_int(n, "n of hypercube(n)", 1)
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise ValueError(
            f"n of hypercube(n) must be a power of two, got {n}. Use {below} or {2 * below} nodes, "
            f"or exponential({n})."
        )
    nodes = np.arange(n)
    sends = np.zeros((n, n), dtype=bool)
    for bit in range(n.bit_length() - 1):
        sends[nodes ^ (1 << bit), nodes] = True
    return _make_weighted_schedule(sends, "uniform")


def from_graph(graph: Any, weights: Weights = "uniform") -> Schedule:
    """Static schedule of a networkx graph, directed or not; `T = 1`.

    An edge `(u, v)` of a directed graph means that `u` sends to `v`. Self-loops and edge attributes
    are ignored. Nodes labelled `0, ..., N - 1` keep their numbers; other labels are numbered in the
    order of `graph.nodes`.

    Args:
      weights: `"uniform"`: `P[i, j] = 1 / (1 + out-degree of j)` for `i = j` and every edge
        `(j, i)`. `"metropolis"` (undirected graphs): `P[i, j] = 1 / (1 + max(degree of i, degree
        of j))` for every edge, the rest on the diagonal: doubly stochastic on irregular graphs.

    Raises:
      ValueError: for an unknown `weights`, Metropolis weights on a directed graph, a graph without
        nodes or one that is not (strongly) connected.

    References:
      Xiao, Boyd, Lall, "A Scheme for Robust Distributed Sensor Fusion Based on Average Consensus",
      IPSN 2005 (Metropolis weights).

    >>> import networkx
    >>> from_graph(networkx.star_graph(2), "metropolis").matrices()[0].round(2).tolist()
    [[0.33, 0.33, 0.33], [0.33, 0.67, 0.0], [0.33, 0.0, 0.67]]
    """
    if not (hasattr(graph, "nodes") and hasattr(graph, "is_directed")):
        raise ValueError(f"graph must be a networkx graph, got {type(graph).__name__}.")
    labels = list(graph.nodes)
    if not labels:
        raise ValueError("graph must have at least one node, got an empty graph.")
    if weights == "metropolis" and graph.is_directed():
        raise ValueError(
            "graph must be undirected for weights='metropolis', got a directed one. Use "
            "weights='uniform' with sgp, or graph.to_undirected()."
        )
    if set(labels) == set(range(len(labels))):
        labels = list(range(len(labels)))
    node_of = {label: node for node, label in enumerate(labels)}
    sends = np.zeros((len(labels), len(labels)), dtype=bool)  # [receiver, sender]
    for u, v in graph.edges():
        sends[node_of[v], node_of[u]] = True
        if not graph.is_directed():
            sends[node_of[u], node_of[v]] = True
    np.fill_diagonal(sends, False)
    return _make_weighted_schedule(sends, weights)
