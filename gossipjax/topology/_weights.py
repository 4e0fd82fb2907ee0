"""The edges of a networkx graph, and the weights with which gossip over them mixes fastest."""

from __future__ import annotations

from typing import Any

import numpy as np


def read_graph(graph: Any) -> tuple[int, np.ndarray]:
    """Returns the number of nodes of a networkx graph, and its edges `[E, 2]`, as pairs of numbers.

    Labels `0, ..., N - 1` are the numbers; others are numbered in the order of `graph.nodes`.
    """
    labels = list(graph.nodes)
    if set(labels) == set(range(len(labels))):
        labels = list(range(len(labels)))
    node_of = {label: node for node, label in enumerate(labels)}
    edges = [(node_of[u], node_of[v]) for u, v in graph.edges()]
    return len(labels), np.array(edges, dtype=int).reshape(-1, 2)


def optimal_weights(graph: Any, *, min_self_weight: float = 0.0) -> np.ndarray:
    """Returns the symmetric mixing matrix `[N, N]` of an undirected graph that averages fastest.

    Of all symmetric `W >= 0` whose rows sum to 1 and whose entries are 0 where the graph has no
    edge, the result, the fastest mixing Markov chain, has the smallest

        slem(W) = || W - 1 1^T / N ||_2

    A round multiplies the distance to the average by at most `slem(W)`. cvxpy and Clarabel (extra
    `weights`) find `W` as a semidefinite program. The time grows fast with N, so use
    `optimal_weights` for tens of nodes. The solver's small errors are then removed: `W` is
    symmetric, its rows sum to 1 up to float64 rounding, and no entry is below its bound.

    `gx.topology.from_graph(graph, weights="optimal")` makes a schedule of such weights, in which
    every node gives itself a positive weight.

    Args:
      graph: a connected undirected networkx graph; self-loops and edge attributes are ignored.
      min_self_weight: the smallest weight, below 1, that a node may give itself.

    Raises:
      ImportError: if cvxpy is not installed.
      ValueError: if the graph is directed or not connected.

    References:
      Boyd, Diaconis, Xiao, "Fastest Mixing Markov Chain on a Graph", SIAM Review 2004. The paper's
      text was not available; checked against published numbers.

    >>> import networkx
    >>> optimal_weights(networkx.path_graph(3)).round(3).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]
    """
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError(
            "optimal weights need cvxpy, got no such package: pip install cvxpy, "
            "or take weights='metropolis', which needs no solver."
        ) from error
    n, edges = read_graph(graph)
    if graph.is_directed():
        raise ValueError(
            "graph must be undirected for optimal weights, got a directed one. Use "
            "graph.to_undirected()."
        )
    edges = np.unique(np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1), axis=0)
    columns = np.arange(len(edges))
    incidence = np.zeros((n, len(edges)))  # its product with its transpose is the Laplacian
    incidence[edges[:, 0], columns] = 1.0
    incidence[edges[:, 1], columns] = -1.0
    if np.linalg.matrix_rank(incidence) < n - 1:
        raise ValueError(f"graph must connect all {n} nodes, got a graph of several parts.")
    if n == 1:
        return np.ones((1, 1))
    edge_weights = cvxpy.Variable(len(edges))
    # W = I - incidence diag(edge_weights) incidence^T; the bound is slem(W).
    bound = cvxpy.Variable()
    difference = np.eye(n) - 1 / n - incidence @ cvxpy.diag(edge_weights) @ incidence.T
    scaled = bound * np.eye(n)
    constraints: list[Any] = [scaled - difference >> 0, scaled + difference >> 0]
    constraints += [edge_weights >= 0, 1 - abs(incidence) @ edge_weights >= min_self_weight]
    problem = cvxpy.Problem(cvxpy.Minimize(bound), constraints)
    problem.solve(solver=cvxpy.CLARABEL)
    if edge_weights.value is None:
        raise ValueError(
            f"graph must be one whose weights can be solved for, got {problem.status} of the "
            "solver: take weights='metropolis'."
        )
    # The solver may miss the constraints by its tolerance.
    weights = np.maximum(edge_weights.value, 0.0)
    largest_sum = (abs(incidence) @ weights).max()  # over the edges of a node
    weights = weights * min(1.0, (1 - min_self_weight) / largest_sum)
    matrix = np.zeros((n, n))
    matrix[edges[:, 0], edges[:, 1]] = weights
    matrix += matrix.T
    return matrix + np.diag(1 - matrix.sum(axis=1))
