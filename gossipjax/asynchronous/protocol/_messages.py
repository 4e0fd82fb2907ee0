"""What nodes tell each other, before it is bytes."""

from __future__ import annotations

from typing import NamedTuple

from gossipjax.asynchronous.protocol._mass import Mass


class Identity(NamedTuple):
    """One life of a node. They are ordered by age: an older one is smaller.

    Attributes:
      born: when it joined, in seconds since 1970.
      life: a name that no other life has.
      place: the node's number in its job, the same in all its lives.
      address: where it listens, `host:port`.
    """

    born: float
    life: str
    place: int
    address: str


class View(NamedTuple):
    """What a node knows of the job, and of itself.

    Attributes:
      members: the nodes that it hears.
      deaths: pairs of a node and the life that it has declared dead.
      steps: life -> its local steps, as far as they are known; the dead ones included.
      wants_mass: whether the sender has none.
      begs: whether it asks for half of the receiver's.
      is_ready: whether the sender is ready to begin.
      is_finished: whether the sender makes no more steps and sends no more shares.
      is_drained: whether nothing that it sent is on its way, either.
      query: a number to be sent back as `echo`; 0 is none.
      echo: that of the receiver's newest query.
    """

    members: tuple[Identity, ...] = ()
    deaths: tuple[tuple[Identity, str], ...] = ()
    steps: tuple[tuple[str, int], ...] = ()
    wants_mass: bool = False
    begs: bool = False
    is_ready: bool = False
    is_finished: bool = False
    is_drained: bool = False
    query: int = 0
    echo: int = 0


class Message(NamedTuple):
    """A message from one life to another.

    `view` says that the sender lives. `share`, `ask`, `final` and `bye` are parcels: numbered for
    each pair of lives, sent again until they are acknowledged, and acted upon once. An `answer`
    acknowledges an `ask`, an `ack` the others. `dead` says that the receiver was declared dead.

    Attributes:
      kind: one of `KINDS`.
      sender: the life that sends.
      receiver: the life that it is for; None is whichever listens at the address.
      number: of a parcel, from 1 on, or of the parcel that is acknowledged.
      mass: of `share`, the share; of `ask`, `answer` and `final`, a copy of what the sender holds.
        None in an `answer` declines.
      view: of `view`.
      applied: of `bye`, the number of the newest parcel that the sender applied.
      steps: the local steps that the sender has made in this life.
      is_narrow: whether the values of the mass are exact in the job's type of the wire.
    """

    kind: str
    sender: Identity
    receiver: str | None
    number: int = 0
    mass: Mass | None = None
    view: View | None = None
    applied: int = 0
    steps: int = 0
    is_narrow: bool = False


PARCELS = ("share", "ask", "final", "bye")
KINDS = ("view", "ack", "answer", "dead", *PARCELS)
