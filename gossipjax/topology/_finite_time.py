"""The Base-(k+1) graph, which averages exactly after few rounds, for every N. NumPy only.

Public as `gossipjax.topology`. The algorithms have their numbers in the paper of `base_graph`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gossipjax.topology._round import require_int
from gossipjax.topology._static import complete, make_weighted_round
from gossipjax.topology.schedule import Schedule, named


class Edges(NamedTuple):
    """Undirected edges of one round, and the weight that both ends of an edge give each other."""

    left: np.ndarray  # [E]
    right: np.ndarray  # [E]
    weights: np.ndarray  # [E]


NO_EDGES = Edges(np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0))


@named
def base_graph(nodes: int, peers: int = 1) -> Schedule:
    """Base-(k+1) graph with `k = peers`: a cycle of rounds averages exactly for every `N`.

    `P_(T-1) ... P_0 = 1 1^T / N`, every round is symmetric (so doubly stochastic), and no node has
    more than `peers` peers in a round; `T <= 2 log_(peers+1)(N) + 2`. If no prime factor of `N`
    exceeds `peers + 1`, the paper's algorithm 1 makes the rounds: nodes whose numbers differ in one
    digit average. For other `N`, algorithm 2 or 3 makes the rounds, whichever needs fewer.

    If algorithms 2 and 3 need equally many rounds, `base_graph` uses algorithm 2; the authors' code
    uses algorithm 3.

    Raises:
      ValueError: if `peers` is below 1, or above `N - 1` (and `N` is not 1).

    References:
      Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for
      Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420.

    >>> [base_graph(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    n = require_int(nodes, "nodes of base_graph", 1)
    if n == 1:
        return complete(1)
    base = 1 + require_int(peers, f"peers of base_graph({n}, peers)", 1, n - 1)
    simple = _build_simple_base_graph(np.arange(n), base)
    rounds = []
    for left, right, weights in min(simple, _build_base_graph(n, base), key=len):
        receivers = np.concatenate([left, right])
        senders = np.concatenate([right, left])
        rounds.append(make_weighted_round(n, receivers, senders, np.tile(weights, 2)))
    return Schedule(rounds)


@functools.cache
def _factorize(n: int, max_factor: int) -> tuple[int, ...] | None:
    """Writes `n` as the product of the fewest factors up to `max_factor`; None if none exist."""
    if n <= max_factor:
        return (n,) if n > 1 else ()
    candidates = [
        (factor, *rest)
        for factor in range(2, max_factor + 1)
        if n % factor == 0 and (rest := _factorize(n // factor, max_factor)) is not None
    ]
    return min(candidates, key=len, default=None)


def _build_hyper_hypercube(nodes: np.ndarray, base: int) -> list[Edges]:
    """Builds the rounds of algorithm 1, after which all `nodes` have their exact average.

    An index has one digit for each factor of the number of nodes. Round `l` averages the nodes
    whose indices differ in digit `l` only.
    """
    rounds = []
    stride = 1
    for factor in _factorize(len(nodes), base) or ():
        cliques = nodes.reshape(-1, factor, stride)  # the second axis lists a clique's nodes
        a, b = np.triu_indices(factor, 1)  # all pairs in a clique
        left = cliques[:, a].ravel()
        rounds.append(Edges(left, cliques[:, b].ravel(), np.full(len(left), 1 / factor)))
        stride *= factor
    return rounds


def _run_in_parallel(graphs: Iterable[list[Edges]]) -> list[Edges]:
    """Joins the rounds of graphs over disjoint nodes, which run together; an ended graph idles."""
    rounds = itertools.zip_longest(*graphs, fillvalue=NO_EDGES)
    return [Edges(*map(np.concatenate, zip(*edges, strict=True))) for edges in rounds]


def _split_by_base(nodes: np.ndarray, base: int) -> list[np.ndarray]:
    """Splits `sum_l a_l base^p_l` nodes into parts `[a_l, base^p_l]`, the largest power first."""
    parts = []
    rest = nodes
    while len(rest):
        size = 1
        while size * base <= len(rest):
            size *= base
        count = len(rest) // size
        parts.append(rest[: count * size].reshape(count, size))
        rest = rest[count * size :]
    return parts


def _build_simple_base_graph(nodes: np.ndarray, base: int) -> list[Edges]:
    """Builds the rounds of algorithm 2 of the paper, over the parts `V_l` of `_split_by_base`.

    First every part averages itself. Then, part by part, each node of the later parts meets one
    node of each subset (row) of `V_l`. By the weight of the meeting, each subset then has the mean
    of `V_l` and the later parts together, and so have the later parts. Each subset averages itself
    once more, while the later parts go on among themselves. The last part needs no further round.
    """
    if _factorize(len(nodes), base) is not None:
        return _build_hyper_hypercube(nodes, base)
    parts = _split_by_base(nodes, base)
    first_averages = [_build_hyper_hypercube(part.ravel(), base) for part in parts]
    exchanges = []
    rest = nodes
    for index, part in enumerate(parts[:-1]):
        rest = rest[part.size :]
        subsets, size = part.shape
        later = len(rest)  # fewer nodes than a subset has
        meeting = Edges(
            np.tile(rest, subsets),
            part[:, :later].ravel(),
            np.full(subsets * later, size / (part.size + later)),
        )
        averages = _run_in_parallel(_build_hyper_hypercube(subset, base) for subset in part)
        # Part `index` begins `index` rounds later than part 0.
        exchanges.append([*[NO_EDGES] * index, meeting, *averages])
    return [*_run_in_parallel(first_averages), *_run_in_parallel(exchanges)]


def _build_base_graph(n: int, base: int) -> list[Edges]:
    """Builds the rounds of algorithm 3, for `n = p q` nodes in `p` groups of `q` nodes.

    Each group averages itself by algorithm 2. Then nodes with the same index in all groups average
    by algorithm 1, so `p` is the largest divisor of `n` without a prime factor above `base`.
    """
    p = 1
    q = n
    for factor in range(2, base + 1):
        while q % factor == 0:
            p *= factor
            q //= factor
    groups = np.arange(n).reshape(p, q)
    within = [_build_simple_base_graph(group, base) for group in groups]
    across = [_build_hyper_hypercube(group, base) for group in groups.T]
    return [*_run_in_parallel(within), *_run_in_parallel(across)]
