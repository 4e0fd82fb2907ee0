"""Networks: how long messages of nodes take. NumPy only."""

import dataclasses
import math

import numpy as np

from gossipjax.cost_model._require import require_quantity
from gossipjax.cost_model.fabrics import Fabric, Star

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

    Raises:
      ValueError: if a quantity is not a number, or out of its range.

    >>> network = Network(bandwidth=1e9, latency=1e-4)
    >>> network.message_seconds([1, 0], size=1e8).round(6).tolist()
    [0.1001, 0.1001]
    """

    bandwidth: float
    latency: float = 0.0
    fabric: Fabric = STAR
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
        if not hasattr(self.fabric, "find_costs"):
            raise ValueError(
                f"fabric of Network must be Star(), Torus(shape) or Islands(size, bandwidth), got "
                f"{self.fabric!r}."
            )

    def message_seconds(
        self, receivers: np.ndarray | list[int], size: float, is_gossip: bool = True
    ) -> np.ndarray:
        """Seconds `[N]` of messages of `size` bytes that are sent at once.

        Args:
          receivers: integers `[N]`: node `j` sends to `receivers[j]`; nothing where that is `j`.
          size: bytes of each message.
          is_gossip: whether it is one of gossip, not a part of an all-reduce.

        Raises:
          ValueError: if the receivers are no nodes, or the fabric is of another number of them.
        """
        targets = _read_receivers(receivers)
        bandwidth = (self.gossip_bandwidth if is_gossip else None) or self.bandwidth
        per_byte, latency = self.fabric.find_costs(targets, bandwidth, self.latency)
        return np.where(targets == np.arange(len(targets)), 0.0, latency + size * per_byte)

    def copy_seconds(self, size: float) -> float:
        """Seconds to copy `size` bytes through the memory of the host; 0 without copies.

        >>> Network(1e9, host_copy=2e9).copy_seconds(1e9)
        0.5
        """
        return size / self.host_copy

    def congestion(self, receivers: np.ndarray | list[int]) -> float:
        """How much longer the bytes of a permutation take than over one free link; 1 at least.

        >>> from gossipjax.cost_model import Torus
        >>> Network(1e9, fabric=Torus((8,))).congestion([3, 4, 5, 6, 7, 0, 1, 2])
        3.0
        """
        targets = _read_receivers(receivers)
        per_byte, _ = self.fabric.find_costs(targets, self.bandwidth, self.latency)
        is_sent = targets != np.arange(len(targets))
        return max(1.0, float((per_byte[is_sent] * self.bandwidth).max(initial=1.0)))


def _read_receivers(receivers: np.ndarray | list[int]) -> np.ndarray:
    targets = np.asarray(receivers)
    is_integer = targets.ndim == 1 and targets.size > 0 and targets.dtype.kind in "iu"
    if not is_integer or not 0 <= targets.min() <= targets.max() < len(targets):
        raise ValueError(
            f"receivers must be N integers from 0 to N - 1, got {receivers!r}. Give each node its "
            "receiver, or itself where it sends nothing."
        )
    return targets
