"""Asynchronous algorithms: to whom a node sends at a step, and what."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Literal

from gossipjax.asynchronous._messages import Identity

Choose = Callable[[Sequence[Identity], Identity, int], Identity | None]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What a node does at a step, beside its own update."""

    name: Literal["sgp", "adpsgd"]
    averages: bool  # whether it asks its peer for the average of both; else it sends it a share
    choose: Choose  # `(living nodes, own, step) -> peer`, or None to send nothing at this step


def sgp(graph: Literal["exponential", "random"] = "exponential", seed: int = 0) -> Algorithm:
    """Asynchronous stochastic gradient push: push-sum without a handshake.

    At each of its steps a node makes its update, `x <- x + u(z)` with `z = x / w`, adds what has
    arrived meanwhile, and sends half of its `(x, w)` to one peer, which adds it whenever that is.
    Where the last share to that peer is not acknowledged yet, or the node stands for less than half
    a node, since it is faster than the others, it keeps its share. The update is scaled so that z
    moves by u over the number of nodes that the node stands for, and by 1.5 u at most: without a
    limit the models of nodes that have sent much and received little run away.

    Args:
      graph: `exponential`: hop `1, 2, 4, ...` in turn among the living nodes, in the order of
        their places. `random`: one of them, drawn uniformly.
      seed: of the draws.

    Raises:
      ValueError: if `graph` is neither.

    >>> sgp().name
    'sgp'

    References:
      Assran and Rabbat, "Asynchronous Gradient-Push", 2018, arXiv:1803.08950.
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", submission to ICLR
      2019, arXiv:1811.10792v1, section 5.1.
    """
    if graph not in ("exponential", "random"):
        raise ValueError(f"graph of sgp must be 'exponential' or 'random', got {graph!r}.")
    return Algorithm(
        "sgp", False, choose_exponential if graph == "exponential" else RandomPeer(seed)
    )


def adpsgd(graph: Literal["bipartite", "complete"] = "complete", seed: int = 0) -> Algorithm:
    """Asynchronous decentralized parallel SGD: pairs of nodes average their models.

    After each of its updates a node sends a copy `s` of its `(x, w)` to a random peer, unless an
    answer is still to come. The peer's thread answers at once with a copy `t` of its own, and adds
    `(s - t) / 2`; the node adds `(t - s) / 2` when the answer arrives. Updates that were made
    meanwhile stay, and the sum over the nodes does, too.

    Args:
      graph: `complete`: any other living node. `bipartite`, as in the paper: nodes at even places
        ask nodes at odd places, and these ask nobody.
      seed: of the draws.

    Raises:
      ValueError: if `graph` is neither.

    >>> adpsgd("bipartite").averages
    True

    References:
      Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
      arXiv:1710.06952.
    """
    if graph not in ("bipartite", "complete"):
        raise ValueError(f"graph of adpsgd must be 'bipartite' or 'complete', got {graph!r}.")
    return Algorithm("adpsgd", True, RandomPeer(seed, is_bipartite=graph == "bipartite"))


def choose_exponential(peers: Sequence[Identity], own: Identity, step: int) -> Identity:
    """The peer of a step on the one-peer exponential graph over the living.

    Nodes stand in the order of their places. The hops are `1, 2, 4, ...` below their number N, one
    a step, in turn.
    """
    ring = sorted([*peers, own], key=lambda identity: (identity.place, identity.life))
    hops = max(1, (len(ring) - 1).bit_length())
    return ring[(ring.index(own) + 2 ** (step % hops)) % len(ring)]


class RandomPeer:
    """Draws the peer of a step, by the seed, the node's place and the step."""

    def __init__(self, seed: int, is_bipartite: bool = False):
        self._seed = seed
        self._is_bipartite = is_bipartite

    def __call__(self, peers: Sequence[Identity], own: Identity, step: int) -> Identity | None:
        if self._is_bipartite:
            peers = [peer for peer in peers if peer.place % 2] if own.place % 2 == 0 else []
        if not peers:
            return None
        rng = random.Random(f"{self._seed} {own.place} {step}")
        return rng.choice(sorted(peers, key=lambda peer: (peer.place, peer.life)))
