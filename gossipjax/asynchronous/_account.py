"""The account of the weight of a job, from what its nodes wrote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gossipjax.asynchronous._journal import Line, read_journal

Parcel = tuple[str, str, int]  # sender, receiver, number


class Account(NamedTuple):
    """Where the push-sum weight of a job is; one founder brought 1.

    Attributes:
      founded: what founders brought.
      living: place -> what the last life of that place holds.
      in_flight: what was sent, and has neither arrived nor been taken back. What a dead life had
        sent, and nobody takes any more, stays here.
      dead: what earlier lives held at their end, less what they had applied although its sender
        took it back, since the acknowledgement was lost.
    """

    founded: float
    living: dict[int, float]
    in_flight: float
    dead: float

    @property
    def difference(self) -> float:
        """What is missing (negative) or too much: 0 up to rounding."""
        return sum(self.living.values()) + self.in_flight + self.dead - self.founded


def account(journals: Iterable[Path]) -> Account:
    """Adds up the weight of a job over what living nodes hold, what is on its way, and the dead.

    `sum living + in flight + dead = founded`, whatever was lost, killed or doubled.

    Args:
      journals: the files that the nodes wrote, one for each place.

    Raises:
      ValueError: if a journal cannot be read, or a parcel was received that nobody sent, or twice.

    >>> account([]).difference
    0.0
    """
    held: dict[str, float] = defaultdict(float)
    places: dict[str, int] = {}
    last: dict[int, str] = {}
    sent: dict[Parcel, float] = {}
    received: dict[Parcel, float] = {}
    returned: dict[Parcel, float] = {}
    averaged: dict[Parcel, float] = {}  # what answerers gained
    settled = 0.0  # what askers gained
    founded = 0.0
    for line in (line for path in journals for line in read_journal(path)):
        life = line["life"]
        if line["event"] == "life":
            places[life] = line["place"]
            last[line["place"]] = life
            continue
        weight = line.get("w", 0.0)
        peer = line["peer"]
        number = line["number"]
        outgoing = (life, peer, number)
        incoming = (peer, life, number)
        match line["event"]:
            case "found":
                founded += 1
                held[life] += 1
            case "share" | "grant" | "hand over":
                sent[outgoing] = weight
                held[life] -= weight
            case "receive":
                require_new(incoming, received, line)
                received[incoming] = weight
                held[life] += weight
            case "return":
                returned[outgoing] = weight
                held[life] += weight
            case "average":
                require_new(incoming, averaged, line)
                averaged[incoming] = weight
                held[life] += weight
            case "averaged":
                settled += weight
                held[life] += weight
            case "give up":
                held[life] -= weight
                held[f"the dead {life}"] += weight
            case "revive":
                held[life] += weight
                held["the dead"] -= weight
    if missing := received.keys() - sent.keys():
        sender, receiver, number = next(iter(missing))
        raise ValueError(
            f"the journals must have what life {sender} sent as number {number} to {receiver}, got "
            "none: give those of all nodes, whole."
        )
    doubled = sum(weight for parcel, weight in received.items() if parcel in returned)
    arrived = received.keys() | returned.keys()
    in_flight = sum(weight for parcel, weight in sent.items() if parcel not in arrived)
    living = {place: held.pop(life, 0.0) for place, life in sorted(last.items())}
    return Account(
        founded, living, in_flight - sum(averaged.values()) - settled, sum(held.values()) - doubled
    )


def require_new(parcel: Parcel, known: dict[Parcel, float], line: Line) -> None:
    """Raises `ValueError` if a parcel was acted upon before."""
    if parcel in known:
        raise ValueError(
            f"a parcel must be received once, got number {line['number']} of {line['peer']} twice "
            f"in life {line['life']}."
        )
