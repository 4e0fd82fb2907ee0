"""The edges of a networkx graph, and the weights of them with which gossip mixes fastest."""

from __future__ import annotations

from typing import Any

import numpy as np


def read_graph(graph: Any) -> tuple[int, np.ndarray]:
    """Returns the number of nodes of a networkx graph, and its edges `[E, 2]` as they are listed.

    Nodes labelled `0, ..., N - 1` keep their numbers; other labels are numbered in their order.
    """
    labels = list(graph.nodes)
    if set(labels) == set(range(len(labels))):
        labels = list(range(len(labels)))
    node_of = {label: node for node, label in enumerate(labels)}
    edges = [(node_of[u], node_of[v]) for u, v in graph.edges()]
    return len(labels), np.array(edges, dtype=int).reshape(-1, 2)


def optimal_weights(
    graph: Any, nonnegative: bool = True, min_self_weight: float = 0.0
) -> np.ndarray:
    """The symmetric mixing matrix `[N, N]` of an undirected graph that averages fastest.

    Of all symmetric `W` with rows that sum to 1 and zeros where the graph has no edge, it minimises

        slem(W) = || W - 1 1^T / N ||_2

    the factor by which a round shrinks the distance to the average at least. It is a semidefinite
    program, solved by Clarabel with cvxpy (extra `weights`), whose time grows fast with N: it is
    meant for tens of nodes. What the solver leaves over is cleaned up: `W` is symmetric, its rows
    sum to 1 up to float64 rounding, and its bounds hold.

    `gx.topology.from_graph(graph, "optimal")` is the schedule of such weights, with a positive
    weight of every node for itself.

    Args:
      graph: a connected undirected networkx graph; self-loops and edge attributes are ignored.
      nonnegative: whether all weights are at least 0, which is the fastest mixing Markov chain.
        Without it they may be negative (FDLA), which mixes faster still on irregular graphs; no
        `gx.Schedule` takes such weights.
      min_self_weight: with `nonnegative`, the smallest weight of a node for itself, below 1.

    Raises:
      ImportError: without cvxpy.
      ValueError: for a graph that is not as above.

    References:
      Boyd, Diaconis, Xiao, "Fastest Mixing Markov Chain on a Graph", SIAM Review 2004.
      After Xiao and Boyd, "Fast Linear Iterations for Distributed Averaging", Systems and Control
      Letters 2004. The papers' texts were not available; checked against published numbers.

    >>> import networkx
    >>> optimal_weights(networkx.path_graph(3)).round(3).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]
    """
    n, edges = read_graph(graph)
    if graph.is_directed():
        raise ValueError(
            "graph must be undirected for optimal weights, got a directed one. Use "
            "graph.to_undirected()."
        )
    edges = np.unique(np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1), axis=0)
    number = np.arange(len(edges))
    incidence = np.zeros((n, len(edges)))  # its product with its transpose is the Laplacian
    incidence[edges[:, 0], number] = 1.0
    incidence[edges[:, 1], number] = -1.0
    if np.linalg.matrix_rank(incidence) < n - 1:
        raise ValueError(f"graph must connect all {n} nodes, got one of several parts.")
    if n == 1:
        return np.ones((1, 1))
    weights = _solve(incidence, nonnegative, min_self_weight)
    if nonnegative:
        weights = np.maximum(weights, 0.0)
        most = (abs(incidence) @ weights).max()
        weights = weights * min(1.0, (1 - min_self_weight) / most)
    matrix = np.zeros((n, n))
    matrix[edges[:, 0], edges[:, 1]] = weights
    matrix += matrix.T
    return matrix + np.diag(1 - matrix.sum(axis=1))


def _solve(incidence: np.ndarray, nonnegative: bool, min_self_weight: float) -> np.ndarray:
    """The best weight of every edge, as exact as the solver is."""
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError(
            "optimal weights need cvxpy, got no such package: pip install cvxpy, "
            "or take weights='metropolis', which needs no solver."
        ) from error
    n, edges = incidence.shape
    weights = cvxpy.Variable(edges)
    bound = cvxpy.Variable()
    identity = np.eye(n)
    laplacian = incidence @ cvxpy.diag(weights) @ incidence.T
    difference = identity - 1 / n - laplacian
    scaled = bound * identity
    constraints: list[Any] = [scaled - difference >> 0, scaled + difference >> 0]
    if nonnegative:
        constraints += [weights >= 0, 1 - abs(incidence) @ weights >= min_self_weight]
    problem = cvxpy.Problem(cvxpy.Minimize(bound), constraints)
    problem.solve(solver=cvxpy.CLARABEL)
    if weights.value is None:
        raise ValueError(
            f"graph must be one whose weights can be solved for, got {problem.status} of the "
            "solver: take weights='metropolis'."
        )
    return weights.value
