"""Exponential graphs, static and in turn, and the cycle they are compared with. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

import numpy as np

from gossipjax.topology._static import complete, make_circulant_round
from gossipjax.topology.schedule import Round, Schedule, require_int


def exponential_hops(n: int) -> list[int]:
    """2^0, 2^1, ..., 2^floor(log2(n - 1)); none for one node."""
    return [1 << i for i in range((n - 1).bit_length())]


def exponential(n: int) -> Schedule:
    """Static exponential graph: hops `2^0, ..., 2^floor(log2(n - 1))` at once; `T = 1`.

    With `h` hops, `P[i, j] = 1 / (h + 1)` for `j = i` and every `j = (i - hop) mod n`.

    >>> len(exponential(8).round_at(0).slots)
    3
    """
    n = require_int(n, "n of exponential(n)", 1)
    return Schedule([make_circulant_round(n, exponential_hops(n))])


def one_peer_exponential(n: int) -> Schedule:
    """Directed exponential graph, one peer per round.

    Round `k` uses hop `2^(k mod T)`, with `T = floor(log2(n - 1)) + 1`: `P[i, i] = 1/2` and
    `P[i, (i - hop) mod n] = 1/2`. If `n` is a power of two, one cycle averages exactly.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.1.

    >>> one_peer_exponential(8).period
    3
    """
    n = require_int(n, "n of one_peer_exponential(n)", 1)
    return k_peer_exponential(n, 1)


def k_peer_exponential(n: int, peers: int) -> Schedule:
    """Directed exponential graph, `peers` peers per round.

    Round `k` uses hops number `k, k + 1, ..., k + peers - 1` of the cyclic list `2^0, ...,
    2^floor(log2(n - 1))`, all weights `1 / (peers + 1)`; `T = floor(log2(n - 1)) + 1`.

    Raises:
      ValueError: if `peers` is below 1 or above the number of hops.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.

    >>> [len(round_.slots) for round_ in k_peer_exponential(8, 2).rounds]
    [2, 2, 2]
    """
    n = require_int(n, "n of k_peer_exponential(n, peers)", 1)
    peers = require_int(peers, "peers of k_peer_exponential(n, peers)", 1)
    if n == 1:
        return complete(1)
    hops = exponential_hops(n)
    if peers > len(hops):
        raise ValueError(
            f"peers of k_peer_exponential({n}, peers) must be at most {len(hops)}, got {peers}: "
            f"{n} nodes have {len(hops)} hops ({', '.join(map(str, hops))})."
        )
    rounds = []
    for k in range(len(hops)):
        round_hops = [hops[(k + i) % len(hops)] for i in range(peers)]
        rounds.append(make_circulant_round(n, round_hops))
    return Schedule(rounds)


def bipartite_exponential(n: int) -> Schedule:
    """Undirected bipartite exponential graph: pairs with weights 1/2.

    Round `k` pairs every odd node `i` with the even node `(i + 2^(k+1) - 1) mod n`, for
    `T = floor(log2(n - 1)) + 1` rounds: one more than in the paper, whose rounds leave `n = 2`
    without a pair and `n = 4` disconnected. If `n` is a power of two, one cycle averages exactly.

    Raises:
      ValueError: if `n` is odd (and not 1).

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.1.

    >>> bipartite_exponential(4).matrices()[0].tolist()[1]
    [0.0, 0.5, 0.5, 0.0]
    """
    n = require_int(n, "n of bipartite_exponential(n)", 1)
    if n == 1:
        return complete(1)
    if n % 2:
        raise ValueError(
            f"n of bipartite_exponential(n) must be even, got {n}: odd nodes pair with even ones. "
            f"Use {n - 1} or {n + 1} nodes, or sgp with one_peer_exponential({n})."
        )
    odd = np.arange(1, n, 2)
    rounds = []
    for hop in exponential_hops(n):
        even = (odd + 2 * hop - 1) % n
        matrix = np.eye(n) / 2
        matrix[odd, even] = 1 / 2
        matrix[even, odd] = 1 / 2
        rounds.append(Round(matrix))
    return Schedule(rounds)


def complete_cycle(n: int) -> Schedule:
    """Edges of the complete graph in turn, one peer per round.

    Round `k` uses hop `k + 1`: `P[i, i] = P[i, (i - k - 1) mod n] = 1/2`; `T = n - 1`.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.

    >>> complete_cycle(4).matrices()[2].tolist()[0]
    [0.5, 0.5, 0.0, 0.0]
    """
    n = require_int(n, "n of complete_cycle(n)", 1)
    if n == 1:
        return complete(1)
    return Schedule([make_circulant_round(n, [hop]) for hop in range(1, n)])
