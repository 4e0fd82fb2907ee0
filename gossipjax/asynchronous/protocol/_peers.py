"""What a node knows of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gossipjax.asynchronous.protocol._messages import Identity, Message, View


@dataclasses.dataclass
class Peer:
    """Another life, while it is heard.

    Attributes:
      identity: who it is.
      heard: when it was last heard.
      view: the newest that it sent.
      sent: number of the newest parcel to it.
      parcel: the newest parcel to it, until it is acknowledged.
      parcel_time: when that was last sent.
      applied: number of the newest parcel from it.
      reply: what acknowledged that.
      query: the number that it must send back before its parcels count, after this node was
        stopped for a while; 0 is none.
      has_final: whether it was sent what this node holds at the end.
      waits: whether it has asked for half of what this node holds, and still has nothing.
    """

    identity: Identity
    heard: float
    view: View = dataclasses.field(default_factory=View)
    sent: int = 0
    parcel: Message | None = None
    parcel_time: float = 0.0
    applied: int = 0
    reply: Message | None = None
    query: int = 0
    has_final: bool = False
    waits: bool = False


def choose_exponential(peers: Sequence[Identity], own: Identity, step: int) -> Identity:
    """The peer of a step on the one-peer exponential graph over the living.

    Nodes stand in the order of their places. The hops are `1, 2, 4, ...` below their number N, one
    a step, in turn.
    """
    ring = sorted([*peers, own], key=lambda identity: (identity.place, identity.life))
    hops = max(1, (len(ring) - 1).bit_length())
    return ring[(ring.index(own) + 2 ** (step % hops)) % len(ring)]
