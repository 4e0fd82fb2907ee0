"""The Base-(k+1) graph: exact averages after few rounds of few peers, for every N. NumPy only.

Takezawa, Sato, Bao, Niwa, Yamada: "Beyond Exponential Graph: Communication-Efficient Topologies for
Decentralized Learning via Finite-time Convergence" (NeurIPS 2023). Reached as `gossipjax.topology`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from gossipjax.schedule import Round, Schedule, require_whole
from gossipjax.static_topology import complete

Edge = tuple[int, int, float]  # two nodes, and the weight that each gives to the other
Edges = list[Edge]  # of one round


def base_graph(n: int, peers: int = 1) -> Schedule:
    """Base-(k+1) graph, `k = peers`: one cycle averages exactly, whatever `n` (Takezawa 2023).

    `P_(T-1) ... P_0 = 1 1^T / n`, every round is symmetric (so doubly stochastic), and no node has
    more than `peers` peers in a round; `T <= 2 log_(peers+1)(n) + 2`. If no prime factor of `n`
    exceeds `peers + 1`, the rounds are cliques over the digits of the nodes' numbers (algorithm 1);
    else what is shorter of algorithms 2 and 3.

    Raises:
      ValueError: if `peers` is below 1, or above `n - 1` (and `n` is not 1).

    >>> [base_graph(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    n = require_whole(n, "n of base_graph(n)", 1)
    peers = require_whole(peers, "peers of base_graph(n, peers)", 1)
    if n == 1:
        return complete(1)
    if peers >= n:
        raise ValueError(
            f"base_graph({n}, peers={peers}): a node has {n - 1} others, so peers is 1 to {n - 1}."
        )
    matrices = []
    for edges in min(_simple(range(n), peers + 1), _grouped(n, peers + 1), key=len):
        matrix = np.zeros((n, n))
        for i, j, weight in edges:
            matrix[i, j] = matrix[j, i] = weight
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=0))
        matrices.append(matrix)
    return Schedule([Round(matrix) for matrix in matrices])


def _factors(n: int, most: int) -> list[int] | None:
    """As few factors of `n` as possible, all at most `most`; None if there are none."""
    if n <= most:
        return [n] if n > 1 else []
    rests = [(f, _factors(n // f, most)) for f in range(2, most + 1) if n % f == 0]
    found = [[f, *rest] for f, rest in rests if rest is not None]
    return min(found, key=len, default=None)


def _cliques(nodes: Sequence[int], factors: Iterable[int]) -> list[Edges]:
    """Algorithm 1: round `l` averages the nodes that differ in digit `l` of their place only."""
    rounds, places = [], np.arange(len(nodes))
    stride = 1
    for f in factors:
        rounds.append(
            [
                (nodes[first + a * stride], nodes[first + b * stride], 1 / f)
                for first in places[places // stride % f == 0]
                for a, b in itertools.combinations(range(f), 2)
            ]
        )
        stride *= f
    return rounds


def _parallel(parts: Iterable[list[Edges]]) -> list[Edges]:
    """The rounds of disjoint sets of nodes side by side; those that have finished wait."""
    return [list(itertools.chain(*edges)) for edges in itertools.zip_longest(*parts, fillvalue=[])]


def _simple(nodes: Sequence[int], base: int) -> list[Edges]:
    """Algorithm 2. With `n = sum_l a_l base^p_l`, the part `V_l` has `a_l` subsets of `base^p_l`.

    First every part averages itself. Then, part by part, each node `u` of the parts behind `V_l`
    meets one node of each subset of `V_l`, with weights such that `u` holds the mean of them all in
    the right proportion: then the mean of every subset of `V_l`, and that of the parts behind it,
    is the mean of everything. So each subset of `V_l` has only to average itself once more, while
    the parts behind it go on among themselves. The last part is exact without.
    """
    if (factors := _factors(len(nodes), base)) is not None:
        return _cliques(nodes, factors)
    parts: list[list[Sequence[int]]] = []
    rest = nodes
    while rest:
        size = 1
        while size * base <= len(rest):
            size *= base
        count = len(rest) // size
        parts.append([rest[s * size : (s + 1) * size] for s in range(count)])
        rest = rest[count * size :]
    own = []
    for subsets in parts:
        members = list(itertools.chain(*subsets))
        own.append(_cliques(members, _factors(len(members), base) or []))
    later: list[list[Edges]] = []
    for number, subsets in enumerate(parts[:-1]):
        behind = list(itertools.chain(*itertools.chain(*parts[number + 1 :])))
        weight = len(subsets[0]) / (len(subsets) * len(subsets[0]) + len(behind))
        meet = [(u, subset[i], weight) for i, u in enumerate(behind) for subset in subsets]
        factors = _factors(len(subsets[0]), base) or []
        again = _parallel(_cliques(subset, factors) for subset in subsets)
        later.append([*([[]] * number), meet, *again])
    return [*_parallel(own), *_parallel(later)]


def _grouped(n: int, base: int) -> list[Edges]:
    """Algorithm 3: `n = p q`; `p` groups of `q` nodes average themselves, then across groups.

    `p` is the largest divisor without a prime factor above `base`.
    """
    p, q = 1, n
    for f in range(2, base + 1):
        while q % f == 0:
            p, q = p * f, q // f
    groups = [range(g * q, (g + 1) * q) for g in range(p)]
    across = [_cliques(range(i, n, q), _factors(p, base) or []) for i in range(q)]
    return [*_parallel(_simple(group, base) for group in groups), *_parallel(across)]
