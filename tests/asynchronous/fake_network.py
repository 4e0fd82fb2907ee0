"""A network, clock and processes for the protocol, all of them fake, and the account of mass.

Simulated: no socket, no thread and no time passes. Masses are fractions, so the account is exact.
"""

import dataclasses
import itertools
from fractions import Fraction

from gossipjax.asynchronous._messages import Identity, Mass
from gossipjax.asynchronous._model import Holding
from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._settings import Settings
from gossipjax.asynchronous.algorithms import choose_exponential, sgp

PATIENCE = 10.0
NOTHING = Mass((Fraction(0),), Fraction(0))


def make_address(place):
    return f"localhost:{1 + place}"


def find_place(address):
    return int(address.removeprefix("localhost:")) - 1


@dataclasses.dataclass
class Holder(Holding):
    mass: Mass = NOTHING

    def read(self):
        return self.mass

    def add(self, mass):
        self.mass = self.mass + mass

    @property
    def total(self):
        return self.mass

    def halve(self):
        self.mass = self.mass / 2
        return self.mass

    def take(self):
        mass, self.mass = self.mass, NOTHING
        return mass


class Account:
    """The masses that are not held by a living node, from the events of all nodes.

    Attributes:
      elsewhere: what is on its way or was held by the dead; what was counted twice is negative.
      brought: by founders and steps.
    """

    def __init__(self):
        self.parcels = {}  # (sender, receiver, number) -> mass
        self.received = {}
        self.returned = {}
        self.changes = {}  # (asker, answerer, number) -> what the answerer gained
        self.settled = {}
        self.elsewhere = NOTHING
        self.brought = NOTHING

    def add(self, kind, sent, arrived, mass):
        """Adds an event of a node; `sent` and `arrived` name a parcel from it, and to it."""
        if kind == "found":
            self.brought += mass or NOTHING  # what a founder was started with is added there
        elif kind in ("share", "grant", "hand over", "give up"):
            self.elsewhere += mass
        elif kind in ("receive", "return", "average", "averaged", "undo", "revive"):
            self.elsewhere -= mass
        key = arrived if kind in ("receive", "average", "undo") else sent
        known = {
            **dict.fromkeys(("share", "grant", "hand over"), self.parcels),
            **{"receive": self.received, "return": self.returned},
            **{"average": self.changes, "averaged": self.settled},
        }.get(kind)
        if known is not None:
            assert key not in known
            known[key] = mass
        if kind in ("receive", "return"):
            assert self.parcels[key] == mass
        elif kind in ("averaged", "undo"):
            assert self.changes[key] == -mass
        if kind == "undo":
            del self.changes[key]


class Process:
    """One node's process: killed and started again, it is another life at the same address."""

    def __init__(self, network, place, founder):
        self.network = network
        self.place = place
        self.address = make_address(place)
        self.step = 0
        self.start(founder)

    def start(self, founder):
        self.is_running = True
        self.is_stopped = False
        self.holder = Holder()
        mass = Mass((Fraction(self.place + 1),), Fraction(1))
        if founder:
            self.holder.add(mass)
            self.network.account.brought += mass
        settings = Settings(
            algorithm=sgp(),
            contacts=tuple(make_address(place) for place in range(self.network.size)),
            num_nodes=self.network.size,
            place=self.place,
            patience=PATIENCE,
            max_received=self.network.max_received,
            is_founder=founder,
        )
        self.node = Participant(settings, self.holder, self.new_life, self.record, self.network.now)
        if founder is None:
            self.node.founding.bring(mass)

    def new_life(self):
        number = next(self.network.lives)
        return Identity(self.place, f"life{number}", self.address)

    def record(self, kind, life, number, mass=None, part=1.0):
        own = self.node.life if hasattr(self, "node") else None
        self.network.account.add(kind, (own, life, number), (life, own, number), mass)

    def kill(self):
        self.network.account.elsewhere += self.holder.mass
        self.is_running = False

    def make_step(self, algorithm):
        """A local step, and what its algorithm sends."""
        node = self.node
        if not node.may_change:
            return
        update = Fraction(self.place - 2, 8)
        self.holder.mass = self.holder.mass + Mass((update,), Fraction(0))
        self.network.account.brought += Mass((update,), Fraction(0))
        node.members.count_step()
        self.step += 1
        peer = node.choose(choose_exponential, self.step)
        if peer is None or not node.may_send(peer, is_share=algorithm != "adpsgd"):
            return
        if algorithm == "adpsgd":
            node.ask(peer, self.network.now)
        else:
            node.share(peer, self.holder.halve(), self.network.now)


class Network:
    """Processes, and the messages between them, which arrive in any order, twice or never."""

    def __init__(self, size, founders=None, max_received=16):
        self.size = size
        self.max_received = max_received
        self.now = 0.0
        self.lives = itertools.count()
        self.account = Account()
        self.messages = []
        self.cut = set()  # pairs of places whose messages are lost
        self.narrow = set()  # (from, to), where messages with a mass are lost
        founders = size if founders is None else founders
        self.processes = [Process(self, place, place < founders) for place in range(size)]

    def collect(self):
        for process in self.processes:
            if process.is_running:
                for address, message in process.node.post.outbox:
                    path = process.place, find_place(address)
                    is_lost = message.mass is not None and path in self.narrow
                    if not (is_lost or frozenset(path) in self.cut):
                        self.messages.append((address, message))
            process.node.post.outbox.clear()

    def deliver(self, index, keep=False):
        if not self.messages:
            return
        index %= len(self.messages)
        address, message = self.messages[index]
        process = self.processes[find_place(address)]
        if process.is_stopped:
            return
        if not keep:
            del self.messages[index]
        if process.is_running:
            process.node.receive(message, self.now)
            self.collect()

    def advance(self, seconds):
        self.now += seconds
        for process in self.processes:
            if process.is_running and not process.is_stopped:
                process.node.tick(self.now)
        self.collect()

    def check(self):
        held = NOTHING
        for process in self.processes:
            if process.is_running:
                held = held + process.holder.mass
                assert process.holder.mass.w >= 0
        assert held + self.account.elsewhere == self.account.brought
