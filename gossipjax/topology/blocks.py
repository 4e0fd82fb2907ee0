"""A permutation of N nodes as messages between D devices that hold N / D nodes each. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gossipjax.topology._edge_coloring import color_multigraph


class Transfer(NamedTuple):
    """One permutation of devices: each sends m rows of its block to at most one other.

    `pairs` are (sender, receiver). `rows` `[D, m]` are the rows that each device sends.
    """

    pairs: tuple[tuple[int, int], ...]
    rows: np.ndarray


class BlockExchange(NamedTuple):
    """What devices of k = N / D nodes do for one permutation of N nodes.

    `sources` `[D, k]` says where each row of the result is, in the device's block followed by the
    rows of all transfers; `arrives` `[D, k]` is False where no node sends to this one.
    """

    transfers: tuple[Transfer, ...]
    sources: np.ndarray
    arrives: np.ndarray


def plan_block_exchange(
    receivers: np.ndarray, senders: np.ndarray, size: int, devices: int
) -> BlockExchange:
    """Plans a (partial) permutation of nodes as at most k = N / D permutations of devices.

    Node `i` is row `i % k` of device `i // k`. Edges inside a device are copies. What all devices
    send by one hop is a single transfer, so that a shift of all nodes takes two, and a shift by
    one takes one, of one row; the remaining edges are coloured (König's theorem).

    Args:
      receivers: `[E]`, by edge, each at most once.
      senders: `[E]`, by edge, each at most once.
      size: N, a multiple of D.
      devices: D.

    >>> shift = plan_block_exchange(np.array([1, 2, 3, 0]), np.arange(4), size=4, devices=2)
    >>> [(transfer.pairs, transfer.rows.tolist()) for transfer in shift.transfers]
    [(((0, 1), (1, 0)), [[1], [1]])]
    >>> shift.sources.tolist()
    [[2, 0], [2, 0]]
    """
    rows = size // devices
    order = np.argsort(senders)
    sending_device, sent_row = np.divmod(senders[order], rows)
    receiving_device, received_row = np.divmod(receivers[order], rows)
    sources = np.tile(np.arange(rows), (devices, 1))
    arrives = np.zeros((devices, rows), bool)
    arrives[receiving_device, received_row] = True
    stays = sending_device == receiving_device
    sources[receiving_device[stays], received_row[stays]] = sent_row[stays]
    transfers = []
    end = rows
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
    """The numbers of edges between devices, `[pairs, m]` for each transfer; senders are sorted."""
    hops = (receivers - senders) % devices
    others = []
    for hop in np.unique(hops[hops > 0]):
        edges = np.flatnonzero(hops == hop)
        starts = np.searchsorted(senders[edges], np.arange(devices + 1))
        in_common = np.diff(starts).min()
        numbers = np.arange(len(edges)) - starts[senders[edges]]  # among those of the sender
        if in_common:
            yield edges[numbers < in_common].reshape(devices, in_common)
        others.append(edges[numbers >= in_common])
    remaining = np.concatenate([np.zeros(0, int), *others])
    colors = color_multigraph(devices, receivers[remaining], senders[remaining])
    for color in range(colors.max(initial=-1) + 1):
        yield remaining[colors == color][:, None]
