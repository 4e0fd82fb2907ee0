"""Exponential graphs, static and in turn, and the cycle they are compared with. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from gossipjax.topology._round import Round, require_int, require_memory, require_nodes
from gossipjax.topology._static import complete, make_circulant_round
from gossipjax.topology.schedule import Schedule

Hops = Literal["paper", "authors"]


def exponential_hops(n: int) -> list[int]:
    """2^0, 2^1, ..., 2^floor(log2(n - 1)); none for one node."""
    return [1 << i for i in range((n - 1).bit_length())]


def exponential(n: int) -> Schedule:
    """Static exponential graph: hops `2^0, ..., 2^floor(log2(n - 1))` at once; `T = 1`.

    With `h` hops, `P[i, j] = 1 / (h + 1)` for `j = i` and every `j = (i - hop) mod n`.

    >>> len(exponential(8).round_at(0).slots)
    3
    """
    n = require_nodes(n, "exponential(n)")
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
    n = require_nodes(n, "one_peer_exponential(n)")
    return k_peer_exponential(n, 1)


def k_peer_exponential(n: int, peers: int, hops: Hops = "paper") -> Schedule:
    """Directed exponential graph, `peers` peers per round.

    All weights are `1 / (p + 1)` with `p = peers`. The rounds have either

    - the hops of the `"paper"`: round `k` uses hops number `k, k + 1, ..., k + p - 1` of the cyclic
      list `2^0, ..., 2^floor(log2(n - 1))`; `T = floor(log2(n - 1)) + 1`. Two peers: `{1, 2},
      {2, 4}, {4, 8}, ...`; or
    - the hops of the `"authors"`, in their released code: round `k` uses hops `j (p + 1)^k` for
      `j = 1, ..., p`, modulo `n`; `T = floor(log_(p+1)(n - 1)) + 1`. Two peers: `{1, 2}, {3, 6},
      {9, 18}, ...`. One cycle averages exactly if `n` is a power of `p + 1`.

    For one peer they are the same. For more, those of the authors average faster: in the long run,
    a round of two peers multiplies the distance to the average by 0.54 (paper: 0.58) for 16 nodes
    and by 0.60 (paper: 0.64) for 32.

    The published figures of 2P-SGP most likely ran neither list, but the hops in both directions of
    the authors' older code: the version that they name for the results of the paper
    (`sgp_pytorch0.5`) has no others for SGP. Two peers: `{1, -1}, {2, -2}, {4, -4}, ...`, factors
    of 0.62 for 16 nodes and 0.69 for 32. The text describes the first list, and the second is the
    default of the code since June 2019.

    Args:
      hops: `"paper"` or `"authors"`.

    Raises:
      ValueError: for unknown `hops`; if `peers` is below 1, above the number of hops of the paper,
        or above `n - 1`; or if a hop of the authors is a multiple of `n`, so that a node would send
        to itself.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.
      https://github.com/facebookresearch/stochastic_gradient_push, `gossip/graph_manager.py`.

    >>> [len(round_.slots) for round_ in k_peer_exponential(8, 2).rounds]
    [2, 2, 2]
    >>> k_peer_exponential(9, 2, hops="authors").period
    2
    """
    n = require_nodes(n, "k_peer_exponential(n, peers)")
    peers = require_int(peers, "peers of k_peer_exponential(n, peers)", 1)
    if hops not in get_args(Hops):
        raise ValueError(f"hops must be 'paper' or 'authors', got {hops!r}.")
    if n == 1:
        return complete(1)
    list_hops = _list_hops_of_paper if hops == "paper" else _list_hops_of_authors
    rounds = list_hops(n, peers)
    require_memory(n * (peers + 1) * len(rounds), f"k_peer_exponential({n}, {peers})")
    return Schedule([make_circulant_round(n, round_hops) for round_hops in rounds])


def _list_hops_of_paper(n: int, peers: int) -> list[list[int]]:
    hops = exponential_hops(n)
    if peers > len(hops):
        raise ValueError(
            f"peers of k_peer_exponential({n}, peers) must be at most {len(hops)}, got {peers}: "
            f"{n} nodes have {len(hops)} hops ({', '.join(map(str, hops))})."
        )
    return [[hops[(k + i) % len(hops)] for i in range(peers)] for k in range(len(hops))]


def _list_hops_of_authors(n: int, peers: int) -> list[list[int]]:
    if peers >= n:
        raise ValueError(
            f"peers of k_peer_exponential({n}, peers) must be at most {n - 1}, the number of other "
            f"nodes, got {peers}."
        )
    rounds = []
    stride = 1
    while stride < n:
        hops = [j * stride for j in range(1, peers + 1)]
        # Two hops that are equal modulo n differ by a third one, which is a multiple of n.
        multiples = [hop for hop in hops if hop % n == 0]
        if multiples:
            raise ValueError(
                f"no hop of k_peer_exponential({n}, {peers}, hops='authors') must be a multiple of "
                f"{n}, got {multiples[0]} in round {len(rounds)}: nodes would send to themselves. "
                f"Use hops='paper', or another number of nodes or peers."
            )
        rounds.append(hops)
        stride *= peers + 1
    return rounds


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
    n = require_nodes(n, "bipartite_exponential(n)")
    if n == 1:
        return complete(1)
    if n % 2:
        raise ValueError(
            f"n of bipartite_exponential(n) must be even, got {n}: odd nodes pair with even ones. "
            f"Use {n - 1} or {n + 1} nodes, or sgp with one_peer_exponential({n})."
        )
    nodes = np.arange(n)
    odd = nodes[1::2]
    rounds = []
    for hop in exponential_hops(n):
        even = (odd + 2 * hop - 1) % n
        partners = np.empty(n, dtype=int)
        partners[odd] = even
        partners[even] = odd
        receivers = np.concatenate([partners, nodes])
        rounds.append(Round.from_entries(n, receivers, np.tile(nodes, 2), 1 / 2))
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
    n = require_nodes(n, "complete_cycle(n)")
    if n == 1:
        return complete(1)
    require_memory(2 * n * (n - 1), f"complete_cycle({n})")
    return Schedule([make_circulant_round(n, [hop]) for hop in range(1, n)])
