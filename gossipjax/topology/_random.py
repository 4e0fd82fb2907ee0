"""Graphs drawn anew in every round, from a seed that all nodes share. NumPy only.

Public as `gossipjax.topology`, which states the conventions of all builders.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gossipjax.topology._exponential import exponential_hops
from gossipjax.topology._round import (
    MAX_ROUNDS,
    Round,
    make_regular_round,
    require_int,
    require_memory,
    require_nodes,
)
from gossipjax.topology._static import ring
from gossipjax.topology.schedule import Schedule


def random_ring(n: int, rounds: int, seed: int) -> Schedule:
    """Ring whose order of nodes is drawn anew in every round.

    `T_k = Perm_k^T T_0 Perm_k`, with `T_0` the matrix of `ring(n)` and `Perm_k` a uniformly random
    permutation. `T = rounds` graphs are drawn and repeated. With `dpsgd` it is RAND-PSGD.

    References:
      Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training",
      ICASSP 2020, arXiv:2002.01119, equations 7 and 8.

    >>> schedule = random_ring(8, rounds=100, seed=0)
    >>> schedule.period, schedule.is_doubly_stochastic
    (100, True)
    """
    n = require_nodes(n, "random_ring(n, rounds, seed)")
    rounds = require_int(rounds, "rounds of random_ring(n, rounds, seed)", 1, MAX_ROUNDS)
    require_memory(3 * n * rounds, f"random_ring({n}, {rounds}, seed)")
    seed = require_int(seed, "seed of random_ring(n, rounds, seed)", 0)
    rng = np.random.default_rng(seed)
    if n <= 3:  # every order makes the same graph
        return Schedule([ring(n).round_at(0)] * rounds)
    nodes = np.arange(n)
    drawn = []
    for _ in range(rounds):
        position = rng.permutation(n)
        node_at = np.empty(n, dtype=int)
        node_at[position] = nodes
        senders = node_at[(position[:, None] + (-1, 0, 1)) % n]
        drawn.append(make_regular_round(np.sort(senders, axis=1)))
    return Schedule(drawn)


def random_pairs(n: int, rounds: int, seed: int) -> Schedule:
    """Nodes in pairs, drawn anew in every round; both of a pair take their mean, weights 1/2.

    `T = rounds` graphs are drawn and repeated. With `gx.outer` it is the average of NoLoCo.

    Raises:
      ValueError: if `n` is odd (and not 1), or the pairs drawn never connect all nodes.

    References:
      Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
      Models", 2025, arXiv:2506.10911.

    >>> random_pairs(8, rounds=20, seed=0).is_doubly_stochastic
    True
    """
    n = require_nodes(n, "random_pairs(n, rounds, seed)")
    rounds = require_int(rounds, "rounds of random_pairs(n, rounds, seed)", 1, MAX_ROUNDS)
    require_memory(2 * n * rounds, f"random_pairs({n}, {rounds}, seed)")
    rng = np.random.default_rng(require_int(seed, "seed of random_pairs(n, rounds, seed)", 0))
    if n == 1:
        return Schedule([ring(1).round_at(0)] * rounds)
    if n % 2:
        raise ValueError(f"n of random_pairs(n, rounds, seed) must be even, got {n}.")
    drawn = []
    for _ in range(rounds):
        first, second = rng.permutation(n).reshape(2, -1)
        partners = np.empty(n, dtype=int)
        partners[first] = second
        partners[second] = first
        drawn.append(make_regular_round(np.sort([np.arange(n), partners], axis=0).T))
    return Schedule(drawn)


def random_peer(
    n: int, rounds: int, seed: int, graph: Literal["exponential", "complete"] = "exponential"
) -> Schedule:
    """Every node sends to one random peer in every round, independently of the other nodes.

    Sender `j` draws one of its out-neighbours `i` uniformly: `P[i, j] = P[j, j] = 1/2`. So in one
    round some nodes receive nothing and others several messages: columns sum to 1, rows do not, and
    the push-sum weights differ from 1. `T = rounds` graphs are drawn and repeated.

    Args:
      graph: the out-neighbours of `j`. `"exponential"`: `(j + 2^i) mod n` for the hops of
        `exponential(n)`; `"complete"`: all other nodes.

    Raises:
      ValueError: for an unknown `graph`, or if the graphs drawn never connect all nodes.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.

    >>> random_peer(8, rounds=20, seed=0).is_doubly_stochastic
    False
    """
    n = require_nodes(n, "random_peer(n, rounds, seed)")
    rounds = require_int(rounds, "rounds of random_peer(n, rounds, seed)", 1, MAX_ROUNDS)
    require_memory(2 * n * rounds, f"random_peer({n}, {rounds}, seed)")
    seed = require_int(seed, "seed of random_peer(n, rounds, seed)", 0)
    if graph not in ("exponential", "complete"):
        raise ValueError(f"graph must be 'exponential' or 'complete', got {graph!r}.")
    if n == 1:
        return Schedule([ring(1).round_at(0)] * rounds)
    rng = np.random.default_rng(seed)
    hops = np.array(exponential_hops(n) if graph == "exponential" else range(1, n))
    nodes = np.arange(n)
    senders = np.tile(nodes, 2)
    drawn = []
    for _ in range(rounds):
        receivers = (nodes + rng.choice(hops, n)) % n
        drawn.append(Round.from_entries(n, np.concatenate([receivers, nodes]), senders, 1 / 2))
    try:
        return Schedule(drawn)
    except ValueError as error:
        raise ValueError(
            f"the rounds of random_peer(n={n}, rounds={rounds}, seed={seed}, graph={graph!r}) must "
            "connect all nodes, but never do. Draw more rounds, or use another seed."
        ) from error
