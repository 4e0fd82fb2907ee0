"""Says which nodes live: those that a node hears, and what nodes tell of others.

The code here and in `_post.py`, `_founding.py`, `_ending.py` and `_participant.py` uses no sockets,
clocks or threads: the caller passes in messages and the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from gossipjax.asynchronous._messages import Identity, Message, View
from gossipjax.asynchronous._settings import Settings

BEATS = 10  # messages "I live" during the time after which a node is declared dead
EARLY_BEATS = 50  # the same while nodes meet
# In units of the time after which a node is declared dead: for how long its death is told, and
# addresses of which nothing is heard are tried.
MEMORY = 10
MAX_PLACES = 10_000
# More places, deaths and addresses than this node has met may be told: views stay small.
MAX_UNMET = 256
MAX_REASONS = 1000
MAX_STEPS = 1 << 40
# A node tells all others that it lives; where there are more than the first, some in turn, who pass
# it on: of n nodes, log(n) / log(5) beats later all but a few know it, and e^4 times fewer a beat.
MAX_NEIGHBORS = 16
NEIGHBORS = 4
UNKNOWN = View(wants_mass=True)  # of a node that has not told yet what it holds


@dataclasses.dataclass
class Parcel:
    """A message to a peer, which this node repeats until the peer acknowledges it."""

    message: Message
    since: float  # when it was first sent
    step: int  # how many local steps this node had made at that time
    last_sent: float
    progress: float  # when it was first sent, or a piece of it acknowledged
    # Whether this node has withdrawn it, because there was no progress for long. It stays here
    # until the peer says that it will not apply it, or that it has.
    is_stuck: bool = False


@dataclasses.dataclass
class Peer:
    """Another node that this node hears, from its start to its end: one life, see `Identity`."""

    identity: Identity
    heard: float  # when it was last heard, here or by a node that says so
    spoke: float  # when its last message came
    view: View = UNKNOWN  # the newest view that it sent
    beat: int = 0  # how often it has said that it lives, as far as known
    sent: int = 0  # number of the newest parcel to it
    parcel: Parcel | None = None  # the newest parcel, until it is acknowledged
    # How long a parcel with a mass takes to be acknowledged: a smoothed time; 0 is unknown.
    message_seconds: float = 0.0
    applied: int = 0  # number of the newest parcel from it
    reply: Message | None = None  # the acknowledgement of that parcel
    # After this node was stopped for a while, it may be dead to this peer without knowing it. So it
    # sends this number, and drops the peer's parcels until that has sent it back; 0 is none.
    query: int = 0
    # Life -> the version of its final mass that this node has sent to this peer.
    sent_finals: dict[str, int] = dataclasses.field(default_factory=dict)
    lacks_final: bool = False  # whether the final mass of this node did not arrive there
    came_without_mass: bool = False  # whether it was heard before it held mass
    awaits_half: bool = False  # whether it asked for half of this node's mass, and has none yet
    # How far its last shares were from this node's model, before they were clipped.
    distances: tuple[tuple[float, ...], ...] = ()
    # The fields of a view that are for this peer alone; None if no view is due to it in this tick.
    owed_view: dict[str, Any] | None = None

    def owe_view(self, **says: Any) -> None:
        """Lets the peer get one view at the end of this tick, with all fields that calls give."""
        self.owed_view = (self.owed_view or {}) | says


class Membership:
    """Knows which other lives this node hears, which are dead or gone, and what all have told."""

    def __init__(self, settings: Settings, identity: Identity, now: float):
        self.steps = {settings.place: 0}  # place -> local steps of all its lives, as far as known
        self.weight = settings.node_weight or 1.0
        self.figure = "none"  # as in a view
        # Place -> its `node_weight`, the number that it last gave `Node.mean`, and whether it gave
        # it after the end.
        self.figures: dict[int, tuple[float, float, bool]] = {}
        # The step of the optimizer's schedules. A new node takes that of the node that gives mass.
        self.clock = 0
        # Another living process with the same place. A former life of this node would be silent.
        self.twin: Identity | None = None
        self.notes: dict[str, str] = {}  # problems of which the program is warned, once each
        # Address -> when it was last named; those that were given are tried for ever.
        self.contacts = dict.fromkeys(set(settings.contacts) - {identity.address}, now)
        self._given = frozenset(self.contacts)
        self.now = now  # when a message came, or the clock ticked
        self.met = now  # when it last met another node
        self.peers: dict[str, Peer] = {}  # by life, while it is heard
        self.begin_life(identity)
        self.reborn = now - settings.patience  # when it began another life
        self.patience = settings.patience
        self._beats = 0  # how often it has said that it lives
        self._queries = itertools.count(1)
        self.stepped: dict[int, float] = {}  # place -> when its number of steps last grew
        self._met_places = {settings.place}  # of lives that it has heard

    def list_members(self) -> list[Identity]:
        """Returns the nodes that this node hears and that hold mass."""
        return [peer.identity for peer in self.peers.values() if not peer.view.wants_mass]

    @property
    def update_factor(self) -> float:
        """The factor of this node's updates: its `node_weight` over the largest of all nodes.

        Without `node_weight` it is 1, and all nodes count alike. It never exceeds 1, because larger
        updates would let long outer steps diverge.
        """
        views = [peer.view for peer in self.peers.values()]
        others = [v.node_weight for v in views if not (v.wants_mass or v.is_finished)]
        return self.weight / max([self.weight, *others])

    @property
    def own_steps(self) -> int:
        """The local steps of this node, those before restarts and of former lives included."""
        return self.steps[self.identity.place]

    def begin_life(self, identity: Identity) -> None:
        """Begins a new life of this node, which knows no other node yet, and no death.

        The former life took back shares that it had sent to the dead, and gave them up with its
        mass. So the new life must not tell others of these deaths.
        """
        self.identity = identity
        self.contacts |= {peer.identity.address: self.now for peer in self.peers.values()}
        self.peers = {}
        self.left: set[str] = set()  # lives that said goodbye
        self.declared: set[str] = set()  # lives that this life has declared dead
        # Lives that declared this one dead and that others still hear, and when it learned that.
        self.disputes: dict[str, float] = {}
        # Dead life -> the smallest identity that declared it dead, and when. It is forgotten after
        # a while. Each declarer also tells the life so itself.
        self.deaths: dict[str, tuple[Identity, float]] = {}
        self.reborn = self.next_beat = self.now

    # What this node hears.

    def count_step(self) -> None:
        """Counts a local step."""
        self.clock += 1
        self.steps[self.identity.place] += 1
        self.stepped[self.identity.place] = self.now

    def note_progress(self, life: str | None, now: float, has_arrived: bool) -> None:
        """Notes that a node has sent a piece, or (`has_arrived`) acknowledged one of this node."""
        if life in self.peers:
            peer = self.peers[life]
            peer.heard = peer.spoke = now
            if has_arrived and peer.parcel is not None:
                peer.parcel.last_sent = peer.parcel.progress = now

    def meet(self, sender: Identity) -> Peer:
        """Adds a node that this one hears for the first time to its peers; returns the peer."""
        self._met_places.add(sender.place)
        self._note_contacts([sender])
        self.met = self.now
        peer = self.peers[sender.life] = Peer(sender, self.now, self.now)
        peer.owe_view()
        self.next_beat = min(self.next_beat, self.now + self.patience / EARLY_BEATS)
        return peer

    def learn(self, peer: Peer, view: View) -> None:
        """Learns from a peer's view who lives, who is dead, and how many steps were made."""
        peer.view = view._replace(beats=(), deaths=(), steps=())  # these fields are not read again
        if view.echo and view.echo == peer.query:
            peer.query = 0
        if view.query:
            peer.owe_view(echo=view.query)
        for place, count in view.steps:
            self.learn_steps(place, count)
        peer.beat = max(peer.beat, view.beat)
        with contextlib.suppress(ValueError):  # "none" before the node has called `mean`
            figure, _, is_last = view.figure.partition(" ")
            self.figures[peer.identity.place] = view.node_weight, float(figure), bool(is_last)
        self._note_contacts(view.members)
        for member, beat in zip(view.members, view.beats, strict=True):
            other = self.peers.get(member.life)
            if other is not None and beat > other.beat:
                other.beat = beat
                other.heard = self.now
        for declarer, life, age in view.deaths:
            if age < MEMORY * self.patience and self.has_room(self.deaths):
                self._note_death(declarer, life, self.now - age)
        # Of two that live at one place, the one that began later notices, and ends with an error.
        if peer.identity.place == self.identity.place and view.beat > self._beats:
            self.twin = peer.identity

    def _note_contacts(self, others: Iterable[Identity]) -> None:
        """Notes the addresses of other nodes, and that they were named now.

        `beat` lists them to be called, and forgets those that nobody names for long. If the list is
        full, addresses that are not in it yet are dropped.
        """
        for other in others:
            if self.has_room(self.contacts) or other.address in self.contacts:
                self.contacts[other.address] = self.now
        self.contacts.pop(self.identity.address, None)

    def has_room(self, known: dict[Any, Any]) -> bool:
        """Says whether a dictionary may grow: what strangers tell must not fill the memory."""
        return len(known) < min(len(self._met_places) + MAX_UNMET, MAX_PLACES)

    def learn_steps(self, place: int, count: int) -> None:
        """Learns that the nodes at a place, one after another, have made `count` steps."""
        has_room = place in self.steps or self.has_room(self.steps)
        # A count near the largest in a message could not grow any more.
        if has_room and self.steps.get(place, -1) < count < MAX_STEPS:
            self.steps[place] = count
            self.stepped[place] = self.now

    def note(self, about: str, text: str) -> None:
        """Notes a problem, of which the next step warns the program; `about` is noted once."""
        if len(self.notes) < MAX_REASONS:
            self.notes.setdefault(about, text)

    def note_alone(self, how: str) -> None:
        """Notes that this node hears nobody and goes on; `how` says with which model."""
        self.note(
            "alone",
            f"no other node was heard for {self.patience:g} s, so this one goes on alone{how}. If "
            "another lives, their models go apart until they hear each other, and one side is then "
            "given up: see whether its address (has it changed?), the firewall and "
            "GOSSIPJAX_SECRET are right.",
        )

    # Which lives are dead.

    def outlives(self, other: Identity, members: Iterable[Identity]) -> bool:
        """Says whether this node, and not `other`, goes on if each has declared the other dead.

        `other` hears `members`. The side with more than half of all places goes on, else the side
        with the smallest identity. All nodes on both sides decide alike.
        """

        def rank(life: Identity, others: Iterable[Identity]) -> tuple[bool, Identity, Identity]:
            side = {life, *others}
            places = {who.place for who in side}
            return 2 * len(places) <= len(self.steps), min(side), life

        own = (peer.identity for peer in self.peers.values())
        return rank(self.identity, own) < rank(other, members)  # a majority's begins with False

    def is_dead_to_others(self, view: View, is_finished: bool) -> bool:
        """Says whether this node must give up its mass, because a view says that it is dead."""
        for declarer in (who for who, life, _ in view.deaths if life == self.identity.life):
            if declarer.life not in self.declared:
                return True
            # Two that declared each other dead settle that as soon as they hear each other. If only
            # others hear both, the elder goes on: the younger waits a while unless it is finished.
            if declarer in view.members:
                since = self.disputes.setdefault(declarer.life, self.now)
                is_late = is_finished or self.now - since > self.patience / 2
                if is_late and declarer < self.identity:
                    return True
        return False

    def declare_dead(self, peer: Peer) -> None:
        """Removes a peer, ignores it from now on, and tells the others that it is dead."""
        life = peer.identity.life
        del self.peers[life]
        self.declared.add(life)
        self._note_death(self.identity, life, self.now)
        if not self.peers:
            self.note_alone("")

    def _note_death(self, declarer: Identity, life: str, time: float) -> None:
        """Notes who declared a node dead and when; of several, the smallest identity stays."""
        if life not in self.deaths or declarer < self.deaths[life][0]:
            self.deaths[life] = declarer, time

    def notice_absence(self, now: float) -> None:
        """Sets the time; after a long gap (a suspended machine), asks whether it counts as dead."""
        absence = now - self.now
        self.now = now
        if absence <= self.patience / 2:
            return
        for peer in self.peers.values():
            # This node could hear nobody meanwhile, so no silence counts.
            peer.heard = peer.spoke = now
            peer.query = next(self._queries)
        # Some peers get the query now, the others with the next beat or parcel.
        for peer in self._take_turns(list(self.peers.values())):
            peer.owe_view()

    # What this node tells others.

    def beat(self) -> tuple[list[str], list[str]]:
        """Tells peers that this node lives, and forgets old deaths, of which all have heard.

        Returns the addresses to call, from which nothing is heard, and those that it gives up.
        """
        for peer in self._take_turns(list(self.peers.values())):
            peer.owe_view()
        oldest = self.now - MEMORY * self.patience
        self.deaths = {life: one for life, one in self.deaths.items() if one[1] >= oldest}
        heard = {peer.identity.address for peer in self.peers.values()}
        self.contacts |= dict.fromkeys(self.contacts.keys() & heard, self.now)
        contacts = self.contacts.items()
        gone = [one for one, named in contacts if named < oldest and one not in self._given]
        for address in gone:
            del self.contacts[address]
        calls = self._take_turns([one for one in self.contacts if one not in heard])
        self._beats += 1
        return calls, gone

    def _take_turns(self, others: list[Any]) -> list[Any]:
        """Returns all of `others` if they are few; else a few of them, at each beat the next."""
        if len(others) <= MAX_NEIGHBORS:
            return others
        first = (self._beats + self.identity.place) * NEIGHBORS  # each begins elsewhere
        return [others[(first + i) % len(others)] for i in range(NEIGHBORS)]

    def make_view(self) -> View:
        """Makes a view of who lives; the caller adds what this node does and wants."""
        deaths = self.deaths.items()
        return View(
            members=tuple(peer.identity for peer in self.peers.values()),
            beats=tuple(peer.beat for peer in self.peers.values()),
            beat=self._beats,
            deaths=tuple((who, life, max(0.0, self.now - time)) for life, (who, time) in deaths),
            steps=tuple(self.steps.items()),
            node_weight=self.weight,
            figure=self.figure,
        )
