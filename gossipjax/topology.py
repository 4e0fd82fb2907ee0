"""Who talks to whom: builders that return a `Schedule`. NumPy only.

Mixing weights are uniform over a sender's out-neighbours, itself included (SGP-18, appendix A),
unless the docstring says otherwise. Every graph of one node is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gossipjax.schedule import Piece, Round, Schedule, require_whole

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def _circulant(n: int, hops: Iterable[int]) -> Round:
    """Node `i` takes the same weight of itself and of `(i - hop) mod n`, for distinct hops."""
    distinct = {0, *(hop % n for hop in hops)}
    matrix = sum(np.roll(np.eye(n), hop, axis=0) for hop in distinct) / len(distinct)
    return Round(matrix)


def _hops(n: int) -> list[int]:
    """2^0, 2^1, ..., 2^floor(log2(n - 1)); none for one node."""
    return [1 << i for i in range((n - 1).bit_length())]


def ring(n: int) -> Schedule:
    """Undirected ring: 1/3 to itself and to both neighbours (DPSGD-17); `T = 1`.

    `P[i, j] = 1/3` for `j` in `{i - 1, i, i + 1} mod n`. `ring(2)` is one pair with weights 1/2.

    >>> ring(4).matrices()[0].round(2)[0].tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    n = require_whole(n, "n of ring(n)", 1)
    return Schedule([_circulant(n, (1, -1))])


def directed_ring(n: int) -> Schedule:
    """Directed ring: `P[i, i] = P[i, i - 1 mod n] = 1/2`; `T = 1`.

    >>> directed_ring(3).matrices()[0].tolist()
    [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    n = require_whole(n, "n of directed_ring(n)", 1)
    return Schedule([_circulant(n, (1,))])


def complete(n: int) -> Schedule:
    """Every node to every node: `P = 1 1^T / n`, the exact average; `T = 1`.

    >>> complete(4).round_at(0).is_uniform
    True
    """
    n = require_whole(n, "n of complete(n)", 1)
    return Schedule([Round(np.full((n, n), 1 / n))])


def exponential(n: int) -> Schedule:
    """Static directed exponential graph: hops `2^0, ..., 2^floor(log2(n - 1))` at once; `T = 1`.

    With `h` hops, `P[i, j] = 1 / (h + 1)` for `j = i` and every `j = (i - hop) mod n`.

    >>> len(exponential(8).round_at(0).slots)
    3
    """
    n = require_whole(n, "n of exponential(n)", 1)
    return Schedule([_circulant(n, _hops(n))])


def one_peer_exponential(n: int) -> Schedule:
    """Directed exponential graph, one peer per round (SGP-18, appendix A.1).

    Round `k` uses hop `2^(k mod T)`, with `T = floor(log2(n - 1)) + 1`: `P[i, i] = 1/2` and
    `P[i, (i - hop) mod n] = 1/2`. For `n` a power of two one cycle averages exactly.

    >>> one_peer_exponential(8).period
    3
    """
    n = require_whole(n, "n of one_peer_exponential(n)", 1)
    return k_peer_exponential(n, 1)


def k_peer_exponential(n: int, peers: int) -> Schedule:
    """Directed exponential graph, `peers` peers per round (SGP-18, appendix A).

    Round `k` uses hops number `k, k + 1, ..., k + peers - 1` of the cyclic list `2^0, ...,
    2^floor(log2(n - 1))`, all weights `1 / (peers + 1)`; `T = floor(log2(n - 1)) + 1`.

    Raises:
      ValueError: if `peers` is below 1 or above the number of hops.

    >>> [len(r.slots) for r in k_peer_exponential(8, 2).rounds]
    [2, 2, 2]
    """
    n = require_whole(n, "n of k_peer_exponential(n)", 1)
    hops = _hops(n)
    peers = require_whole(peers, "peers of k_peer_exponential(n, peers)", 1)
    if n == 1:
        return complete(1)
    if peers > len(hops):
        raise ValueError(
            f"k_peer_exponential({n}, peers={peers}): {n} nodes have {len(hops)} hops "
            f"({', '.join(map(str, hops))}), so peers is 1 to {len(hops)}."
        )
    return Schedule(
        [_circulant(n, (hops[(k + i) % len(hops)] for i in range(peers))) for k in range(len(hops))]
    )


def bipartite_exponential(n: int) -> Schedule:
    """Undirected bipartite exponential graph: pairs with weights 1/2 (SGP-18, appendix A.1).

    Round `k` pairs every odd node `i` with the even node `(i + 2^(k+1) - 1) mod n`, for
    `T = floor(log2(n - 1)) + 1` rounds: one more than the paper's, which would leave `n = 2`
    without a pair and `n = 4` disconnected. For `n` a power of two one cycle averages exactly.

    Raises:
      ValueError: if `n` is odd (and not 1).

    >>> bipartite_exponential(4).matrices()[0].tolist()[1]
    [0.0, 0.5, 0.5, 0.0]
    """
    n = require_whole(n, "n of bipartite_exponential(n)", 1)
    if n == 1:
        return complete(1)
    if n % 2:
        raise ValueError(
            f"bipartite_exponential pairs odd with even nodes and needs an even n; given {n}. "
            f"Use {n - 1} or {n + 1} nodes, or sgp with one_peer_exponential({n})."
        )
    odd = np.arange(1, n, 2)
    rounds = []
    for hop in _hops(n):
        even = (odd + 2 * hop - 1) % n
        matrix = np.eye(n) / 2
        matrix[odd, even] = matrix[even, odd] = 1 / 2
        rounds.append(Round(matrix))
    return Schedule(rounds)


def from_matrices(matrices: ArrayLike) -> Schedule:
    """The schedule of given mixing matrices, `[N, N]` or `[T, N, N]`.

    Raises:
      ValueError: for a column that does not sum to 1 (within 1e-6), a negative weight, a zero on a
        diagonal, or rounds that never connect all nodes; it names the round and the place.

    >>> from_matrices([[0.5, 0.25], [0.5, 0.75]]).is_doubly_stochastic
    False
    """
    stacked = np.asarray(matrices)
    if stacked.dtype == object:
        raise ValueError(
            f"from_matrices takes numbers, [N, N] or [T, N, N]; given {type(matrices).__name__}."
        )
    if stacked.ndim == 2:
        stacked = stacked[None]
    if stacked.ndim != 3:
        raise ValueError(f"mixing matrices are [N, N] or [T, N, N]; given {list(stacked.shape)}.")
    return Schedule([Round(matrix, f"round {t}") for t, matrix in enumerate(stacked)])


def from_graph(graph: Any, weights: Literal["uniform", "metropolis"] = "uniform") -> Schedule:
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
    degree = sends.sum(axis=0)
    if weights == "uniform":
        matrix = (sends + np.eye(len(labels))) / (1 + degree)
    elif weights == "metropolis":
        if graph.is_directed():
            raise ValueError(
                "Metropolis weights need an undirected graph; given a directed one. Use "
                "weights='uniform' with sgp, or graph.to_undirected()."
            )
        matrix = sends / (1 + np.maximum(degree[:, None], degree[None, :]))
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=0))
    else:
        raise ValueError(f"weights is 'uniform' or 'metropolis'; given {weights!r}.")
    return Schedule([Round(matrix)])


def piecewise(schedules: Mapping[int, Schedule]) -> Schedule:
    """One schedule after another: switch at these update numbers (the hybrids of SGP-19, table 3).

    What is switched in starts at its own round 0. The result has no
    `.period`, unless there is one part only.

    Args:
      schedules: from which step on which schedule; one starts at step 0.

    Raises:
      ValueError: if none starts at 0, a start is negative, a part is piecewise itself, or the
        parts differ in size.

    >>> hybrid = piecewise({0: complete(8), 300: one_peer_exponential(8)})
    >>> hybrid.round_at(299).is_uniform, hybrid.round_at(300).is_uniform
    (True, False)
    """
    for start, part in schedules.items():
        require_whole(start, "each start of piecewise", 0)
        if not isinstance(part, Schedule):
            raise ValueError(f"piecewise takes schedules; at {start}: {type(part).__name__}.")
    starts = sorted(schedules)
    if not starts or starts[0] != 0:
        raise ValueError(f"piecewise starts at step 0 and switches at later ones; given {starts}.")
    sizes = {start: schedules[start].size for start in starts}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"piecewise needs parts of one size; given N = {sizes} by start.")
    rounds: list[Round] = []
    pieces = []
    for start in starts:
        part = schedules[start]
        only, *others = part.pieces
        if others:
            raise ValueError(
                f"the part from step {start} is piecewise itself: put its parts in this one."
            )
        pieces.append(Piece(int(start), tuple(len(rounds) + k for k in only.cycle)))
        rounds.extend(part.rounds)
    return Schedule(rounds, pieces)
