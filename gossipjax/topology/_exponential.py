"""Who talks to whom: builders that return a `Schedule`. NumPy only.

Mixing weights are uniform over a sender's out-neighbours, itself included (SGP-18, appendix A),
unless the docstring says otherwise. Every graph of one node is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gossipjax.finite_time import base_graph as base_graph
from gossipjax.random_topology import random_peer as random_peer
from gossipjax.random_topology import random_ring as random_ring
from gossipjax.schedule import Piece, Round, Schedule, require_whole
from gossipjax.static_topology import circulant, exponential_hops
from gossipjax.static_topology import complete as complete
from gossipjax.static_topology import directed_ring as directed_ring
from gossipjax.static_topology import exponential as exponential
from gossipjax.static_topology import from_graph as from_graph
from gossipjax.static_topology import hypercube as hypercube
from gossipjax.static_topology import ring as ring
from gossipjax.static_topology import star as star
from gossipjax.static_topology import torus as torus

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


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
    hops = exponential_hops(n)
    peers = require_whole(peers, "peers of k_peer_exponential(n, peers)", 1)
    if n == 1:
        return complete(1)
    if peers > len(hops):
        raise ValueError(
            f"k_peer_exponential({n}, peers={peers}): {n} nodes have {len(hops)} hops "
            f"({', '.join(map(str, hops))}), so peers is 1 to {len(hops)}."
        )
    return Schedule(
        [circulant(n, (hops[(k + i) % len(hops)] for i in range(peers))) for k in range(len(hops))]
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
    for hop in exponential_hops(n):
        even = (odd + 2 * hop - 1) % n
        matrix = np.eye(n) / 2
        matrix[odd, even] = matrix[even, odd] = 1 / 2
        rounds.append(Round(matrix))
    return Schedule(rounds)


def complete_cycle(n: int) -> Schedule:
    """The edges of the complete graph in turn, one peer per round (SGP-18, appendix A).

    Round `k` uses hop `k + 1`: `P[i, i] = P[i, (i - k - 1) mod n] = 1/2`; `T = n - 1`.

    >>> complete_cycle(4).matrices()[2].tolist()[0]
    [0.5, 0.5, 0.0, 0.0]
    """
    n = require_whole(n, "n of complete_cycle(n)", 1)
    return Schedule([circulant(n, (hop,)) for hop in range(1, n)]) if n > 1 else complete(1)


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
