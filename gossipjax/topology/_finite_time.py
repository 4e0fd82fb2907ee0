"""The Base-(k+1) graph, which averages exactly after few rounds, for every N. NumPy only.

Public as `gossipjax.topology`. The algorithms have their numbers in the paper of `base_graph`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gossipjax.topology._round import require_int, require_nodes
from gossipjax.topology._static import complete, make_weighted_round
from gossipjax.topology.schedule import Schedule, named


class Edges(NamedTuple):
    """Undirected edges of one round, and the weight that both ends of an edge give each other."""

    left: np.ndarray  # [E]
    right: np.ndarray  # [E]
    weights: np.ndarray  # [E]


NO_EDGES = Edges(np.zeros(0, dtype=int), np.zeros(0, dtype=int), np.zeros(0))


@named
def base_graph(nodes: int, peers: int = 1, *, inner_edges: bool = False) -> Schedule:
    """Base-(k+1) graph with `k = peers`: one cycle averages exactly for every `N`.

    `P_(T-1) ... P_0 = 1 1^T / N`, every round is symmetric (so doubly stochastic), and no node has
    more than `peers` peers in a round; `T <= 2 log_(peers+1)(N) + 2`. If no prime factor of `N`
    exceeds `peers + 1`, the paper's algorithm 1 makes the rounds: nodes whose numbers differ in one
    digit average. For other `N`, algorithm 2 or 3 makes the rounds, whichever needs fewer.

    Algorithm 2 divides the nodes into parts, and nodes in smaller parts wait for nodes in larger
    parts. With `inner_edges` the waiting nodes average among themselves, up to `peers + 1` at a
    time, as in the authors' released code. The number of rounds stays the same; nodes send more
    messages and stay closer together in training. If algorithms 2 and 3 need equally many rounds,
    `base_graph` uses algorithm 2; the authors' code uses algorithm 3.

    Raises:
      ValueError: if `peers` is below 1, or above `N - 1` (and `N` is not 1).

    References:
      Takezawa et al., "Beyond Exponential Graph: Communication-Efficient Topologies for
      Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv:2305.11420.
      https://github.com/yukiTakezawa/BaseGraph, `simple_base_graph.py` (`inner_edges`).

    >>> [base_graph(n).period for n in (2, 3, 4, 5, 6, 7, 8)]
    [1, 3, 2, 5, 4, 5, 3]
    """
    n = require_nodes(nodes, "base_graph")
    peers = require_int(peers, "peers of base_graph", 1)
    if n == 1:
        return complete(1)
    if peers >= n:
        raise ValueError(
            f"peers of base_graph({n}, peers) must be at most {n - 1}, the number of other nodes, "
            f"got {peers}."
        )
    simple = _build_simple_base_graph(np.arange(n), peers + 1, inner_edges)
    rounds = []
    for left, right, weights in min(simple, _build_base_graph(n, peers + 1, inner_edges), key=len):
        receivers = np.concatenate([left, right])
        senders = np.concatenate([right, left])
        rounds.append(make_weighted_round(n, receivers, senders, np.tile(weights, 2)))
    return Schedule(rounds)


@functools.cache
def _factorize(n: int, max_factor: int) -> tuple[int, ...] | None:
    """The fewest factors of `n` that are all at most `max_factor`; None if there are none."""
    if n <= max_factor:
        return (n,) if n > 1 else ()
    candidates = [
        (factor, *rest)
        for factor in range(2, max_factor + 1)
        if n % factor == 0 and (rest := _factorize(n // factor, max_factor)) is not None
    ]
    return min(candidates, key=len, default=None)


def _build_hyper_hypercube(nodes: np.ndarray, base: int) -> list[Edges]:
    """Algorithm 1: round `l` averages the nodes whose indices differ in digit `l` only."""
    rounds = []
    stride = 1
    for factor in _factorize(len(nodes), base) or ():
        rounds.append(_make_cliques(nodes.reshape(-1, factor, stride)))
        stride *= factor
    return rounds


def _make_cliques(nodes: np.ndarray) -> Edges:
    """Cliques along the second axis of `[A, size, B]`, each of which averages exactly."""
    size = nodes.shape[1]
    a, b = np.triu_indices(size, 1)
    left = nodes[:, a].ravel()
    return Edges(left, nodes[:, b].ravel(), np.full(len(left), 1 / size))


def _join(graphs: Iterable[Edges]) -> Edges:
    """Edges of several graphs, in one round."""
    left, right, weights = zip(NO_EDGES, *graphs, strict=True)
    return Edges(np.concatenate(left), np.concatenate(right), np.concatenate(weights))


def _run_in_parallel(graphs: Iterable[list[Edges]]) -> list[Edges]:
    """Runs graphs over disjoint sets of nodes at the same time; a graph that has ended idles."""
    return [_join(edges) for edges in itertools.zip_longest(*graphs, fillvalue=NO_EDGES)]


def _repeat(rounds: list[Edges], count: int) -> list[Edges]:
    """Repeats the given rounds until there are `count`; without any, all rounds are idle."""
    return list(itertools.islice(itertools.cycle(rounds or [NO_EDGES]), count))


def _split_by_base(nodes: np.ndarray, base: int) -> list[np.ndarray]:
    """Split `len(nodes) = sum_l a_l base^p_l` nodes into parts `[a_l, base^p_l]`."""
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


def _build_simple_base_graph(nodes: np.ndarray, base: int, inner_edges: bool) -> list[Edges]:
    """Algorithm 2, over the parts `V_l` of `_split_by_base`.

    First every part averages itself. Then, part by part, each node of the later parts meets one
    node of each subset of `V_l`, with the weight that makes the mean over each subset of `V_l`, and
    the mean over the later parts, equal to the mean over all of them. Each subset of `V_l` then
    averages itself once more, while the later parts continue among themselves. The last part needs
    no further round.
    """
    if _factorize(len(nodes), base) is not None:
        return _build_hyper_hypercube(nodes, base)
    parts = _split_by_base(nodes, base)
    first_averages = [_build_hyper_hypercube(part.ravel(), base) for part in parts]
    if inner_edges:
        first_averages = [_repeat(rounds, len(first_averages[0])) for rounds in first_averages]
    last_rounds = 1 + len(_build_hyper_hypercube(parts[0][0], base))
    exchanges = []
    for index, part in enumerate(parts):
        later_nodes = nodes[len(nodes) - sum(later.size for later in parts[index + 1 :]) :]
        own_rounds = last_rounds - index
        exchange = _build_exchange(part, later_nodes, base, own_rounds if inner_edges else None)
        exchanges.append([NO_EDGES] * index + exchange)
    return [*_run_in_parallel(first_averages), *_run_in_parallel(exchanges)]


def _build_exchange(
    part: np.ndarray, later_nodes: np.ndarray, base: int, rounds: int | None
) -> list[Edges]:
    """A part `[a, size]` of algorithm 2 exchanges with later nodes, and then averages itself.

    With `rounds`, as many rounds pass, and nodes without peers average among themselves.
    """
    subsets, size = part.shape
    met = len(later_nodes)
    meeting = Edges(
        np.tile(later_nodes, subsets),
        part[:, :met].ravel(),
        np.full(subsets * met, size / (part.size + met)),
    )
    averages = _run_in_parallel(_build_hyper_hypercube(subset, base) for subset in part)
    if rounds is None:
        return [meeting, *averages] if met else []
    # Subsets of one node form a clique.
    averages = averages or _build_hyper_hypercube(part.ravel(), base)
    if not met:
        return _repeat(averages, rounds)
    idle = part[:, met:].ravel()
    groups = np.split(idle, range(base, len(idle), base))
    cliques = [_make_cliques(group[None, :, None]) for group in groups if len(group)]
    return [_join([meeting, *cliques]), *_repeat(averages, rounds - 1)]


def _build_base_graph(n: int, base: int, inner_edges: bool) -> list[Edges]:
    """Algorithm 3: `n = p q`; `p` groups of `q` nodes average themselves, then across groups.

    `p` is the largest divisor without a prime factor above `base`.
    """
    p = 1
    q = n
    for factor in range(2, base + 1):
        while q % factor == 0:
            p *= factor
            q //= factor
    groups = np.arange(n).reshape(p, q)
    within = [_build_simple_base_graph(group, base, inner_edges) for group in groups]
    across = [_build_hyper_hypercube(group, base) for group in groups.T]
    return [*_run_in_parallel(within), *_run_in_parallel(across)]
