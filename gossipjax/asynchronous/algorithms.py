"""Asynchronous algorithms, which say what a node sends to whom at a step."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from gossipjax.asynchronous._messages import Identity

Graph = Literal["exponential", "random", "rate"]
Peers = Sequence[Identity]
Seconds = Mapping[Identity, float]
Choose = Callable[[Peers, Identity, int, Seconds], Identity | None]
RATE_FLOOR = 0.1  # with `rate`, the part of the draws that are uniform


class Outer(NamedTuple):
    """The outer step that a node makes after some local steps.

    >>> outer(8, learning_rate=0.7, momentum=0.9).outer
    Outer(every=8, learning_rate=0.7, momentum=0.9)
    """

    every: int
    learning_rate: float
    momentum: float


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Says what a node does at a step besides its own update.

    >>> (sgp().name, outer(8).outer.every)
    ('sgp', 8)
    """

    name: Literal["sgp", "adpsgd", "outer"]
    averages: bool  # whether it asks its peer for the average of both; else it sends it a share
    # `(living nodes, own, step, seconds that a message took) -> peer`, or None to send nothing.
    choose: Choose
    outer: Outer | None = None  # None: every update moves the mass at once

    @property
    def models(self) -> int:
        """The number of models in a message: one, and the momentum if it travels."""
        return 2 if self.outer and self.outer.momentum else 1


def sgp(*, graph: Graph = "exponential", seed: int = 0) -> Algorithm:
    """Makes asynchronous stochastic gradient push: push-sum without a handshake.

    At each of its steps a node makes its update `x <- x + w u(z)` with `z = x / w`. The node then
    adds the shares that have arrived meanwhile, and sends half of its `(x, w)` to one peer, which
    adds this share when it arrives. The paper's update is `x <- x + u(z)`. The factor w makes z
    move by u, whatever w is, so that a slow node, which holds more weight, counts as much as the
    other nodes.

    Args:
      graph: how a node chooses the peer. With `exponential`, the node takes hop `1, 2, 4, ...` in
        turn among the living nodes, in the order of their places. With `random`, the node draws
        uniformly among the living nodes. With `rate`, the probability of a peer is inversely
        proportional to the measured seconds of a message, except in one draw of 10, which is
        uniform. Use `rate` if links differ: each link then carries what it can, and no node waits
        for a slow link.
      seed: the seed of the draws.

    Raises:
      ValueError: for an unknown `graph`.

    >>> sgp().name
    'sgp'

    References:
      Assran and Rabbat, "Asynchronous Gradient-Push", 2018, arXiv:1803.08950.
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", submission to ICLR
      2019, arXiv:1811.10792v1, section 5.1.
    """
    return Algorithm("sgp", averages=False, choose=_make_choose("sgp", graph, seed))


def adpsgd(*, graph: Literal["bipartite", "complete"] = "complete", seed: int = 0) -> Algorithm:
    """Makes asynchronous decentralized parallel SGD: pairs of nodes average their models.

    After each of its updates a node sends a copy `s` of its `(x, w)` to a random peer, unless it
    still waits for an answer. The peer, which holds `t`, adds `c = (s - t) / 2` at once and sends c
    back. The node subtracts c when the answer arrives. So updates that were made meanwhile are
    kept, and the sum over the nodes stays the same.

    Args:
      graph: with `complete`, a node asks any other living node. With `bipartite`, as in the paper,
        nodes at even places ask nodes at odd places, which ask nobody.
      seed: the seed of the draws.

    Raises:
      ValueError: for an unknown `graph`.

    >>> adpsgd(graph="bipartite").averages
    True

    References:
      Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
      arXiv:1710.06952.
    """
    if graph not in ("bipartite", "complete"):
        raise ValueError(f"graph of adpsgd must be 'bipartite' or 'complete', got {graph!r}.")
    choose = functools.partial(choose_randomly, seed, graph)
    return Algorithm("adpsgd", averages=True, choose=choose)


def outer(
    every: int,
    *,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    graph: Graph = "random",
    seed: int = 0,
) -> Algorithm:
    """Makes our asynchronous outer optimizer: nodes rarely send shares; momentum travels, too.

    A node holds a numerator x, a weight w and a momentum m. After every H local steps (`H =
    every`), which together have moved its model by p, it makes an outer step with Nesterov's
    momentum:

        m <- b m - w p;    x <- x + rate (w p - b m), with the new m;    p <- 0

    It then sends half of its `(x, w, m)` to one peer, which adds this share between two of its own
    steps. The model of a node is `z = x / w + p`. There is no server, and no node waits for
    another. The momentum is split together with the weight, so each share of it acts only on the
    mass with which it travels, and nothing is applied twice. If all nodes mixed exactly, this would
    be DiLoCo with SGD as the outer optimizer. At the end of its training a node adds p without
    momentum.

    Args:
      every: H, the number of local steps from one outer step to the next.
      learning_rate: `rate`, the learning rate of the outer step.
      momentum: b, at least 0 and below 1. A message contains two models, or one if b is 0.
      graph, seed: how a node chooses the peer, as in `sgp`.

    Raises:
      ValueError: if an argument is out of its range.

    >>> outer(every=50).outer
    Outer(every=50, learning_rate=0.7, momentum=0.9)

    References:
      Douillard et al., "DiLoCo", 2023, arXiv:2311.08105, algorithm 1, for the outer step; nothing
      published is known to us of its form here.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum of outer must be from 0 to below 1, got {momentum!r}.")
    rule = Outer(every, float(learning_rate), float(momentum))
    choose = _make_choose("outer", graph, seed)
    return Algorithm("outer", averages=False, choose=choose, outer=rule)


def _make_choose(name: str, graph: str, seed: int) -> Choose:
    """Returns the function that chooses the peer of a step on a graph; an error quotes `name`."""
    if graph not in get_args(Graph):
        raise ValueError(f"graph of {name} must be one of {get_args(Graph)}, got {graph!r}.")
    if graph == "exponential":
        return choose_exponential
    return functools.partial(choose_randomly, seed, graph)


def choose_exponential(peers: Peers, own: Identity, step: int, seconds: Seconds) -> Identity:
    """Returns the peer of a step on the one-peer exponential graph over the living nodes.

    The nodes are in the order of their places. Each step uses the next of the hops `1, 2, 4, ...`
    below N, the number of nodes.
    """
    ring = sorted([*peers, own], key=lambda identity: (identity.place, identity.life))
    num_hops = max(1, (len(ring) - 1).bit_length())
    return ring[(ring.index(own) + 2 ** (step % num_hops)) % len(ring)]


def choose_randomly(
    seed: int, graph: str, peers: Peers, own: Identity, step: int, seconds: Seconds
) -> Identity | None:
    """Draws the peer of a step from the seed, the node's place and the step.

    With the graph `rate`, the probability of a peer is proportional to 1 / seconds, the time that a
    message to it takes. A peer that was not measured counts as the fastest.
    """
    if graph == "bipartite":
        peers = [peer for peer in peers if peer.place % 2] if own.place % 2 == 0 else []
    if not peers:
        return None
    rng = random.Random(f"{seed} {own.place} {step}")
    ordered = sorted(peers, key=lambda peer: (peer.place, peer.life))
    if graph != "rate" or rng.random() < RATE_FLOOR:
        return rng.choice(ordered)
    fastest = min(seconds.values(), default=1.0)
    return rng.choices(ordered, [1 / seconds.get(peer, fastest) for peer in ordered])[0]
