"""Who lives: the lives that a node hears, and what nodes tell each other about them.

The code here uses no sockets, clocks or threads: the caller passes in messages and the time.
`_participant.py` says what a node does with its mass.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from gossipjax.asynchronous._messages import Identity, Mass, Message, View
from gossipjax.asynchronous._settings import Settings

BEATS = 10  # messages "I live" during the time after which a node is declared dead
EARLY_BEATS = 50  # the same while nodes meet
MAX_LIVES = 100_000  # lives whose deaths a node remembers
# In units of the time after which a node is declared dead: for how long its death is told, and
# addresses of which nothing is heard are tried.
MEMORY = 10
MAX_PLACES = 10_000
MAX_REASONS = 1000
MAX_STEPS = 1 << 40
# A node tells all others that it lives; where there are more than the first, some in turn, who pass
# it on: of n nodes, log(n) / log(5) beats later all but a few know it, and e^4 times fewer a beat.
MAX_NEIGHBORS = 16
NEIGHBORS = 4


@dataclasses.dataclass
class Peer:
    """Another life that this life hears."""

    identity: Identity
    heard: float  # when it was last heard, here or by a node that says so
    spoke: float  # when its last message came
    view: View = dataclasses.field(default_factory=View)  # the newest view that it sent
    beat: int = 0  # how often it has said that it lives, as far as known
    sent: int = 0  # number of the newest parcel to it
    parcel: Message | None = None  # the newest parcel, until it is acknowledged
    parcel_since: float = 0.0  # when the parcel was first sent
    parcel_step: int = 0  # the local steps of this node at that time
    parcel_time: float = 0.0  # when the parcel was last sent
    progress: float = 0.0  # when the parcel was sent, or a piece of it acknowledged
    is_stuck: bool = False  # whether the parcel is taken back, because this is long ago
    seconds: float = 0.0  # of its parcels with a mass, mostly the newest; 0 is unknown
    applied: int = 0  # number of the newest parcel from it
    reply: Message | None = None  # the acknowledgement of that parcel
    # After this node was stopped for a while: the number that the peer must send back before its
    # parcels count; 0 is none.
    query: int = 0
    # Life -> the version of what that held at the end, which this peer was sent.
    finals: dict[str, int] = dataclasses.field(default_factory=dict)
    lacks: list[Identity] = dataclasses.field(default_factory=list)  # whose end it must learn
    fails: bool = False  # whether the final mass of this node did not arrive there
    wanted: bool = False  # whether it was heard before it held mass
    waits: bool = False  # whether it asked for half of this node's mass, and has none yet
    owed: dict[str, Any] | None = None  # a view, by the end of this tick: what it says to this one


class Membership:
    """A life of this node, and the other lives that it hears."""

    def __init__(
        self,
        settings: Settings,
        new_life: Callable[[], Identity],
        journal: Callable[[str, str, int, Mass | None], None],
        now: float,
    ):
        self.identity = new_life()  # a node that was declared dead begins another life
        self.peers: dict[str, Peer] = {}  # by life, while it is heard
        self.steps = {settings.place: 0}  # place -> local steps of all its lives, as far as known
        self.clock = 0  # the step of its schedules; a new node takes the clock of the giver
        self.outbox: list[tuple[str, Message]] = []  # messages to send, by address
        self.dropped: dict[str, int] = {}  # reason -> messages that were not acted upon
        self.gone: list[str] = []  # addresses for which waiting messages can be dropped
        # Who lives and was given this place before: a former life is silent, or names another.
        self.twin: Identity | None = None
        self.notes: dict[str, str] = {}  # problems of which the program is warned, once each
        # Address -> when it was last named; those that were given are tried for ever.
        self.contacts = dict.fromkeys(set(settings.contacts) - {self.identity.address}, now)
        self._given = frozenset(self.contacts)
        self._patience = settings.patience
        self._new_life = new_life
        self._journal = journal
        self._declared: dict[str, Identity] = {}  # lives that this node declared dead
        self._disputes: dict[str, float] = {}  # those that others hear, and since when it knows
        # A life, the smallest of those that declared it dead, and when; for a while. Each of these
        # tells the life so itself, too.
        self._deaths: dict[str, tuple[Identity, float]] = {}
        # Addresses to which parcels did not come: until when these get none, and for how long. A
        # node that begins another life there is not fed at once again.
        self._shunned: dict[str, tuple[float, float]] = {}
        self._left: dict[str, None] = {}
        self._beats = 0  # how often it has said that it lives
        self._queries = itertools.count(1)
        self._stepped: dict[int, float] = {}  # place -> when its number of steps last grew
        self._began = self._last_tick = now
        self._reborn = now - settings.patience  # when it began another life
        self._met = now  # when it last met another node
        self._next_beat = now
        self._next_call = now  # when to call silent addresses next

    def list_members(self) -> list[Identity]:
        """Returns the nodes that this node hears and that hold mass."""
        return [peer.identity for peer in self.peers.values() if not peer.view.wants_mass]

    def list_reachable(self) -> list[Identity]:
        """Returns the members that parcels reach, as far as this node knows."""
        return [who for who in self.list_members() if not self._shuns(self.peers[who.life])]

    def _shuns(self, peer: Peer) -> bool:
        until, _ = self._shunned.get(peer.identity.address, (0.0, 0.0))
        return peer.is_stuck or self._last_tick < until

    # What this node hears.

    def count_step(self) -> None:
        """Counts a local step."""
        self.clock += 1
        self.steps[self.identity.place] += 1

    def note_progress(self, life: str | None, now: float, has_arrived: bool) -> None:
        """Notes that a life has sent a piece of a message, or has acknowledged one."""
        peer = None if life is None else self.peers.get(life)
        if peer is not None:
            peer.heard = peer.spoke = now
            if has_arrived:
                peer.parcel_time = peer.progress = now

    def _meet(self, sender: Identity, now: float) -> Peer:
        self._note_contacts([sender], now)
        self._met = now
        peer = self.peers[sender.life] = Peer(sender, now, now)
        self._send_view(peer)
        self._next_beat = min(self._next_beat, now + self._patience / EARLY_BEATS)
        return peer

    def _learn(self, peer: Peer, view: View, now: float) -> None:
        """Learns from a peer's view who lives, who is dead, and how many steps were made."""
        peer.view = view._replace(beats=(), deaths=(), steps=())  # these fields are not read again
        if view.echo and view.echo == peer.query:
            peer.query = 0
        for place, count in view.steps:
            self._learn_steps(place, count)
        peer.beat = max(peer.beat, view.beat)
        self._note_contacts(view.members, now)
        for member, beat in zip(view.members, view.beats, strict=True):
            other = self.peers.get(member.life)
            if other is not None and beat > other.beat:
                other.beat = beat
                other.heard = now
        for declarer, life, age in view.deaths:
            if age < MEMORY * self._patience and len(self._deaths) < MAX_PLACES:
                self._note_death(declarer, life, now - age)
        if peer.identity.place == self.identity.place:
            if view.beat > self._beats:
                self.twin = peer.identity
            else:
                address = peer.identity.address
                self._note(
                    address,
                    f"the node at {address} was given place {self.identity.place}, which this one "
                    "has; it is refused if it came later: give each node a place of its own, by "
                    "GOSSIPJAX_NODE, and all the same GOSSIPJAX_NODE_ADDRESSES.",
                )

    def _note_contacts(self, others: Iterable[Identity], now: float) -> None:
        for other in others:
            if len(self.contacts) < MAX_PLACES or other.address in self.contacts:
                self.contacts[other.address] = now
        self.contacts.pop(self.identity.address, None)

    def _learn_steps(self, place: int, count: int) -> None:
        # A count near the largest in a message could not grow any more.
        if count < MAX_STEPS and (len(self.steps) < MAX_PLACES or place in self.steps):
            if count > self.steps.get(place, 0):
                self.steps[place] = count
                self._stepped[place] = self._last_tick
            self.steps.setdefault(place, 0)

    # Which lives are dead.

    def _note_death(self, declarer: Identity, life: str, time: float) -> None:
        if life not in self._deaths or declarer < self._deaths[life][0]:
            self._deaths[life] = declarer, time

    def _outlives(self, other: Identity, members: Iterable[Identity]) -> bool:
        """Whether this life goes on if it and another declared each other dead.

        The decision is the same for all lives that either of the two hears, so one side of a
        partition goes on: the side with more than half of the places, or else the side with the
        smallest place.
        """

        def rank(life: Identity, others: Iterable[Identity]) -> tuple[bool, Identity, Identity]:
            side = {life, *others}
            places = {who.place for who in side}
            return 2 * len(places) <= len(self.steps), min(side), life

        own = (peer.identity for peer in self.peers.values())
        return rank(self.identity, own) < rank(other, members)

    def _declare_dead(self, peer: Peer) -> None:
        life = peer.identity.life
        del self.peers[life]
        self.gone.append(peer.identity.address)
        self._declared[life] = peer.identity
        if len(self._declared) > MAX_LIVES:
            del self._declared[next(iter(self._declared))]
        self._note_death(self.identity, life, self._last_tick)

    def _begin_life(self, now: float) -> None:
        """Begins a new life, which knows no other life yet."""
        self.identity = self._new_life()
        for peer in self.peers.values():
            self.contacts[peer.identity.address] = now
        self.peers = {}
        self._declared = {}
        self._disputes = {}
        self._reborn = now
        self._deaths = {}  # it gives up what it had taken back from others
        self._next_beat = now
        self._journal("join", self.identity.life, 0, None)

    def _notice_absence(self, now: float) -> None:
        """If this process was stopped for a while, asks the others if it is dead to them."""
        absence = now - self._last_tick
        self._last_tick = now
        if absence <= self._patience / 2:
            return
        for peer in self.peers.values():
            # This node could hear nobody meanwhile, so no silence counts.
            peer.heard = peer.spoke = now
            peer.query = next(self._queries)
        for peer in self._take_turns(list(self.peers.values())):  # the others at a beat or a parcel
            self._send_view(peer)

    # What this node tells others.

    def _forget(self, now: float) -> None:
        """Forgets deaths of which all have heard, and addresses from which nothing comes."""
        oldest = now - MEMORY * self._patience
        self._deaths = {life: death for life, death in self._deaths.items() if death[1] >= oldest}
        heard = {peer.identity.address for peer in self.peers.values()}
        for address, time in list(self.contacts.items()):
            if address in heard:
                self.contacts[address] = now
            elif time < oldest and address not in self._given:
                del self.contacts[address]
                self.gone.append(address)

    def _beat(self, now: float) -> None:
        """Tells the nodes that it hears, and addresses that are silent, that it lives."""
        for peer in self._take_turns(list(self.peers.values())):
            self._send_view(peer)
        calls = now >= self._next_call
        if calls:
            self._next_call = now + self._patience / 2  # who waits so long for calls is heard
        heard = {peer.identity.address for peer in self.peers.values()}
        recent = now - MEMORY * self._patience
        silent = [
            address
            for address, time in self.contacts.items()
            if address not in heard and (calls or time >= recent)
        ]
        for address in self._take_turns(silent):
            message = Message("view", self.identity, None, view=self._make_view())
            self.outbox.append((address, message))
        self._beats += 1

    def _take_turns(self, others: list[Any]) -> list[Any]:
        """Returns all others if they are few, else some of them, and at each beat the next ones."""
        if len(others) <= MAX_NEIGHBORS:
            return others
        first = (self._beats + self.identity.place) * NEIGHBORS  # each begins elsewhere
        return [others[(first + i) % len(others)] for i in range(NEIGHBORS)]

    def _make_view(self) -> View:
        deaths = ((who, life, self._last_tick - time) for life, (who, time) in self._deaths.items())
        return View(
            members=tuple(peer.identity for peer in self.peers.values()),
            beats=tuple(peer.beat for peer in self.peers.values()),
            beat=self._beats,
            deaths=tuple((who, life, max(0.0, age)) for who, life, age in deaths),
            steps=tuple(self.steps.items()),
        )

    def _send_view(self, peer: Peer, **more: Any) -> None:
        """Sends a view at the end of this tick, once even if called often: views are large."""
        peer.owed = (peer.owed or {}) | more

    def _send_views(self) -> None:
        """Sends the views that it owes before all else, as a peer needs them to take the rest."""
        owing = [(p, p.owed) for p in self.peers.values() if p.owed is not None]
        if not owing:
            return
        later = self.outbox
        self.outbox = []
        view = self._make_view()
        for peer, says in owing:
            peer.owed = None
            own = view._replace(query=peer.query, **says)
            self._send(peer, Message("view", self.identity, peer.identity.life, view=own))
        self.outbox += later

    def _send(self, peer: Peer, message: Message) -> None:
        steps = self.steps[self.identity.place]
        self.outbox.append((peer.identity.address, message._replace(steps=steps)))

    def _send_parcel(
        self,
        kind: str,
        peer: Peer,
        mass: Mass | None,
        now: float,
        event: str | None = None,
        **more: Any,
    ) -> None:
        peer.sent += 1
        peer.parcel_since = peer.parcel_time = peer.progress = now
        peer.parcel_step = self.steps[self.identity.place]
        peer.is_stuck = False
        receiver = peer.identity.life
        more = {"version": self.clock, "applied": peer.applied} | more
        peer.parcel = Message(kind, self.identity, receiver, peer.sent, mass, **more)
        if kind in ("share", "ask"):
            self._journal(event or kind, receiver, peer.sent, mass)
        self._send(peer, peer.parcel)

    def _note(self, about: str, text: str) -> None:
        if len(self.notes) < MAX_REASONS:
            self.notes.setdefault(about, text)

    def _drop(self, reason: str) -> None:
        """Counts a message that is dropped. A reason may contain texts of other nodes."""
        if reason in self.dropped or len(self.dropped) < MAX_REASONS:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
