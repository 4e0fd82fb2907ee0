"""Schedules that change from round to round, and schedules made of schedules. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from gossipjax.topology._round import Round, make_regular_round, require_int
from gossipjax.topology._static import (
    complete,
    exponential_hops,
    make_circulant_round,
    make_metropolis_round,
    ring,
)
from gossipjax.topology.schedule import Schedule, Segment, named

Hops = Literal["paper", "authors"]


@named
def one_peer_exponential(nodes: int) -> Schedule:
    """Directed exponential graph: in each round, each node sends half of its model to one peer.

    In round `k` node `i` sends to `(i + hop) mod N`, with `hop = 2^(k mod T)` and `T = floor(log2(N
    - 1)) + 1`: `P[i, i] = P[i, (i - hop) mod N] = 1/2`. If `N` is a power of two, all nodes have
    the exact average after T rounds.

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.1.

    >>> one_peer_exponential(8).period
    3
    """
    return k_peer_exponential(nodes, 1)


@named
def k_peer_exponential(nodes: int, peers: int, *, hops: Hops = "paper") -> Schedule:
    """Directed exponential graph: in each round, each node sends to `peers` other nodes.

    All weights are `1 / (p + 1)` with `p = peers`. The argument `hops` says by which hops a node
    sends in round `k`:

    - `"paper"` takes the entries `k, k + 1, ..., k + p - 1` of the cyclic list
      `2^0, ..., 2^floor(log2(N - 1))`; `T = floor(log2(N - 1)) + 1`. Two peers use
      `{1, 2}, {2, 4}, {4, 8}, ...`
    - `"authors"` takes `j (p + 1)^k` for `j = 1, ..., p`, modulo `N`;
      `T = floor(log_(p+1)(N - 1)) + 1`. Two peers use `{1, 2}, {3, 6}, {9, 18}, ...` One cycle
      averages exactly if `N` is a power of `p + 1`. The authors' code uses the list `"authors"` by
      default since June 2019.

    For one peer both lists are the same. For two peers and more, the hops of `"authors"` average
    faster than those of `"paper"`. The published figures of 2P-SGP most likely used neither list,
    but `{1, -1}, {2, -2}, {4, -4}, ...`: the version of the code that the authors name for the
    figures (`sgp_pytorch0.5`) has no other hops for SGP.

    Raises:
      ValueError: for unknown `hops`; if `peers` is below 1, or above the length of the list of
        `"paper"`; or if a hop of `"authors"` is a multiple of `N`: nodes would send to themselves.

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.
      https://github.com/facebookresearch/stochastic_gradient_push, `gossip/graph_manager.py`.

    >>> [len(round_.slots) for round_ in k_peer_exponential(8, 2).rounds]
    [2, 2, 2]
    >>> k_peer_exponential(9, 2, hops="authors").period
    2
    """
    n = require_int(nodes, "nodes of k_peer_exponential", 1)
    peers = require_int(peers, "peers of k_peer_exponential", 1)
    if hops not in get_args(Hops):
        raise ValueError(f"hops must be 'paper' or 'authors', got {hops!r}.")
    if n == 1:
        return complete(1)
    if hops == "authors":
        return _build_hops_of_authors(n, peers)
    powers = exponential_hops(n)
    count = len(powers)
    if peers > count:
        raise ValueError(
            f"peers of k_peer_exponential({n}, peers) must be at most {count}, got {peers}: "
            f"{n} nodes have {count} hops ({', '.join(map(str, powers))})."
        )
    rounds = [[powers[(k + i) % count] for i in range(peers)] for k in range(count)]
    return Schedule([make_circulant_round(n, round_hops) for round_hops in rounds])


def _build_hops_of_authors(n: int, peers: int) -> Schedule:
    """Builds `k_peer_exponential` with `hops="authors"`: round `k` uses hops `j (peers + 1)^k`."""
    rounds: list[Round] = []
    stride = 1  # (peers + 1)^k
    while stride < n:
        hops = [j * stride for j in range(1, peers + 1)]
        # This also finds two hops that are equal modulo n, because their difference is a hop, too.
        multiples = [hop for hop in hops if hop % n == 0]
        if multiples:
            raise ValueError(
                f"no hop of k_peer_exponential({n}, {peers}, hops='authors') must be a multiple of "
                f"{n}, got {multiples[0]} in round {len(rounds)}: nodes would send to themselves. "
                f"Use hops='paper', or another number of nodes or peers."
            )
        rounds.append(make_circulant_round(n, hops))
        stride *= peers + 1
    return Schedule(rounds)


@named
def bipartite_exponential(nodes: int) -> Schedule:
    """Undirected bipartite exponential graph: in each round, pairs of nodes average their models.

    Round `k` pairs every odd node `i` with the even node `(i + 2^(k+1) - 1) mod N`, and both take
    weights 1/2; `T = floor(log2(N - 1)) + 1`. With one round less, as in the paper, `N = 2` would
    have no pair and `N = 4` would stay disconnected. If `N` is a power of two, one cycle averages
    exactly.

    Raises:
      ValueError: if `nodes` is odd (and not 1).

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.1.

    >>> bipartite_exponential(4).matrices()[0].tolist()[1]
    [0.0, 0.5, 0.5, 0.0]
    """
    n = require_int(nodes, "nodes of bipartite_exponential", 1)
    if n == 1:
        return complete(1)
    if n % 2:
        raise ValueError(
            f"nodes of bipartite_exponential must be even, got {n}: odd nodes pair with even "
            f"ones. Use {n - 1} or {n + 1} nodes, or sgp with one_peer_exponential({n})."
        )
    odd = np.arange(1, n, 2)
    # `hop` is 2^k, so a node of `odd` meets the node 2^(k+1) - 1 further on, which is even.
    return Schedule([_make_pairs(odd, (odd + 2 * hop - 1) % n) for hop in exponential_hops(n)])


def _make_pairs(first: np.ndarray, second: np.ndarray) -> Round:
    """Makes a round in which each pair of nodes, `first[k]` and `second[k]`, takes its mean."""
    partners = np.empty(2 * len(first), dtype=int)
    partners[first] = second
    partners[second] = first
    senders = np.stack([np.arange(len(partners)), partners], axis=1)  # each node and its partner
    return make_regular_round(np.sort(senders, axis=1))


@named
def complete_cycle(nodes: int) -> Schedule:
    """Each node sends to every other node in turn, one per round.

    Round `k` uses hop `k + 1`: `P[i, i] = P[i, (i - k - 1) mod N] = 1/2`; `T = N - 1`.

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.

    >>> complete_cycle(4).matrices()[2].tolist()[0]
    [0.5, 0.5, 0.0, 0.0]
    """
    n = require_int(nodes, "nodes of complete_cycle", 1)
    if n == 1:
        return complete(1)
    return Schedule([make_circulant_round(n, [hop]) for hop in range(1, n)])


def _check_random_arguments(
    n: int, rounds: int, seed: int, builder: str
) -> tuple[int, int, np.random.Generator]:
    """Checks the arguments of a builder of random rounds; returns N, T and a random generator."""
    n = require_int(n, f"nodes of {builder}", 1)
    rounds = require_int(rounds, f"rounds of {builder}", 1)
    return n, rounds, np.random.default_rng(require_int(seed, f"seed of {builder}", 0))


@named
def random_ring(nodes: int, rounds: int, seed: int) -> Schedule:
    """Ring whose order of nodes is drawn anew in every round.

    `T_k = Perm_k^T T_0 Perm_k`, with `T_0` the matrix of `ring(N)` and `Perm_k` a uniformly random
    permutation. `T = rounds` graphs are drawn, and then repeat. `gx.dpsgd` over a `random_ring` is
    RAND-PSGD.

    References:
      Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training",
      ICASSP 2020, arXiv:2002.01119, equations 7 and 8.

    >>> schedule = random_ring(8, rounds=100, seed=0)
    >>> schedule.period, schedule.is_doubly_stochastic
    (100, True)
    """
    n, rounds, rng = _check_random_arguments(nodes, rounds, seed, "random_ring")
    if n <= 3:  # every order makes the same graph
        return Schedule([ring(n).round_at(0)] * rounds)
    drawn = []
    for _ in range(rounds):
        position = rng.permutation(n)  # of each node in the ring
        node_at = np.argsort(position)  # the node at each position
        senders = node_at[(position[:, None] + (-1, 0, 1)) % n]  # the neighbours and the node
        drawn.append(make_regular_round(np.sort(senders, axis=1)))
    return Schedule(drawn)


@named
def random_pairs(nodes: int, rounds: int, seed: int) -> Schedule:
    """Each round draws new pairs of nodes, and both nodes of a pair take their mean (weights 1/2).

    `T = rounds` graphs are drawn, and then repeat. With `gx.outer` nodes average as in NoLoCo.

    Raises:
      ValueError: if `nodes` is odd (and not 1), or the pairs drawn never connect all nodes.

    References:
      Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
      Models", 2025, arXiv:2506.10911.

    >>> random_pairs(8, rounds=20, seed=0).is_doubly_stochastic
    True
    """
    n, rounds, rng = _check_random_arguments(nodes, rounds, seed, "random_pairs")
    if n == 1:
        return Schedule([ring(1).round_at(0)] * rounds)
    if n % 2:
        raise ValueError(f"nodes of random_pairs must be even, got {n}.")
    return Schedule([_make_pairs(*rng.permutation(n).reshape(2, -1)) for _ in range(rounds)])


@named
def random_peer(
    nodes: int,
    rounds: int,
    seed: int,
    *,
    graph: Literal["exponential", "complete"] = "exponential",
    peers: int = 1,
) -> Schedule:
    """Every node sends to random peers in every round, independently of the other nodes.

    Sender `j` draws `s = peers` of its out-neighbours `i`: `P[i, j] = P[j, j] = 1 / (1 + s)`. So in
    one round some nodes receive nothing and others receive several messages. Columns sum to 1 but
    rows do not, and the push-sum weights differ from 1. `T = rounds` graphs are drawn, and then
    repeat.

    Args:
      graph: the nodes among which sender `j` draws. With `"exponential"` they are `(j + 2^i) mod N`
        for the hops of `exponential(N)`, with `"complete"` all other nodes.
      peers: s, how many different nodes a sender draws.

    Raises:
      ValueError: for an unknown `graph`, if it has fewer out-neighbours, or if the graphs drawn
        never connect all nodes.

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.
      De Vos et al., "Epidemic Learning", NeurIPS 2023, arXiv:2310.01972 (s peers of all nodes).

    >>> random_peer(8, rounds=20, seed=0).is_doubly_stochastic
    False
    """
    n, rounds, rng = _check_random_arguments(nodes, rounds, seed, "random_peer")
    if graph not in ("exponential", "complete"):
        raise ValueError(f"graph must be 'exponential' or 'complete', got {graph!r}.")
    if n == 1:
        return Schedule([ring(1).round_at(0)] * rounds)
    hops = np.array(exponential_hops(n) if graph == "exponential" else range(1, n))
    require_int(peers, "peers of random_peer", 1, len(hops))
    numbers = np.arange(n)
    senders = np.tile(numbers, 1 + peers)  # each node sends to itself and to its peers
    drawn = []
    for _ in range(rounds):
        if peers == 1:  # an older way to draw, kept so that a seed draws the same graphs
            chosen = rng.choice(hops, n)[None]
        else:
            chosen = rng.permuted(np.tile(hops, (n, 1)), axis=1)[:, :peers].T
        receivers = np.concatenate([numbers[None], (numbers + chosen) % n]).ravel()
        drawn.append(Round.from_entries(n, receivers, senders, 1 / (1 + peers)))
    return Schedule(drawn)


@named
def erdos_renyi(nodes: int, rounds: int, seed: int, *, probability: float) -> Schedule:
    """Each round draws every edge with the same probability, independently; Metropolis weights.

    `T = rounds` graphs are drawn, and then repeat. A node that draws no edge keeps its model.

    Args:
      probability: of an edge, above 0 and at most 1.

    Raises:
      ValueError: if the probability is out of its range, or the graphs drawn never connect all
        nodes.

    References:
      Erdos, Renyi, "On Random Graphs I", Publicationes Mathematicae 1959.

    >>> erdos_renyi(8, rounds=20, seed=0, probability=0.3).is_doubly_stochastic
    True
    """
    n, rounds, rng = _check_random_arguments(nodes, rounds, seed, "erdos_renyi")
    require_probability(probability, "erdos_renyi")
    drawn = []
    for _ in range(rounds):
        adjacency = np.triu(rng.random((n, n)) < probability, 1)  # each edge once
        drawn.append(make_metropolis_round(n, *np.nonzero(adjacency | adjacency.T)))
    return Schedule(drawn)


@named
def random_rounds(schedule: Schedule, rounds: int, seed: int, *, probability: float) -> Schedule:
    """Draws for each step, with the given probability, whether all nodes exchange or nobody sends.

    If they exchange at step `k`, they use the round of `schedule` at step `k`. `T = rounds` steps
    are drawn, and then repeat.

    Args:
      probability: that nodes exchange at a step, above 0 and at most 1.

    Raises:
      ValueError: if the probability is out of its range, the schedule is piecewise, or the rounds
        that are used never connect all nodes.

    References:
      Mishchenko et al., "ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
      Acceleration!", ICML 2022, arXiv:2202.09357.

    >>> import gossipjax as gx
    >>> sometimes = random_rounds(gx.topology.ring(4), 10, 0, probability=0.3)
    >>> [sometimes.round_at(k).is_identity for k in range(4)]
    [True, False, False, False]
    """
    _, rounds, rng = _check_random_arguments(schedule.size, rounds, seed, "random_rounds")
    require_probability(probability, "random_rounds")
    first, *others = schedule.segments
    if others:
        raise ValueError(f"the schedule of random_rounds must not be piecewise, got {schedule}.")
    is_used = rng.random(rounds) < probability
    idle = len(schedule.rounds)  # the index of the identity round, which is added below
    steps = [first.cycle[k % len(first.cycle)] if is_used[k] else idle for k in range(rounds)]
    nodes = range(schedule.size)
    identity = Round.from_entries(schedule.size, nodes, nodes, 1)
    return Schedule([*schedule.rounds, identity], [Segment(0, tuple(steps))])


def require_probability(value: float, name: str) -> None:
    """Raises `ValueError` unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"probability of {name} must be above 0 and at most 1, got {value!r}.")


@named
def piecewise(schedules: Mapping[int, Schedule]) -> Schedule:
    """Switches from one schedule to the next at the given steps. The first step must be 0.

    Each schedule starts at its own round 0. The result has a `.period` only if you give one
    schedule. The steps count rounds, so `.every(k)` multiplies the steps at which schedules switch
    by `k`. To switch at step 300 of a training that exchanges every 2 steps, give 150.

    Raises:
      ValueError: if no schedule starts at 0, a start is negative, a schedule is piecewise itself,
        or the schedules differ in size.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, table 3 (hybrids).

    >>> import gossipjax as gx
    >>> hybrid = piecewise({0: gx.topology.complete(8), 300: gx.topology.one_peer_exponential(8)})
    >>> hybrid.round_at(299).is_uniform, hybrid.round_at(300).is_uniform
    (True, False)
    """
    starts = sorted(schedules)
    if not starts or starts[0] != 0:
        raise ValueError(
            f"one schedule of piecewise must start at step 0, got the starts {starts}."
        )
    rounds: list[Round] = []
    segments = []
    for start in starts:
        schedule = schedules[start]
        first, *others = schedule.segments
        if others:
            raise ValueError(
                f"the schedule from step {start} must not be piecewise itself, got "
                f"{len(schedule.segments)} segments. Add each of them here with its start."
            )
        segments.append(Segment(int(start), tuple(len(rounds) + k for k in first.cycle)))
        rounds.extend(schedule.rounds)
    return Schedule(rounds, segments)


@named
def periodic(schedule: Schedule, every: int) -> Schedule:
    """Replaces every `every`-th round of a schedule by the exact average.

    Steps `every - 1`, `2 every - 1`, ... average exactly. At all other steps `k` the nodes use the
    round that `schedule` has at step `k`, so they never use the rounds that an average replaces.
    `gx.sgp` or `gx.dpsgd` over a `periodic` schedule is Gossip-PGA. With `gx.osgp`, the average
    arrives as late as any message.

    Raises:
      ValueError: if `every` is not an integer >= 1.

    References:
      Chen et al., "Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021,
      arXiv:2105.09080.

    >>> import gossipjax as gx
    >>> gossip_pga = periodic(gx.topology.one_peer_exponential(8), 4)
    >>> [gossip_pga.round_at(k).is_uniform for k in range(5)]
    [False, False, False, True, False]
    """
    every = require_int(every, "every of periodic(schedule, every)", 1)
    average = len(schedule.rounds)  # the index of the exact average, which is added below
    segments = []
    for start, cycle in schedule.segments:
        length = math.lcm(len(cycle), every)
        rounds = [cycle[k % len(cycle)] for k in range(length)]
        # Steps count from 0, not from the start of the segment.
        rounds[every - 1 - start % every :: every] = [average] * (length // every)
        segments.append(Segment(start, tuple(rounds)))
    return Schedule([*schedule.rounds, *complete(schedule.size).rounds], segments)
