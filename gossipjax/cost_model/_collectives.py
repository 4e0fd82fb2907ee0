"""All-reduces and the parameter server: seconds and bytes. NumPy only."""

import math

import numpy as np

from gossipjax.cost_model.fabrics import Islands
from gossipjax.cost_model.network import Network

KINDS = ("ring", "tree", "two-level", "server")


def find_collective_seconds(kind: str, size: float, network: Network, nodes: int) -> float:
    """Seconds in which n nodes average a buffer of S bytes, one copy through the host included.

    - ring: `2 (n - 1)` messages of `S / n` to the next node;
    - tree: `2 ceil(log2 n)` messages of S, up to the root, node 0, and down again; at a level only
      the nodes of that level send;
    - two-level: as ring, inside the islands, and then among islands with the part of each node;
    - server: node 0 receives `n - 1` messages, then sends as many, over one link.
    """
    if nodes == 1:
        return 0.0
    copy = network.copy_seconds(size)
    if kind == "ring":
        return copy + 2 * (nodes - 1) * _shift(network, nodes, size / nodes)
    if kind == "tree":
        levels = range(math.ceil(math.log2(nodes)))
        return copy + sum(_climb(network, nodes, size, 2**level) for level in levels)
    if kind == "two-level":
        inside, islands = _split(network, nodes)
        seconds = (
            2 * (islands - 1) * (network.latency + size / (inside * islands) / network.bandwidth)
        )
        fabric = network.fabric
        assert isinstance(fabric, Islands)
        seconds += 2 * (inside - 1) * (fabric.latency + size / inside / fabric.bandwidth)
        return copy + seconds
    return copy + 2 * (network.latency + (nodes - 1) * size / network.bandwidth)


def count_sent_bytes(kind: str, size: float, network: Network, nodes: int) -> float:
    """Bytes that the node that sends most sends, in these all-reduces.

    >>> count_sent_bytes("ring", 100.0, Network(1.0), nodes=4)
    150.0
    """
    if kind == "ring":
        return 2 * (nodes - 1) / nodes * size
    if kind == "tree":  # the root sends down at every level
        return math.ceil(math.log2(nodes)) * size
    if kind == "two-level":
        inside, islands = _split(network, nodes)
        return 2 * size * ((inside - 1) / inside + (islands - 1) / islands / inside)
    return (nodes - 1) * size


def _shift(network: Network, nodes: int, size: float) -> float:
    """Seconds of a message from every node to the next."""
    return float(
        network.message_seconds((np.arange(nodes) + 1) % nodes, size, is_gossip=False).max()
    )


def _climb(network: Network, nodes: int, size: float, hop: int) -> float:
    """Seconds up a level of the tree and down again: odd multiples of `hop`, and those below."""
    children = np.arange(hop, nodes, 2 * hop)
    up = np.arange(nodes)
    up[children] -= hop
    down = np.arange(nodes)
    down[children - hop] += hop
    return sum(
        float(network.message_seconds(receivers, size, is_gossip=False).max())
        for receivers in (up, down)
    )


def _split(network: Network, nodes: int) -> tuple[int, int]:
    """Nodes of an island, and islands."""
    if not isinstance(network.fabric, Islands):
        raise ValueError(
            f'fabric of the network must be Islands for kind="two-level", got {network.fabric!r}. '
            'Use kind="ring" or "tree", or give the network Islands(size, bandwidth).'
        )
    islands = network.fabric.count(nodes)
    return nodes // islands, islands
