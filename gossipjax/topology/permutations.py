"""Divides messages into permutations, each of which is one collective-permute. NumPy only.

`color_edges` divides the edges of a round into permutations of nodes. `plan_block_exchange` divides
a permutation of nodes into permutations of devices that hold several nodes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Slot(NamedTuple):
    """One message per node: node `j` sends `weights[j]` times its buffer to `receivers[j]`.

    `receivers` `[N]` is a full permutation, as `vmap` needs it. If the graph has fewer edges, other
    edges complete the permutation: their `weights` `[N]` are 0, a mesh leaves them out, and the
    receiver must discard what they deliver.
    """

    receivers: np.ndarray
    weights: np.ndarray


def color_edges(
    size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
) -> tuple[Slot, ...]:
    """Colours the edges `[E]` of a digraph so that each colour is a permutation (König's theorem).

    If every node has an edge of the same hop (receiver - sender) modulo N, these edges already are
    a permutation, so a circulant graph gets one hop per slot. The remaining edges are coloured one
    by one. There are as many slots as the largest in- or out-degree.
    """
    hops = (receivers - senders) % size
    order = np.lexsort((senders, hops))
    is_full = (np.bincount(hops, minlength=size) == size)[hops[order]]
    shifts = order[is_full].reshape(-1, size)  # by hop and sender
    slots = [Slot(freeze(receivers[edges]), freeze(weights[edges])) for edges in shifts]
    others = order[~is_full]
    colors = color_multigraph(size, receivers[others], senders[others])
    for color in range(colors.max(initial=-1) + 1):
        edges = others[colors == color]
        slots.append(_complete_permutation(size, receivers[edges], senders[edges], weights[edges]))
    return tuple(slots)


def color_multigraph(size: int, receivers: np.ndarray, senders: np.ndarray) -> np.ndarray:
    """Returns the colours of edges, `[E]`; two nodes may be joined by several edges.

    No node sends or receives two edges of one colour. There are as many colours as the largest in-
    or out-degree: if the two ends of an edge have no free colour in common, two colours are swapped
    along an alternating path.
    """
    degree = max(np.bincount(end, minlength=size).max() for end in (senders, receivers))
    # A bipartite graph: senders are 0, ..., N - 1, receivers are N, ..., 2 N - 1.
    ends = list(zip(senders.tolist(), (size + receivers).tolist(), strict=True))
    free = [(1 << int(degree)) - 1] * (2 * size)  # the free colours of each node, as bits
    edge_at: list[dict[int, int]] = [{} for _ in range(2 * size)]  # by node and colour
    colors = np.zeros(len(ends), dtype=int)
    for edge, (sender, receiver) in enumerate(ends):
        common = free[sender] & free[receiver]  # if there is any, `color` equals `other`
        color = _get_lowest_bit(common or free[sender])
        other = _get_lowest_bit(common or free[receiver])
        free[sender] ^= 1 << color
        free[receiver] ^= 1 << other
        edge_at[sender][color] = edge
        # The edge takes `color`, which is free at its sender. If another edge has `color` at the
        # receiver, that edge changes to `other`. At its own sender a third edge may have `other`
        # and changes to `color`, and so on along a path. The path never reaches `sender`: it
        # reaches senders by edges of `color`, and `sender` had none.
        node = receiver
        moved = edge
        while (displaced := edge_at[node].get(color)) is not None:
            edge_at[node][color] = moved
            colors[moved] = color
            edge_at[node][other] = displaced
            node = sum(ends[displaced]) - node  # the other end of the displaced edge
            moved = displaced
            color, other = other, color
        edge_at[node][color] = moved
        colors[moved] = color
        if moved != edge:  # the path ends: one colour has replaced another
            del edge_at[node][other]
            free[node] ^= 1 << color | 1 << other
    return colors


def _get_lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _complete_permutation(
    size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
) -> Slot:
    """Adds edges of weight 0 until each node sends and receives; an idle node sends to itself."""
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
    return Slot(freeze(receiver_of), freeze(weight_of))


def freeze(array: np.ndarray) -> np.ndarray:
    """Makes an array read-only, and returns it."""
    array.setflags(write=False)
    return array


class Transfer(NamedTuple):
    """One permutation of devices: each sends m rows of its block to at most one other device."""

    pairs: tuple[tuple[int, int], ...]  # each is (sender, receiver)
    rows: np.ndarray  # [D, m], the rows that each device sends


class BlockExchange(NamedTuple):
    """What D devices, with k = N / D nodes each, copy and send for one permutation of N nodes."""

    transfers: tuple[Transfer, ...]
    # [D, k]: where each row of the result is, in the device's block followed by all received rows.
    sources: np.ndarray
    arrives: np.ndarray  # [D, k]: False if no node sends to this node


def plan_block_exchange(
    receivers: np.ndarray, senders: np.ndarray, size: int, devices: int
) -> BlockExchange:
    """Divides a (partial) permutation of nodes into at most k = N / D permutations of devices.

    `receivers` and `senders` `[E]` are the ends of the edges. Node `i` is row `i % k` of device
    `i // k`. An edge inside a device becomes a copy. All rows that devices send by the same hop
    become one transfer. So a shift of all nodes takes two transfers, and a shift by 1 takes one
    transfer of a single row. The remaining edges are coloured (König's theorem).

    >>> shift = plan_block_exchange(np.array([1, 2, 3, 0]), np.arange(4), size=4, devices=2)
    >>> [(transfer.pairs, transfer.rows.tolist()) for transfer in shift.transfers]
    [(((0, 1), (1, 0)), [[1], [1]])]
    >>> shift.sources.tolist()
    [[2, 0], [2, 0]]
    """
    per_device = size // devices  # k
    order = np.argsort(senders)
    sending_device, sent_row = np.divmod(senders[order], per_device)
    receiving_device, received_row = np.divmod(receivers[order], per_device)
    sources = np.tile(np.arange(per_device), (devices, 1))
    arrives = np.zeros((devices, per_device), bool)
    arrives[receiving_device, received_row] = True
    stays = sending_device == receiving_device
    sources[receiving_device[stays], received_row[stays]] = sent_row[stays]
    transfers = []
    end = per_device  # how many rows a device has so far: its block, then those of each transfer
    for edges in _group_edges(devices, receiving_device, sending_device):
        sent_rows = np.zeros((devices, edges.shape[1]), int)
        sent_rows[sending_device[edges[:, 0]]] = sent_row[edges]
        start = end
        end += edges.shape[1]
        sources[receiving_device[edges], received_row[edges]] = np.arange(start, end)
        ends = sending_device[edges[:, 0]].tolist(), receiving_device[edges[:, 0]].tolist()
        transfers.append(Transfer(tuple(zip(*ends, strict=True)), sent_rows))
    return BlockExchange(tuple(transfers), sources, arrives)


def _group_edges(devices: int, receivers: np.ndarray, senders: np.ndarray) -> Iterator[np.ndarray]:
    """Divides edges between devices into transfers; yields the indices of the edges, `[pairs, m]`.

    Edges are sorted by sender. If every device sends at least m rows by the same hop, m rows of
    each device are one transfer. Remaining edges are coloured: a colour is a transfer of one row.
    """
    hops = (receivers - senders) % devices
    others = []
    for hop in np.unique(hops[hops > 0]):
        edges = np.flatnonzero(hops == hop)
        starts = np.searchsorted(senders[edges], np.arange(devices + 1))
        fewest = np.diff(starts).min()  # m, the rows that every device sends by this hop
        number_at_sender = np.arange(len(edges)) - starts[senders[edges]]
        if fewest:
            yield edges[number_at_sender < fewest].reshape(devices, fewest)
        others.append(edges[number_at_sender >= fewest])
    remaining = np.concatenate([np.zeros(0, int), *others])
    colors = color_multigraph(devices, receivers[remaining], senders[remaining])
    for color in range(colors.max(initial=-1) + 1):
        yield remaining[colors == color][:, None]
