"""Graphs that are drawn anew in every round, from a seed that all nodes share. NumPy only.

Reached as `gossipjax.topology`, which says what holds for all builders.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gossipjax.schedule import Round, Schedule, require_whole
from gossipjax.static_topology import exponential_hops, ring


def random_ring(n: int, rounds: int, seed: int) -> Schedule:
    """Ring whose order of nodes is drawn anew in every round (RAND-20, eqs. 7, 8).

    `T_k = Perm_k^T T_0 Perm_k`, with `T_0` the matrix of `ring(n)` and `Perm_k` a uniformly random
    permutation. `T = rounds` graphs are drawn, and repeated. D-PSGD on it is RAND-PSGD.

    >>> schedule = random_ring(8, rounds=100, seed=0)
    >>> schedule.period, schedule.is_doubly_stochastic
    (100, True)
    """
    n = require_whole(n, "n of random_ring(n, rounds, seed)", 1)
    rounds, rng = _draws("random_ring", rounds, seed)
    matrix = ring(n).round_at(0).matrix
    orders = [rng.permutation(n) for _ in range(rounds)]
    return Schedule([Round(matrix[np.ix_(order, order)]) for order in orders])


def random_peer(
    n: int, rounds: int, seed: int, graph: Literal["exponential", "complete"] = "exponential"
) -> Schedule:
    """Every node sends to one peer that it draws by itself, in every round (SGP-18, appendix A).

    Sender `j` draws one of its out-neighbours `i` uniformly: `P[i, j] = P[j, j] = 1/2`. So some
    nodes receive nothing in a round and others several messages: columns sum to 1, rows do not, and
    the push-sum weights leave 1. `T = rounds` graphs are drawn, and repeated.

    Args:
      graph: the out-neighbours of `j`: `"exponential"`: `(j + 2^i) mod n` for the hops of
        `exponential(n)`; `"complete"`: all other nodes.

    Raises:
      ValueError: for an unknown `graph`, or if the graphs drawn never connect all nodes.

    >>> random_peer(8, rounds=20, seed=0).is_doubly_stochastic
    False
    """
    n = require_whole(n, "n of random_peer(n, rounds, seed)", 1)
    rounds, rng = _draws("random_peer", rounds, seed)
    if graph not in ("exponential", "complete"):
        raise ValueError(f"graph is 'exponential' or 'complete'; given {graph!r}.")
    if n == 1:
        return Schedule([Round(np.eye(1))] * rounds)
    hops = np.array(exponential_hops(n) if graph == "exponential" else range(1, n))
    senders, drawn = np.arange(n), []
    for _ in range(rounds):
        matrix = np.eye(n) / 2
        matrix[(senders + rng.choice(hops, n)) % n, senders] = 1 / 2
        drawn.append(Round(matrix))
    try:
        return Schedule(drawn)
    except ValueError as error:
        raise ValueError(
            f"the rounds of random_peer(n={n}, rounds={rounds}, seed={seed}, graph={graph!r}) "
            "never connect all nodes. Draw more rounds, or use another seed."
        ) from error


def _draws(name: str, rounds: int, seed: int) -> tuple[int, np.random.Generator]:
    """The number of rounds and their source of chance, both checked."""
    count = require_whole(rounds, f"rounds of {name}(n, rounds, seed)", 1)
    seed = require_whole(seed, f"seed of {name}(n, rounds, seed)", 0)
    return count, np.random.default_rng(seed)
