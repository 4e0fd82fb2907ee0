"""Decomposition of a mixing matrix into permutations, one collective-permute each. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Slot(NamedTuple):
    """One message per node: node `j` sends `weights[j]` times its buffer to `receivers[j]`.

    `receivers` `[N]` is a full permutation. `weights` `[N]` is 0 at a filler: an edge that is not
    in the graph and only completes the permutation. What it delivers must be discarded.
    """

    receivers: np.ndarray
    weights: np.ndarray


def color_edges(matrix: np.ndarray) -> tuple[Slot, ...]:
    """Colour the edges of a digraph so that each colour is a permutation (König's theorem).

    Senders and receivers are the two sides of a bipartite graph of degree K; K colours are enough.
    If the two ends of an edge have no free colour in common, two colours are swapped along an
    alternating path.

    Args:
      matrix: `P`, `[N, N]`; an edge is a positive entry off the diagonal.

    Returns:
      K slots, K the largest in- or out-degree.
    """
    n = len(matrix)
    receivers, senders = np.nonzero(matrix - np.diag(np.diag(matrix)))
    # Edges of one hop (receiver - sender) modulo N come together, so that a circulant graph gets
    # one hop per slot, without a swap.
    order = np.lexsort((senders, (receivers - senders) % n))
    degree = max(np.bincount(senders, minlength=n).max(), np.bincount(receivers, minlength=n).max())
    receiver_of = np.full((degree, n), -1)  # [colour, sender]
    sender_of = np.full((degree, n), -1)  # [colour, receiver]
    for sender, receiver in zip(senders[order], receivers[order], strict=True):
        color = int(np.argmax(receiver_of[:, sender] < 0))  # free at the sender
        if sender_of[color, receiver] >= 0:
            other = int(np.argmax(sender_of[:, receiver] < 0))  # free at the receiver
            _swap_colors(receiver_of, sender_of, receiver, color, other)
        receiver_of[color, sender] = receiver
        sender_of[color, receiver] = sender
    return tuple(
        _complete_permutation(receiver_of[color], sender_of[color], matrix)
        for color in range(degree)
    )


def _swap_colors(
    receiver_of: np.ndarray, sender_of: np.ndarray, receiver: int, color: int, other: int
) -> None:
    """Swap two colours, in place, along the path that leaves `receiver` by `color`.

    The path cannot end at the sender of the edge that is being coloured: it would arrive there by
    `color`, which is free at that sender.
    """
    path = []
    while (sender := sender_of[color, receiver]) >= 0:
        path.append((sender, receiver, color))
        color, other = other, color
        receiver = receiver_of[color, sender]
        if receiver < 0:
            break
        path.append((sender, receiver, color))
        color, other = other, color
    both = color + other
    for sender, receiver, old in path:
        receiver_of[old, sender] = -1
        sender_of[old, receiver] = -1
    for sender, receiver, old in path:
        receiver_of[both - old, sender] = receiver
        sender_of[both - old, receiver] = sender


def _complete_permutation(
    receiver_of: np.ndarray, sender_of: np.ndarray, matrix: np.ndarray
) -> Slot:
    """Complete a partial permutation; a node idle on both sides sends to itself, which is free."""
    idle_sender = receiver_of < 0
    idle_receiver = sender_of < 0
    idle_both = idle_sender & idle_receiver
    weights = np.where(idle_sender, 0.0, matrix[receiver_of, np.arange(len(matrix))])
    receivers = receiver_of.copy()
    receivers[idle_both] = np.flatnonzero(idle_both)
    receivers[idle_sender & ~idle_both] = np.flatnonzero(idle_receiver & ~idle_both)
    receivers.setflags(write=False)
    weights.setflags(write=False)
    return Slot(receivers, weights)
