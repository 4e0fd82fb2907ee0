"""How long messages take on the links between nodes, and networks with published figures.

The latency of a published network is 0 if the source gives none.

>>> import gossipjax as gx
>>> from gossipjax import cost_model
>>> work = cost_model.Workload(parameters=25.6e6, compute_seconds=0.3)
>>> method = cost_model.from_transform(gx.sgp(gx.topology.one_peer_exponential(16)), "sgp")
>>> for name in ("sgp-ethernet", "sgp-infiniband"):
...     seconds = cost_model.predict_step(method, work, ALL[name], nodes=16).seconds
...     print(name, f"{seconds:.3f} s")
sgp-ethernet 0.487 s
sgp-infiniband 0.308 s
"""

import dataclasses
import math

__all__ = [
    "ALL",
    "GH200_SLINGSHOT",
    "MAX_NODES",
    "NVLINK_H100",
    "SGP_ETHERNET",
    "SGP_INFINIBAND",
    "SITES",
    "TPU_V5E_DCN",
    "remove_host_copies",
]


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

    def message_seconds(self, size: float, is_gossip: bool = True) -> float:
        """Returns the seconds of a message of `size` bytes, of gossip or of an all-reduce."""
        bandwidth = (self.gossip_bandwidth if is_gossip else None) or self.bandwidth
        return self.latency + size / bandwidth


SGP_ETHERNET = Network(
    bandwidth=1.0535e9, host_copy=1.145e9, name="10 Gbit/s Ethernet of SGP, fitted"
)
"""10 Gbit/s between servers of 8 V100, through host memory (Assran et al., 2018). No other network
is fitted: `experiments.report.published` fits it to the 16 seconds of their Table 2."""

SGP_INFINIBAND = Network(bandwidth=12.5e9, name="100 Gbit/s InfiniBand of SGP, nominal")
"""100 Gbit/s with GPUDirect, so without copies (Assran et al., 2019). The figure is nominal."""

NVLINK_H100 = Network(bandwidth=370e9, gossip_bandwidth=180e9, name="NVLink, 8 H100")
"""One server. `bandwidth` is the bus bandwidth of NCCL's ring all-reduce. NCCL's send and receive
reach 80 to 180 GB/s, of which `gossip_bandwidth` is the upper end. The line carries 450 GB/s."""

GH200_SLINGSHOT = Network(bandwidth=24.2e9, name="Slingshot, GH200")
"""Reached with `NCCL_NCHANNELS_PER_NET_PEER=4`; without it 18.3 GB/s (NCCL issue 1272)."""

TPU_V5E_DCN = Network(bandwidth=25e9, name="data centre network, hosts of 8 TPU v5e")
"""25 GB/s for each host of 8 chips. A node is a host."""

SITES = Network(bandwidth=3.4e6, latency=0.04, name="sites, 50 Mbit/s, 40 ms, 1 % loss")
"""Gloo sent 48.8 MB each way between two of our hosts in 14.3 s, over TCP with BBR.
docs/evidence/sites.md describes the measurement."""

ALL = {
    "sgp-ethernet": SGP_ETHERNET,
    "sgp-infiniband": SGP_INFINIBAND,
    "nvlink-h100": NVLINK_H100,
    "gh200-slingshot": GH200_SLINGSHOT,
    "tpu-v5e-dcn": TPU_V5E_DCN,
    "sites": SITES,
}
"""The networks by the name that command lines use."""

MAX_NODES = {"nvlink-h100": 8}
"""The largest number of nodes of a network, by its name."""


def remove_host_copies(network: Network) -> Network:
    """Returns the same network without copies through the memory of hosts.

    >>> remove_host_copies(SGP_ETHERNET).host_copy
    inf
    """
    return dataclasses.replace(network, host_copy=math.inf)
