"""Base-(k+1) graph: exact averages after few rounds with few peers, for every N. NumPy only.

Public as `gossipjax.topology`. "The paper" is the reference of `base_graph`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from gossipjax.topology._static import complete
from gossipjax.topology.schedule import Round, Schedule, require_int

Edge = tuple[int, int, float]  # two nodes, and the weight that each gives to the other
Edges = list[Edge]  # of one round


def base_graph(n: int, peers: int = 1) -> Schedule:
    """Base-(k+1) graph with `k = peers`: one cycle averages exactly for every `n`.

    `P_(T-1) ... P_0 = 1 1^T / n`, every round is symmetric (so doubly stochastic), and no node has
    more than `peers` peers in a round; `T <= 2 log_(peers+1)(n) + 2`. If no prime factor of `n`
    exceeds `peers + 1`, the rounds are cliques over the digits of the node numbers (algorithm 1);
    else the shorter of algorithms 2 and 3.

    Raises:
      ValueError: if `peers` is below 1, or above `n - 1` (and `n` is not 1).

    References:
      Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for
      Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420.

    >>> [base_graph(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    n = require_int(n, "n of base_graph(n, peers)", 1)
    peers = require_int(peers, "peers of base_graph(n, peers)", 1)
    if n == 1:
        return complete(1)
    if peers >= n:
        raise ValueError(
            f"peers of base_graph({n}, peers) must be at most {n - 1}, the number of other nodes, "
            f"got {peers}."
        )
    simple = _build_simple_base_graph(range(n), peers + 1)
    rounds = []
    for edges in min(simple, _build_base_graph(n, peers + 1), key=len):
        matrix = np.zeros((n, n))
        for i, j, weight in edges:
            matrix[i, j] = weight
            matrix[j, i] = weight
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=0))
        rounds.append(Round(matrix))
    return Schedule(rounds)


def _factorize(n: int, max_factor: int) -> list[int] | None:
    """The fewest factors of `n` that are all at most `max_factor`; None if there are none."""
    if n <= max_factor:
        return [n] if n > 1 else []
    candidates = [
        [factor, *rest]
        for factor in range(2, max_factor + 1)
        if n % factor == 0 and (rest := _factorize(n // factor, max_factor)) is not None
    ]
    return min(candidates, key=len, default=None)


def _build_hyper_hypercube(nodes: Sequence[int], factors: Iterable[int]) -> list[Edges]:
    """Algorithm 1: round `l` averages the nodes whose indices differ in digit `l` only."""
    rounds = []
    indices = np.arange(len(nodes))
    stride = 1
    for factor in factors:
        edges = [
            (nodes[first + a * stride], nodes[first + b * stride], 1 / factor)
            for first in indices[indices // stride % factor == 0]
            for a, b in itertools.combinations(range(factor), 2)
        ]
        rounds.append(edges)
        stride *= factor
    return rounds


def _run_in_parallel(graphs: Iterable[list[Edges]]) -> list[Edges]:
    """Rounds of graphs over disjoint sets of nodes, at the same time; shorter graphs then idle."""
    return [list(itertools.chain(*edges)) for edges in itertools.zip_longest(*graphs, fillvalue=[])]


def _split_by_base(nodes: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """Split `len(nodes) = sum_l a_l base^p_l` nodes into parts of `a_l` subsets of `base^p_l`."""
    parts = []
    rest = nodes
    while rest:
        size = 1
        while size * base <= len(rest):
            size *= base
        count = len(rest) // size
        parts.append([rest[s * size : (s + 1) * size] for s in range(count)])
        rest = rest[count * size :]
    return parts


def _build_simple_base_graph(nodes: Sequence[int], base: int) -> list[Edges]:
    """Algorithm 2, over the parts `V_l` of `_split_by_base`.

    First every part averages itself. Then, part by part, each node of the later parts meets one
    node of each subset of `V_l`, with the weight that makes the mean over each subset of `V_l`, and
    the mean over the later parts, equal to the mean over all of them. Each subset of `V_l` then
    averages itself once more, while the later parts continue among themselves. The last part needs
    no further round.
    """
    if (factors := _factorize(len(nodes), base)) is not None:
        return _build_hyper_hypercube(nodes, factors)
    parts = _split_by_base(nodes, base)
    first_averages = []
    for subsets in parts:
        members = list(itertools.chain(*subsets))
        first_averages.append(_build_hyper_hypercube(members, _factorize(len(members), base) or []))
    exchanges = []
    for index, subsets in enumerate(parts[:-1]):
        later_nodes = list(itertools.chain(*itertools.chain(*parts[index + 1 :])))
        size = len(subsets[0])
        weight = size / (len(subsets) * size + len(later_nodes))
        meeting = [(u, subset[i], weight) for i, u in enumerate(later_nodes) for subset in subsets]
        factors = _factorize(size, base) or []
        last_averages = _run_in_parallel(
            _build_hyper_hypercube(subset, factors) for subset in subsets
        )
        waiting: list[Edges] = [[]] * index
        exchanges.append([*waiting, meeting, *last_averages])
    return [*_run_in_parallel(first_averages), *_run_in_parallel(exchanges)]


def _build_base_graph(n: int, base: int) -> list[Edges]:
    """Algorithm 3: `n = p q`; `p` groups of `q` nodes average themselves, then across groups.

    `p` is the largest divisor without a prime factor above `base`.
    """
    p = 1
    q = n
    for factor in range(2, base + 1):
        while q % factor == 0:
            p *= factor
            q //= factor
    groups = [range(g * q, (g + 1) * q) for g in range(p)]
    within = [_build_simple_base_graph(group, base) for group in groups]
    factors = _factorize(p, base) or []
    across = [_build_hyper_hypercube(range(i, n, q), factors) for i in range(q)]
    return [*_run_in_parallel(within), *_run_in_parallel(across)]
