"""Networks: how long messages take on the links of nodes. NumPy only."""

import dataclasses
import math

from gossipjax.cost_model._require import require_quantity


@dataclasses.dataclass(frozen=True)
class Network:
    """A switch that joins all nodes, each by one link. No permutation causes congestion.

    Attributes:
      bandwidth: bytes/s of a node's link, one way. Links are full duplex.
      latency: seconds from sending a message to its first byte.
      host_copy: bytes/s at which what is sent is first copied through the memory of the host. The
        copy and the wire do not overlap. Infinite: there is no copy.
      gossip_bandwidth: bytes/s of a message of gossip, where it gets less of a link than an
        all-reduce does, as a send and a receive of NCCL; None: `bandwidth`.
      name: for tables.

    >>> network = Network(bandwidth=1e9, latency=1e-4)
    >>> round(network.message_seconds(1e8), 6)
    0.1001
    """

    bandwidth: float
    latency: float = 0.0
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

    def message_seconds(self, size: float, is_gossip: bool = True) -> float:
        """Seconds of a message of `size` bytes, of gossip or a part of an all-reduce."""
        bandwidth = (self.gossip_bandwidth if is_gossip else None) or self.bandwidth
        return self.latency + size / bandwidth

    def copy_seconds(self, size: float) -> float:
        """Seconds to copy `size` bytes through the memory of the host; 0 without copies.

        >>> Network(1e9, host_copy=2e9).copy_seconds(1e9)
        0.5
        """
        return size / self.host_copy
