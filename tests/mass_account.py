"""The account of mass over the journals of asynchronous nodes.

It shares no code with `gossipjax.asynchronous`: it reads the lines of the journals.
"""

import json
from typing import NamedTuple

LOST = ("share", "grant", "hand over")  # sent, and so taken out of what the sender holds
GAINED = ("receive", "return", "average", "averaged", "revive")


class Account(NamedTuple):
    """Where the weight of a job is.

    Attributes:
      founders: the number of founders, each of which brought a weight of 1.
      living: place -> what its last process holds at the end.
      dead: what earlier processes held when they died, and what lives have given up; less what
        they had applied and its sender took back, since they died before they acknowledged it.
      in_flight: shares that were neither applied nor taken back, and halves of averages.
    """

    founders: int
    living: dict[int, float]
    dead: float
    in_flight: float

    @property
    def total(self):
        return sum(self.living.values()) + self.dead + self.in_flight


def account_of_mass(journals):
    """Returns the account; fails if a living node has something that another has, too."""
    founders = 0
    living, sent, received, returned, averages = {}, {}, {}, {}, {}
    last_lives = set()
    dead = 0.0
    for path in journals:
        process = place = life = None
        held = 0.0
        for line in map(json.loads, path.read_text().splitlines()):
            event, own, peer = line["event"], line["life"], line.get("peer")
            if event == "life":
                if line["process"] != process:
                    dead += held
                    held = 0.0
                process, place, life = line["process"], line["place"], own
                continue
            number, w = line["number"], line.get("w", 0.0) * 2.0 ** line.get("exponent", 0)
            if event == "found":
                founders += 1
                held += 1
            elif event in LOST:
                assert (own, peer, number) not in sent, line
                sent[own, peer, number] = w
                held -= w
            elif event in GAINED:
                held += w
            elif event == "give up":
                held -= w
                dead += w
            if event == "revive":
                dead -= w
            elif event == "receive":
                assert (peer, own, number) not in received, line
                received[peer, own, number] = w
            elif event == "return":
                assert (own, peer, number) not in returned, line
                returned[own, peer, number] = w
            elif event == "average":
                averages.setdefault((peer, own, number), []).append(w)
            elif event == "averaged":
                averages.setdefault((own, peer, number), []).append(w)
        assert place is not None, path
        living[place] = held
        last_lives.add(life)
    for key, w in [*received.items(), *returned.items()]:
        assert sent[key] == w, key
    for key in received.keys() & returned.keys():
        assert key[1] not in last_lives, key
        dead -= sent[key]
    in_flight = sum(w for key, w in sent.items() if key not in received and key not in returned)
    for key, changes in averages.items():
        assert len(changes) <= 2, key
        assert len(changes) == 1 or sum(changes) == 0, key
    halves = -sum(sum(changes) for changes in averages.values())
    return Account(founders, living, dead, in_flight + halves)
