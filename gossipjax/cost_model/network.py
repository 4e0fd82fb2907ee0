"""Networks: how the links of N nodes are joined, and how long messages take. NumPy only."""

import dataclasses
import math

import numpy as np

from gossipjax.cost_model._require import require_quantity
from gossipjax.topology.schedule import require_int


@dataclasses.dataclass(frozen=True)
class Star:
    """A switch that joins all nodes, each by one link: no permutation has congestion.

    >>> Star().find_costs(np.array([1, 2, 0]), bandwidth=2.0, latency=0.1)[0].tolist()
    [0.5, 0.5, 0.5]
    """

    def find_costs(
        self, receivers: np.ndarray, bandwidth: float, latency: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per byte `[N]`, and before the first byte `[N]`, of messages sent at once.

        Args:
          receivers: integers `[N]`: node `j` sends a message to `receivers[j]`; to itself: none.
          bandwidth: bytes/s of a link, one way.
          latency: seconds of a link.
        """
        ones = np.ones(len(receivers))
        return ones / bandwidth, ones * latency


@dataclasses.dataclass(frozen=True)
class Torus:
    """A torus: links to neighbours in every dimension, as ICI of TPUs.

    A message is routed along the first dimension, then the second, the shorter way round (forward,
    if both are equally long). It shares the links of its route with other messages: it takes
    `size load / bandwidth + distance latency`, where `load` is the number of messages on the
    busiest link of its route. A shift by h along a dimension has distance and load h.

    Attributes:
      shape: nodes along each dimension; node `i` is at `numpy.unravel_index(i, shape)`.

    >>> Torus((8,)).find_costs((np.arange(8) + 2) % 8, bandwidth=1.0, latency=0.0)[0].max().item()
    2.0
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for extent in self.shape:
            require_int(extent, "an extent in shape of Torus", 1)

    def find_costs(
        self, receivers: np.ndarray, bandwidth: float, latency: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """As of `Star`, by distance and the busiest link of each route."""
        nodes = len(receivers)
        if nodes != math.prod(self.shape):
            raise ValueError(
                f"nodes must be {math.prod(self.shape)} on Torus({self.shape}), got {nodes}. "
                "Choose a shape whose product is the number of nodes."
            )
        routes = self._list_links(receivers)
        messages = np.concatenate([message for message, _ in routes] or [np.zeros(0, int)])
        links = np.concatenate([link for _, link in routes] or [np.zeros(0, int)])
        loads = np.bincount(links, minlength=1)
        worst = np.ones(nodes)
        np.maximum.at(worst, messages, loads[links])
        return worst / bandwidth, latency * np.bincount(messages, minlength=nodes)

    def _list_links(self, receivers: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Messages (by sender) and the links that they take, hop by hop."""
        at = np.array(np.unravel_index(np.arange(len(receivers)), self.shape))
        ends = np.array(np.unravel_index(receivers, self.shape))
        hops = []
        for axis, extent in enumerate(self.shape):
            forward = (ends[axis] - at[axis]) % extent
            is_forward = forward <= extent - forward
            distance = np.where(is_forward, forward, extent - forward)
            for hop in range(int(distance.max(initial=0))):
                moving = np.flatnonzero(distance > hop)
                place = np.ravel_multi_index(tuple(at[:, moving]), self.shape)
                hops.append((moving, 2 * (place * len(self.shape) + axis) + is_forward[moving]))
                step = np.where(is_forward[moving], 1, -1)
                at[axis, moving] = (at[axis, moving] + step) % extent
        return hops


STAR = Star()


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of nodes: a message of S bytes takes `latency + S / bandwidth` seconds, alone.

    Attributes:
      bandwidth: bytes/s of a node's link, one way. Links are full duplex.
      latency: seconds from sending a message to its first byte.
      fabric: how the links are joined.
      host_copy: bytes/s at which what is sent is first copied through the memory of the host. The
        copy and the wire do not overlap. Infinite: there is no copy.
      gossip_bandwidth: bytes/s of a message of gossip, where it gets less of a link than an
        all-reduce does, as a send and a receive of NCCL; None: `bandwidth`.
      name: for tables.

    >>> network = Network(bandwidth=1e9, latency=1e-4)
    >>> network.message_seconds([1, 0], size=1e8).round(6).tolist()
    [0.1001, 0.1001]
    """

    bandwidth: float
    latency: float = 0.0
    fabric: Star | Torus = STAR
    host_copy: float = math.inf
    gossip_bandwidth: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        require_quantity(self.bandwidth, "bandwidth of Network", "bytes/s")
        require_quantity(self.latency, "latency of Network", "seconds", is_zero_allowed=True)
        if self.host_copy != math.inf:
            require_quantity(self.host_copy, "host_copy of Network", "bytes/s (or math.inf)")
        if self.gossip_bandwidth is not None:
            require_quantity(self.gossip_bandwidth, "gossip_bandwidth of Network", "bytes/s")

    def message_seconds(
        self, receivers: np.ndarray | list[int], size: float, is_gossip: bool = True
    ) -> np.ndarray:
        """Seconds `[N]` of messages of `size` bytes that are sent at once.

        Args:
          receivers: integers `[N]`: node `j` sends to `receivers[j]`; nothing where that is `j`.
          size: bytes of each message.
          is_gossip: whether it is one of gossip, not a part of an all-reduce.
        """
        targets = np.asarray(receivers)
        bandwidth = (self.gossip_bandwidth if is_gossip else None) or self.bandwidth
        per_byte, latency = self.fabric.find_costs(targets, bandwidth, self.latency)
        return np.where(targets == np.arange(len(targets)), 0.0, latency + size * per_byte)

    def copy_seconds(self, size: float) -> float:
        """Seconds to copy `size` bytes through the memory of the host; 0 without copies.

        >>> Network(1e9, host_copy=2e9).copy_seconds(1e9)
        0.5
        """
        return size / self.host_copy
