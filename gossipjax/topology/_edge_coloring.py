"""Decomposition of a mixing matrix into permutations, one collective-permute each. NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Slot(NamedTuple):
    """One message per node: node `j` sends `weights[j]` times its buffer to `receivers[j]`.

    `receivers` `[N]` is a full permutation. `weights` `[N]` is 0 at a filler: an edge that is not
    in the graph and only completes the permutation, which `vmap` needs; on a mesh it is left out.
    What it delivers must be discarded.
    """

    receivers: np.ndarray
    weights: np.ndarray


def color_edges(
    size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
) -> tuple[Slot, ...]:
    """Colour the edges of a digraph so that each colour is a permutation (König's theorem).

    Where all nodes have an edge of the same hop (receiver - sender) modulo N, these edges are a
    permutation already, so a circulant graph gets one hop per slot. The others are coloured one by
    one.

    Args:
      size: N, the number of nodes.
      receivers: `[E]`, by edge.
      senders: `[E]`, by edge; never the receiver.
      weights: `[E]`, by edge.

    Returns:
      K slots, K the largest in- or out-degree.
    """
    hops = (receivers - senders) % size
    order = np.lexsort((senders, hops))
    hops = hops[order]
    receivers = receivers[order]
    senders = senders[order]
    weights = weights[order]
    is_full = (np.bincount(hops, minlength=size) == size)[hops]
    full_receivers = receivers[is_full].reshape(-1, size)  # by sender
    full_weights = weights[is_full].reshape(-1, size)
    slots = [_make_slot(*pair) for pair in zip(full_receivers, full_weights, strict=True)]
    receivers = receivers[~is_full]
    senders = senders[~is_full]
    weights = weights[~is_full]
    colors = color_multigraph(size, receivers, senders)
    for color in range(colors.max(initial=-1) + 1):
        edges = colors == color
        slots.append(_complete_permutation(size, receivers[edges], senders[edges], weights[edges]))
    return tuple(slots)


def color_multigraph(size: int, receivers: np.ndarray, senders: np.ndarray) -> np.ndarray:
    """The colours of edges, `[E]`, which may be several between two nodes.

    No node sends or receives two edges of one colour. There are as many colours as the largest in-
    or out-degree.
    """
    return _Coloring(size, receivers, senders).color_all()


class _Coloring:
    """Colours of the edges of a bipartite graph: senders on one side, receivers on the other.

    K colours are enough for a graph of degree K. If the two ends of an edge have no free colour in
    common, two colours are swapped along an alternating path.
    """

    def __init__(self, size: int, receivers: np.ndarray, senders: np.ndarray):
        sent = np.bincount(senders, minlength=size)
        received = np.bincount(receivers, minlength=size)
        all_colors = (1 << int(max(sent.max(), received.max()))) - 1
        self._receivers: list[int] = receivers.tolist()
        self._senders: list[int] = senders.tolist()
        self._colors = [-1] * len(self._senders)
        self._free_at_sender = [all_colors] * size  # sets of bits
        self._free_at_receiver = [all_colors] * size
        self._edge_at_sender: list[dict[int, int]] = [{} for _ in range(size)]  # by colour
        self._edge_at_receiver: list[dict[int, int]] = [{} for _ in range(size)]

    def color_all(self) -> np.ndarray:
        """Colour all edges, `[E]`."""
        for edge, (sender, receiver) in enumerate(zip(self._senders, self._receivers, strict=True)):
            free = self._free_at_sender[sender]
            common = free & self._free_at_receiver[receiver]
            color = _get_lowest_bit(common or free)
            if not common:
                other = _get_lowest_bit(self._free_at_receiver[receiver])
                self._swap_colors(receiver, color, other)
            self._free_at_sender[sender] ^= 1 << color
            self._free_at_receiver[receiver] ^= 1 << color
            self._set_color(edge, color)
        return np.array(self._colors, dtype=int)

    def _set_color(self, edge: int, color: int) -> None:
        self._colors[edge] = color
        self._edge_at_sender[self._senders[edge]][color] = edge
        self._edge_at_receiver[self._receivers[edge]][color] = edge

    def _swap_colors(self, receiver: int, color: int, other: int) -> None:
        """Swap two colours along the path that leaves `receiver` by `color`.

        The path cannot end at the sender of the edge that is being coloured: it would arrive there
        by `color`, which is free at that sender.
        """
        path: list[int] = []
        end = receiver
        edge = self._edge_at_receiver[receiver].get(color)
        while edge is not None:
            path.append(edge)
            if len(path) % 2:
                end = self._senders[edge]
                edge = self._edge_at_sender[end].get(other)
            else:
                end = self._receivers[edge]
                edge = self._edge_at_receiver[end].get(color)
        # Nodes inside the path have both colours before and after.
        free_at_end = self._free_at_sender if len(path) % 2 else self._free_at_receiver
        free_at_end[end] ^= 1 << color | 1 << other
        self._free_at_receiver[receiver] ^= 1 << color | 1 << other
        for edge in path:
            del self._edge_at_sender[self._senders[edge]][self._colors[edge]]
            del self._edge_at_receiver[self._receivers[edge]][self._colors[edge]]
        for edge in path:
            self._set_color(edge, color + other - self._colors[edge])


def _get_lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _complete_permutation(
    size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
) -> Slot:
    """Complete a partial permutation; a node idle on both sides sends to itself, which is free."""
    receiver_of = np.full(size, -1, np.int32)
    receiver_of[senders] = receivers
    weight_of = np.zeros(size)
    weight_of[senders] = weights
    idle_sender = receiver_of < 0
    idle_receiver = np.ones(size, dtype=bool)
    idle_receiver[receivers] = False
    idle_both = idle_sender & idle_receiver
    receiver_of[idle_both] = np.flatnonzero(idle_both)
    receiver_of[idle_sender & ~idle_both] = np.flatnonzero(idle_receiver & ~idle_both)
    return _make_slot(receiver_of, weight_of)


def _make_slot(receivers: np.ndarray, weights: np.ndarray) -> Slot:
    receivers.setflags(write=False)
    weights.setflags(write=False)
    return Slot(receivers, weights)
