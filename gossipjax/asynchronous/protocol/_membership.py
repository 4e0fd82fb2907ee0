"""Who lives, says a node: the half of its protocol that is about membership."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from gossipjax.asynchronous.protocol._mass import Mass
from gossipjax.asynchronous.protocol._messages import Identity, Message, View
from gossipjax.asynchronous.protocol._peers import Peer

BEATS = 10  # messages that say that a node lives, in the time after which it is declared dead
EARLY_BEATS = 50  # the same, while nodes meet
MIN_KEPT = 8  # an average is declined where less than this part of the weight might be left
MAX_LIVES = 10_000  # that a node remembers


@runtime_checkable
class Holder(Protocol):
    """What a node holds. The protocol changes it only by these."""

    def read(self) -> Mass:
        """Returns a copy."""
        ...

    def add(self, mass: Mass) -> None:
        """Adds to it."""
        ...

    def take(self) -> Mass:
        """Returns all of it, and holds nothing."""
        ...


class Membership:
    """What a node knows of the others, and what it does when they come and go.

    Args:
      identity: of its first life.
      holder: what it holds; nothing, unless it is a founder.
      contacts: addresses at which others may listen.
      patience: seconds of silence after which another node is declared dead.
      now: seconds, of a clock that never goes back.
      new_life: makes the identity of the next life.
      journal: is told every event, `(kind, peer's life, number, mass)`, in order; the mass is what
        the event adds to what the node holds, or takes out of it.
      is_founder: whether it begins with a mass of its own, which counts for one node.

    Attributes:
      identity: of the life that it is in.
      peers: life -> what is known of it, for those that are heard.
      steps: life -> local steps, as far as they are known.
      outbox: messages to be sent, `(address, message)`.
      dropped: reason -> number of messages that were not acted upon.
      is_ready: whether it is ready to begin.
      is_finished: whether it makes no more steps and sends no more shares.
      contacts: addresses at which others may listen.
      gone: addresses to which nothing that waits needs to be sent any more.
    """

    def __init__(
        self,
        identity: Identity,
        holder: Holder,
        contacts: Iterable[str],
        patience: float,
        now: float,
        new_life: Callable[[], Identity],
        journal: Callable[[str, str, int, Mass | None], None],
        is_founder: bool,
    ):
        self.identity = identity
        self.peers: dict[str, Peer] = {}
        self.steps: dict[str, int] = {identity.life: 0}
        self.outbox: list[tuple[str, Message]] = []
        self.dropped: dict[str, int] = {}
        self.gone: list[str] = []
        self.is_ready = False
        self.is_finished = False
        self._holder = holder
        self.contacts = set(contacts) - {identity.address}
        self._patience = patience
        self._new_life = new_life
        self._journal = journal
        self._declared: dict[str, Identity] = {}  # dead, says this node
        self._deaths: dict[tuple[Identity, str], None] = {}  # says any node
        self._wants_mass_since = None if is_founder else now
        self._estate: Mass | None = None
        self._beg_turns = itertools.count()
        self._queries = itertools.count(1)
        self._last_tick = now
        self._next_beat = now
        self._last_beg = now - patience
        journal("found" if is_founder else "join", identity.life, 0, None)

    def set_ready(self, now: float) -> None:
        """Tells the others that it is ready to begin."""
        self.is_ready = True
        self._next_beat = now

    @property
    def wants_mass(self) -> bool:
        """Whether it has none, and cannot make a step."""
        return self._wants_mass_since is not None

    def list_members(self) -> list[Identity]:
        """Returns the nodes that it hears and that hold mass."""
        return [peer.identity for peer in self.peers.values() if not peer.view.wants_mass]

    def all_are_ready(self, count: int) -> bool:
        """Whether so many nodes, itself included, are ready to begin, or one has begun."""
        views = [peer.view for peer in self.peers.values() if peer.view.is_ready]
        heard = [len(views), *(len(view.members) for view in views)]
        has_begun = any(self.steps.get(life) for life in self.peers)
        return self.is_ready and (has_begun or min(heard) + 1 >= count)

    @property
    def is_drained(self) -> bool:
        """Whether it sends nothing any more, and nothing is on its way."""
        parcels = (peer.parcel for peer in self.peers.values())
        is_sending = any(parcel and parcel.kind in ("share", "ask") for parcel in parcels)
        return self.is_finished and not is_sending

    @property
    def gives_mass(self) -> bool:
        """Whether nodes that have none get half of what it holds, until the end is counted."""
        return not self.wants_mass

    # Who comes.

    def _meet(self, sender: Identity, now: float) -> Peer:
        self.contacts.add(sender.address)
        earlier = [p for p in self.peers.values() if p.identity.address == sender.address]
        for peer in earlier:  # one process listens at an address
            if peer.identity < sender:
                self._declare_dead(peer)
        peer = self.peers[sender.life] = Peer(sender, now)
        self._send_view(peer)
        self._next_beat = min(self._next_beat, now + self._patience / EARLY_BEATS)
        return peer

    def _learn(self, peer: Peer, view: View, now: float) -> None:
        peer.view = view
        if view.echo and view.echo == peer.query:
            peer.query = 0
        for life, count in view.steps:
            self._learn_steps(life, count)
        self.contacts |= {member.address for member in view.members} - {self.identity.address}
        for death in view.deaths:
            if len(self._deaths) < MAX_LIVES:
                self._deaths[death] = None
        declarers = [who for who, life in view.deaths if life == self.identity.life]
        if any(not self._outlives(declarer) for declarer in declarers):
            self._give_up(now)
        elif self.wants_mass and not view.wants_mass:
            self._beg(peer, now)
        else:
            peer.waits = view.wants_mass and (view.begs or peer.waits)
            self._give(now)
        if view.query:
            self._send_view(peer, echo=view.query)

    def _learn_steps(self, life: str, count: int) -> None:
        if len(self.steps) < MAX_LIVES or life in self.steps:
            self.steps[life] = max(count, self.steps.get(life, 0))

    def _give(self, now: float) -> None:
        """Sends half of what it holds to each that waits for it, once that can be spared."""
        for peer in self.peers.values():
            if peer.waits and peer.parcel is None and self.gives_mass:
                mass = self._holder.read()
                if self._is_affordable(mass, 0):
                    half = mass / 2
                    peer.waits = False
                    self._send_parcel("share", peer, half, now, event="grant")
                    self._holder.add(-half)

    def _admit(self, mass: Mass) -> None:
        if self.wants_mass:
            bonus = Mass(tuple(0 * x for x in mass.x), 0 * mass.w, 1)
            self._journal("admit", self.identity.life, 0, bonus)
            self._next_beat = self._last_tick  # others may send it shares from now on
            self._holder.add(bonus)
            self._wants_mass_since = None
            self._estate = None

    def _outlives(self, other: Identity) -> bool:
        """Whether a life that declared this one dead is declared dead by this one, and younger."""
        return other.life in self._declared and self.identity < other

    def _beg(self, peer: Peer, now: float) -> None:
        """Asks one node at a time for half of its mass."""
        if now - self._last_beg >= self._patience / BEATS:
            self._last_beg = now
            self._send_view(peer, begs=True)

    # Who goes.

    def _answer_the_dead(self, message: Message, now: float) -> None:
        sender = message.sender
        view = message.view or View()
        is_mutual = message.kind == "dead" or self.identity.life in {d for _, d in view.deaths}
        if is_mutual and not self._outlives(sender):
            self._give_up(now)
        else:
            self._drop("of the dead")
            message = Message("dead", self.identity, sender.life)
            self.outbox.append((sender.address, message))

    def _declare_dead(self, peer: Peer) -> None:
        """Takes back what it was sent and has not acknowledged."""
        life = peer.identity.life
        del self.peers[life]
        self.gone.append(peer.identity.address)
        self._declared[life] = peer.identity
        self._deaths[self.identity, life] = None
        self._return(peer)

    def _return(self, peer: Peer) -> None:
        parcel = peer.parcel
        if parcel is not None and parcel.kind == "share" and parcel.mass is not None:
            self._journal("return", peer.identity.life, parcel.number, parcel.mass)
            self._holder.add(parcel.mass)
        peer.parcel = None

    def _give_up(self, now: float) -> None:
        """Goes on as a new life without mass. The mass stays at hand while nobody gives any."""
        mass = self._holder.take()
        self._journal("give up", self.identity.life, 0, mass)
        if self._wants_mass_since is None:
            self._estate = mass
            self._wants_mass_since = now
        self.identity = self._new_life()
        self.steps[self.identity.life] = 0
        self.contacts |= {peer.identity.address for peer in self.peers.values()}
        self.peers = {}
        self._declared = {}
        self._next_beat = now
        self._journal("join", self.identity.life, 0, None)

    def _revive(self, now: float) -> None:
        """Takes back what it had given up, where nobody who holds anything is left to give."""
        since = self._wants_mass_since
        nobody = not self.list_members() and since is not None and now - since > self._patience
        if nobody and self._estate is not None:
            self._journal("revive", self.identity.life, 0, self._estate)
            self._holder.add(self._estate)
            self._wants_mass_since = None
            self._estate = None

    def _notice_absence(self, now: float) -> None:
        """After a while in which it was stopped, asks the others whether it is dead to them."""
        absence = now - self._last_tick
        self._last_tick = now
        if absence <= self._patience / 2:
            return
        for peer in self.peers.values():
            peer.heard = now
            peer.query = next(self._queries)
            self._send_view(peer)

    # What it sends.

    def _beat(self, now: float) -> None:
        givers = [peer for peer in self.peers.values() if not peer.view.wants_mass]
        if givers and self.wants_mass and not self.is_finished:
            self._beg(givers[next(self._beg_turns) % len(givers)], now)
        for peer in self.peers.values():
            self._send_view(peer)
        for address in self.contacts - {p.identity.address for p in self.peers.values()}:
            message = Message("view", self.identity, None, view=self._make_view())
            self.outbox.append((address, message))

    def _make_view(self, query: int = 0, echo: int = 0, begs: bool = False) -> View:
        return View(
            members=tuple(peer.identity for peer in self.peers.values()),
            deaths=tuple(self._deaths),
            steps=tuple(self.steps.items()),
            wants_mass=self.wants_mass,
            begs=begs,
            is_ready=self.is_ready,
            is_finished=self.is_finished,
            is_drained=self.is_drained,
            query=query,
            echo=echo,
        )

    def _send_view(self, peer: Peer, echo: int = 0, begs: bool = False) -> None:
        view = self._make_view(peer.query, echo, begs)
        self._send(peer, Message("view", self.identity, peer.identity.life, view=view))

    def _send_parcel(
        self,
        kind: str,
        peer: Peer,
        mass: Mass | None,
        now: float,
        event: str | None = None,
        is_narrow: bool = False,
    ) -> None:
        peer.sent += 1
        peer.parcel_time = now
        receiver = peer.identity.life
        peer.parcel = Message(
            kind,
            self.identity,
            receiver,
            peer.sent,
            mass,
            applied=peer.applied,
            is_narrow=is_narrow,
        )
        if kind in ("share", "ask"):
            self._journal(event or kind, receiver, peer.sent, mass)
        self._send(peer, peer.parcel)

    def _send(self, peer: Peer, message: Message) -> None:
        steps = self.steps[self.identity.life]
        self.outbox.append((peer.identity.address, message._replace(steps=steps)))

    def _is_affordable(self, mine: Mass, weight: Any) -> bool:
        """Whether enough weight is left after an average with `weight`, and after those asked for.

        An answer to an ask takes half of what was held then, at most.
        """
        parcels = (peer.parcel for peer in self.peers.values())
        asked = (p.mass.w for p in parcels if p and p.kind == "ask" and p.mass is not None)
        return (mine.w + weight) / 2 - sum(asked) / 2 >= mine.w / MIN_KEPT > 0

    def _drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
