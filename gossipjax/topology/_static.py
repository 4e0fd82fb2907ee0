"""Graphs that stay as they are: builders of schedules of one round. NumPy only.

Reached as `gossipjax.topology`, which says what holds for all builders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from gossipjax.schedule import Round, Schedule, require_whole

Weights = Literal["uniform", "metropolis"]


def circulant(n: int, hops: Iterable[int]) -> Round:
    """Node `i` takes the same weight of itself and of `(i - hop) mod n`, for distinct hops."""
    distinct = {0, *(hop % n for hop in hops)}
    matrix = sum(np.roll(np.eye(n), hop, axis=0) for hop in distinct) / len(distinct)
    return Round(matrix)


def exponential_hops(n: int) -> list[int]:
    """2^0, 2^1, ..., 2^floor(log2(n - 1)); none for one node."""
    return [1 << i for i in range((n - 1).bit_length())]


def _weighted(sends: np.ndarray, weights: Weights) -> Schedule:
    """One round over the edges `sends[receiver, sender]`, none of them a self-loop."""
    degree = sends.sum(axis=0)
    if weights == "uniform":
        matrix = (sends + np.eye(len(sends))) / (1 + degree)
    elif weights == "metropolis":
        matrix = sends / (1 + np.maximum(degree[:, None], degree[None, :]))
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=0))
    else:
        raise ValueError(f"weights is 'uniform' or 'metropolis'; given {weights!r}.")
    return Schedule([Round(matrix)])


def ring(n: int) -> Schedule:
    """Undirected ring: 1/3 to itself and to both neighbours (DPSGD-17); `T = 1`.

    `P[i, j] = 1/3` for `j` in `{i - 1, i, i + 1} mod n`. `ring(2)` is one pair with weights 1/2.

    >>> ring(4).matrices()[0].round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    n = require_whole(n, "n of ring(n)", 1)
    return Schedule([circulant(n, (1, -1))])


def directed_ring(n: int) -> Schedule:
    """Directed ring: `P[i, i] = P[i, i - 1 mod n] = 1/2`; `T = 1`.

    >>> directed_ring(3).matrices()[0].tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    n = require_whole(n, "n of directed_ring(n)", 1)
    return Schedule([circulant(n, (1,))])


def complete(n: int) -> Schedule:
    """Every node to every node: `P = 1 1^T / n`, the exact average; `T = 1`.

    >>> complete(4).round_at(0).is_uniform
    True
    """
    n = require_whole(n, "n of complete(n)", 1)
    return Schedule([Round(np.full((n, n), 1 / n))])


def star(n: int, weights: Weights = "uniform") -> Schedule:
    """Star: every leaf is joined to the hub, node 0; `T = 1`.

    The mathematics of a parameter server that averages with its workers, round by round.

    Args:
      weights: `"uniform"`: `P[i, 0] = 1 / n`, and every leaf keeps 1/2 and sends 1/2 to the hub.
        Columns sum to 1, rows do not: for push-sum only. `"metropolis"`: `1 / n` on every edge,
        the rest on the diagonal: doubly stochastic.

    Raises:
      ValueError: for an unknown `weights`.

    >>> star(3).matrices()[0].round(2).tolist()
    [[0.33, 0.5, 0.5], [0.33, 0.5, 0.0], [0.33, 0.0, 0.5]]
    """
    n = require_whole(n, "n of star(n)", 1)
    sends = np.zeros((n, n), dtype=bool)
    sends[0, 1:] = sends[1:, 0] = True
    return _weighted(sends, weights)


def torus(rows: int, columns: int) -> Schedule:
    """Grid of `N = rows * columns` nodes that is closed in both directions; `T = 1`.

    Node `r * columns + c` has the neighbours `(r +- 1 mod rows, c)` and `(r, c +- 1 mod columns)`;
    with `d` distinct ones, `P[i, j] = 1 / (d + 1)` for itself and each of them. `d` is 4, and less
    where a side is shorter than 3.

    >>> torus(3, 4).round_at(0).matrix[0].round(1).tolist()
    [0.2, 0.2, 0.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0]
    """
    rows = require_whole(rows, "rows of torus(rows, columns)", 1)
    columns = require_whole(columns, "columns of torus(rows, columns)", 1)
    down, right = (ring(side).round_at(0).matrix > 0 for side in (rows, columns))
    sends = np.kron(down, np.eye(columns)) + np.kron(np.eye(rows), right) > 0
    np.fill_diagonal(sends, False)
    return _weighted(sends, "uniform")


def hypercube(n: int) -> Schedule:
    """Static hypercube: node `i` is joined to `i xor 2^b` for every bit `b`; `T = 1`.

    All weights are `1 / (log2(n) + 1)`.

    Raises:
      ValueError: if `n` is no power of two.

    >>> hypercube(4).round_at(0).matrix.round(2)[0].tolist()
    [0.33, 0.33, 0.33, 0.0]
    """
    n = require_whole(n, "n of hypercube(n)", 1)
    if n & (n - 1):
        below = 1 << (n.bit_length() - 1)
        raise ValueError(
            f"hypercube needs a power of two; given {n}. Use {below} or {2 * below} nodes, or "
            f"exponential({n})."
        )
    numbers = np.arange(n)
    sends = np.zeros((n, n), dtype=bool)
    for hop in exponential_hops(n):
        sends[numbers ^ hop, numbers] = True
    return _weighted(sends, "uniform")


def exponential(n: int) -> Schedule:
    """Static directed exponential graph: hops `2^0, ..., 2^floor(log2(n - 1))` at once; `T = 1`.

    With `h` hops, `P[i, j] = 1 / (h + 1)` for `j = i` and every `j = (i - hop) mod n`.

    >>> len(exponential(8).round_at(0).slots)
    3
    """
    n = require_whole(n, "n of exponential(n)", 1)
    return Schedule([circulant(n, exponential_hops(n))])


def from_graph(graph: Any, weights: Weights = "uniform") -> Schedule:
    """The static schedule of a networkx graph, directed or not; `T = 1`.

    An edge `(u, v)` of a directed graph means that `u` sends to `v`. Self-loops and attributes of
    edges are ignored. Nodes labelled `0, ..., N - 1` keep their numbers; other labels are numbered
    in the order of `graph.nodes`.

    Args:
      weights: `"uniform"`: `P[i, j] = 1 / (1 + out-degree of j)` for `i = j` and every edge
        `(j, i)`. `"metropolis"` (undirected graphs): `P[i, j] = 1 / (1 + max(degree of i, degree
        of j))` for every edge, the rest on the diagonal: doubly stochastic on irregular graphs.

    Raises:
      ValueError: for an unknown `weights`, Metropolis weights on a directed graph, a graph without
        nodes or one that is not (strongly) connected.

    >>> import networkx
    >>> from_graph(networkx.star_graph(2), "metropolis").matrices()[0].round(2).tolist()
    [[0.33, 0.33, 0.33], [0.33, 0.67, 0.0], [0.33, 0.0, 0.67]]
    """
    if not (hasattr(graph, "nodes") and hasattr(graph, "is_directed")):
        raise ValueError(f"from_graph takes a networkx graph; given {type(graph).__name__}.")
    labels = list(graph.nodes)
    if not labels:
        raise ValueError("from_graph needs a graph with at least one node; given an empty one.")
    if set(labels) == set(range(len(labels))):
        labels = list(range(len(labels)))
    number = {label: i for i, label in enumerate(labels)}
    sends = np.zeros((len(labels), len(labels)), dtype=bool)  # [receiver, sender]
    for u, v in graph.edges():
        sends[number[v], number[u]] = True
        if not graph.is_directed():
            sends[number[u], number[v]] = True
    np.fill_diagonal(sends, False)
    if weights == "metropolis" and graph.is_directed():
        raise ValueError(
            "Metropolis weights need an undirected graph; given a directed one. Use "
            "weights='uniform' with sgp, or graph.to_undirected()."
        )
    return _weighted(sends, weights)
