"""A mixing matrix as full permutations: each becomes one collective-permute. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Slot(NamedTuple):
    """One message per node: node `j` sends `weights[j]` times its buffer to `receivers[j]`.

    `receivers` `[N]` is a full permutation. `weights` `[N]` is 0 where the edge is a filler, there
    only to complete the permutation, and must carry nothing.
    """

    receivers: np.ndarray
    weights: np.ndarray


def color_edges(matrix: np.ndarray) -> tuple[Slot, ...]:
    """Colors the edges of a digraph so that each color is a permutation (Koenig's theorem).

    Senders and receivers are the two sides of a bipartite graph of degree K; K colors are enough.
    An edge whose ends have no free color in common gets one by swapping two colors along an
    alternating path.
    """
    n = len(matrix)
    receivers, senders = np.nonzero(matrix - np.diag(np.diag(matrix)))
    # Edges of one hop (receiver - sender) modulo N come together, so that a circulant graph gets
    # one hop per slot, with no swap.
    order = np.lexsort((senders, (receivers - senders) % n))
    degree = max(np.bincount(senders, minlength=n).max(), np.bincount(receivers, minlength=n).max())
    receiver_of = np.full((degree, n), -1)  # [color, sender]
    sender_of = np.full((degree, n), -1)  # [color, receiver]
    for sender, receiver in zip(senders[order], receivers[order], strict=True):
        a = int(np.argmax(receiver_of[:, sender] < 0))  # free at the sender
        b = int(np.argmax(sender_of[:, receiver] < 0))  # free at the receiver
        if sender_of[a, receiver] >= 0:
            # Swap colors a and b along the path that leaves the receiver by color a. It cannot
            # end at the sender: it would arrive there by color a, which is free at the sender.
            path, at, color = [], receiver, a
            while (other := sender_of[color, at]) >= 0:
                path.append((other, at, color))
                color = a + b - color
                if (at := receiver_of[color, other]) < 0:
                    break
                path.append((other, at, color))
                color = a + b - color
            for u, v, old in path:
                receiver_of[old, u] = sender_of[old, v] = -1
            for u, v, old in path:
                receiver_of[a + b - old, u], sender_of[a + b - old, v] = v, u
        receiver_of[a, sender], sender_of[a, receiver] = receiver, sender
    return tuple(_complete(receiver_of[color], sender_of[color], matrix) for color in range(degree))


def _complete(receiver_of: np.ndarray, sender_of: np.ndarray, matrix: np.ndarray) -> Slot:
    """Fills a partial permutation up; a node idle on both sides sends to itself, which is free."""
    idle = receiver_of < 0
    weights = np.where(idle, 0.0, matrix[receiver_of, np.arange(len(matrix))])
    receivers = receiver_of.copy()
    both = idle & (sender_of < 0)
    receivers[both] = np.flatnonzero(both)
    receivers[idle & ~both] = np.flatnonzero((sender_of < 0) & ~both)
    receivers.setflags(write=False)
    weights.setflags(write=False)
    return Slot(receivers, weights)
