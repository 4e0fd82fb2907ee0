"""The topologies that options name."""

import math
from collections.abc import Callable

import networkx
import numpy as np

import gossipjax as gx

MAX_ROUNDS = 100  # distinct graphs of a random topology


def _make_torus(nodes: int, *_: int) -> gx.Schedule:
    """Makes the torus whose sides are most nearly equal."""
    short = max(side for side in range(1, math.isqrt(nodes) + 1) if nodes % side == 0)
    return gx.topology.torus(short, nodes // short)


def _make_lazy_ring(nodes: int, *_: int) -> gx.Schedule:
    """Makes the ring `(W + I) / 2`, which has no eigenvalue below 0."""
    ring = gx.topology.ring(nodes).matrices()[0]
    return gx.topology.from_matrices((ring + np.eye(nodes)) / 2)


def _from_graph(graph: networkx.Graph) -> gx.Schedule:
    return gx.topology.from_graph(graph, weights="metropolis")


TOPOLOGIES: dict[str, Callable[[int, int, int], gx.Schedule]] = {
    "one_peer_exponential": lambda nodes, *_: gx.topology.one_peer_exponential(nodes),
    "two_peer_exponential": lambda nodes, *_: gx.topology.k_peer_exponential(nodes, 2),
    "exponential": lambda nodes, *_: gx.topology.exponential(nodes),
    "bipartite_exponential": lambda nodes, *_: gx.topology.bipartite_exponential(nodes),
    "complete_cycle": lambda nodes, *_: gx.topology.complete_cycle(nodes),
    "random_peer_exponential": gx.topology.random_peer,
    "random_peer_complete": lambda nodes, rounds, seed: gx.topology.random_peer(
        nodes, rounds, seed, graph="complete"
    ),
    "ring": lambda nodes, *_: gx.topology.ring(nodes),
    "lazy_ring": _make_lazy_ring,
    "chain": lambda nodes, *_: _from_graph(networkx.path_graph(nodes)),
    "tree": lambda nodes, *_: _from_graph(networkx.full_rary_tree(2, nodes)),
    "directed_ring": lambda nodes, *_: gx.topology.directed_ring(nodes),
    "random_ring": gx.topology.random_ring,
    "random_pairs": gx.topology.random_pairs,
    "torus": _make_torus,
    "hypercube": lambda nodes, *_: gx.topology.hypercube(nodes),
    "star": lambda nodes, *_: gx.topology.star(nodes),
    "complete": lambda nodes, *_: gx.topology.complete(nodes),
    "base_graph": lambda nodes, *_: gx.topology.base_graph(nodes),
    "two_peer_base_graph": lambda nodes, *_: gx.topology.base_graph(nodes, 2),
}
"""Functions of the number of nodes, rounds and seed, by name. Only random topologies use the last
two."""


def make_schedule(
    topology: str, nodes: int, rounds: int = MAX_ROUNDS, seed: int = 0
) -> gx.Schedule:
    """Makes the named topology over `nodes` nodes; random topologies use `rounds` and `seed`.

    >>> make_schedule("two_peer_exponential", 8).period
    3
    >>> make_schedule("torus", 12) == gx.topology.torus(3, 4)
    True
    """
    if topology not in TOPOLOGIES:
        raise ValueError(
            f"no topology is named {topology!r}: it must be one of {', '.join(TOPOLOGIES)}."
        )
    return TOPOLOGIES[topology](nodes, rounds, seed)
