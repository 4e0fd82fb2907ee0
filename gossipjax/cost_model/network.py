"""How long messages take on the links between nodes."""

import dataclasses
import math

from gossipjax.cost_model._require import require_quantity


@dataclasses.dataclass(frozen=True)
class Network:
    """A switch to which each node has one link. Nodes that send to different nodes share nothing.

    Attributes:
      bandwidth: bytes/s of a node's link in each direction.
      latency: seconds from sending a message to the arrival of its first byte.
      host_copy: bytes/s at which a message is copied through the memory of the host, before it is
        sent. An infinite value means that nothing is copied.
      gossip_bandwidth: bytes/s of a message of gossip, if NCCL's send and receive reach less than
        its all-reduce does. None means `bandwidth`.
      name: the name of the network in tables.

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
        """Returns the seconds of a message of `size` bytes."""
        bandwidth = (self.gossip_bandwidth if is_gossip else None) or self.bandwidth
        return self.latency + size / bandwidth

    def copy_seconds(self, size: float) -> float:
        """Returns the seconds to copy `size` bytes through the memory of the host.

        >>> Network(1e9, host_copy=2e9).copy_seconds(1e9)
        0.5
        """
        return size / self.host_copy
