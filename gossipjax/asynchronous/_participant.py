"""The protocol of asynchronous nodes, without sockets and threads: what a node does with its mass.

docs/internals/asynchronous_protocol.md describes the messages. The masses of living nodes, of
messages on their way and of dead lives have a constant sum. A life may have applied a share that
its sender took back, because the acknowledgement was lost. When that life is dead, the share counts
as taken out of its mass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from gossipjax.asynchronous._ending import RETURNED, STUCK, Ending, Holder
from gossipjax.asynchronous._membership import BEATS, MAX_LIVES, MEMORY, Peer
from gossipjax.asynchronous._messages import Identity, Mass, Message, View
from gossipjax.asynchronous._settings import Settings

MAX_ON_WAY = 2  # no share is sent where this times the weight on its way exceeds what is held
MIN_SECONDS = 1e-4  # shortest time of a message that clocks can measure
MIN_KEPT = 8  # an average is declined where less than this part of the weight might be left
MAX_SHUNNED = 16 * MEMORY  # in units of patience: for how long a peer gets no parcel, at most
TAKEN_BACK = "taken back by its sender"
HOARDS = "takes more than it gives"


class Participant(Ending):
    """The side of one node in the protocol."""

    def __init__(
        self,
        settings: Settings,
        holder: Holder,
        new_life: Callable[[], Identity],
        journal: Callable[[str, str, int, Mass | None], None],
        now: float,
        max_on_way: int | None = None,
    ):
        super().__init__(settings, holder, new_life, journal, now)
        self.acknowledged = 0  # messages with a mass
        self.staleness = 0  # local steps that these were on their way, in total
        self.is_ready = False  # to begin
        self._max_on_way = max_on_way  # parcels with a mass; None is one for each peer
        self._max_received = settings.max_received
        self._received = 0  # shares since a node last acknowledged a parcel of this node
        self._wants_mass_since = None if settings.is_founder else now
        # The mass that it gave up, or may bring, kept for the case that nobody gives it any.
        self._estate: Mass | None = None
        self._has_saved = False
        self.joined_at: int | None = None  # the clock of who gave, until the loop has taken note
        self._gave_up = False
        self._is_founder = bool(settings.is_founder)
        self._num_nodes = settings.num_nodes
        self._beg_turns = itertools.count()
        self._last_beg = now - settings.patience
        journal("found" if settings.is_founder else "join", self.identity.life, 0, None)

    def bring(self, estate: Mass, steps: int = 0, clock: int = 0) -> None:
        """Keeps a model, a first one or a saved one, for a job in which no node holds mass.

        With a saved model, `steps` are the steps that all lives of this node had made by then.
        """
        self._estate = estate
        self._has_saved = steps > 0
        self._learn_steps(self.identity.place, steps)
        self.clock = clock

    @property
    def wants_mass(self) -> bool:
        """Whether this node has no mass, and so cannot make a step."""
        return self._wants_mass_since is not None

    @property
    def may_go_on_alone(self) -> bool:
        """Whether it has a model other than a first one, to go on with if nobody gives mass."""
        return self._estate is not None and (self._gave_up or self._has_saved)

    def all_are_ready(self, count: int) -> bool:
        """Whether `count` nodes, with this one, are ready to begin, or a node has begun."""
        views = [peer.view for peer in self.peers.values() if peer.view.is_ready]
        heard = [len(views), *(len(view.members) for view in views)]
        has_begun = any(self.steps.get(peer.identity.place) for peer in self.peers.values())
        return self.is_ready and (has_begun or min(heard) + 1 >= count)

    # What the training loop asks for.

    def set_ready(self, now: float) -> None:
        """Tells the other nodes that this node is ready to begin."""
        self.is_ready = True
        self._next_beat = now

    def is_free(self, peer: Identity) -> bool:
        """Whether a node may be sent a parcel, which is so if no other is on its way to it."""
        other = self.peers.get(peer.life)  # None for this node itself
        if other is None or other.view.wants_mass or other.view.is_finished:
            return False
        return self._may_send(other)

    def _may_send(self, peer: Peer) -> bool:
        # Memory limits how many messages with a large model are on their way at a time.
        is_full = self._max_on_way is not None and len(self._list_moving()) >= self._max_on_way
        return peer.parcel is None and not is_full and not self._shuns(peer)

    def _list_moving(self) -> list[Message]:
        """Returns the parcels on their way, except parcels that one bad path holds up."""
        since = self._last_tick - self._patience / 2
        return [p.parcel for p in self.peers.values() if p.parcel and p.progress > since]

    def measure_seconds(self) -> dict[Identity, float]:
        """Returns the seconds from sending a mass to a node until its answer, if they are known."""
        return {peer.identity: peer.seconds for peer in self.peers.values() if peer.seconds}

    def spares_share(self) -> bool:
        """Whether this node may send half of its mass.

        A mass on its way gets no updates. So at most two thirds of a node's mass may be on its way.
        """
        total = self._holder.total
        masses = [parcel.mass for parcel in self._list_moving() if parcel.mass is not None]
        return MAX_ON_WAY * sum(mass.weight_at(total.exponent) for mass in masses) <= total.w

    def share(self, peer: Identity, mass: Mass, now: float) -> None:
        """Sends a share, which was taken out of this node's mass and is in the form of the wire."""
        self._send_parcel("share", self.peers[peer.life], mass, now, is_narrow=True)

    def ask(self, peer: Identity, now: float) -> bool:
        """Asks a peer to average both masses; returns False if too much is promised to others."""
        mass = self._holder.read()
        if not self._is_affordable(mass, 0):
            return False
        self._send_parcel("ask", self.peers[peer.life], mass, now)
        return True

    # Which messages arrive.

    def receive(self, message: Message, now: float) -> None:
        """Acts on a message."""
        self._notice_absence(now)
        sender = message.sender
        if sender.life == self.identity.life:
            self._drop("of this node itself")
        elif message.receiver is None and message.kind != "view":
            self._drop("for nobody")
        elif message.receiver not in (None, self.identity.life):
            self._drop("of an earlier life")
            gone = Message("gone", self.identity, sender.life, text=message.receiver)
            self.outbox.append((sender.address, gone))
        elif sender.life in self._left:
            self._drop("of a node that has left")
            if message.kind == "bye":
                reply = Message("ack", self.identity, sender.life, message.number)
                self.outbox.append((sender.address, reply))
        elif sender.life in self._declared:
            self._answer_the_dead(message, now)
        elif message.receiver is None and sender.life not in self.peers:
            # A call. Nothing of it is remembered before its sender, who may be anybody, names this
            # life, which none can guess.
            reply = Message("view", self.identity, sender.life, view=self._make_view())
            self.outbox.append((sender.address, reply))
        else:
            peer = self.peers.get(sender.life) or self._meet(sender, now)
            peer.heard = peer.spoke = now
            self._learn_steps(sender.place, message.steps)
            self._dispatch(peer, message, now)

    def _dispatch(self, peer: Peer, message: Message, now: float) -> None:
        if message.kind == "view" and message.view is not None:
            self._learn(peer, message.view, now)
        elif message.kind == "dead":
            self._give_up(now)
        elif message.kind == "gone":
            self._bury(message, peer.identity.address)
        elif message.kind in ("ack", "answer", "refuse"):
            self._settle(peer, message)
            self._give(now)  # mass that was promised to a peer can be spared now
        elif peer.query:
            # This node was stopped for a while. If it was declared dead meanwhile, the sender has
            # taken back what it sent before, and adding it here would count it twice.
            self._drop("before it is known whether this life was declared dead")
            self._send_view(peer)
        elif message.number == peer.applied and peer.reply is not None:
            # The reply was lost, so the same one goes out again: nothing is added twice.
            if message.kind == "withdraw":
                self._undo(peer)
            self._drop("doubled")
            self._send(peer, peer.reply)
        elif self._said_goodbye and message.kind != "bye":
            self._drop("after goodbye")
        elif message.number == peer.applied + 1:
            self._apply(peer, message)
        else:
            self._drop("out of order")

    def _apply(self, peer: Peer, message: Message) -> None:
        if message.kind == "bye" and not self._take_leave(peer, message):
            return
        peer.applied = message.number
        reply = Message("ack", self.identity, peer.identity.life, message.number)
        owes_half = message.kind == "share" and self._owes_half(message)
        may_send = owes_half and self._may_send(peer) and self.spares_share()
        text = HOARDS if owes_half and not may_send else message.text
        if message.kind != "bye" and (message.mass is None or text == HOARDS):
            self._drop(text)
            reply = reply._replace(kind="refuse", text=text)
            owes_half = False
        elif message.kind == "ask":
            reply = reply._replace(kind="answer", mass=self._average(peer, message))
        elif message.kind == "share" and message.mass is not None:
            self._journal("receive", peer.identity.life, message.number, message.mass)
            self._holder.add(message.mass)
            self._admit(message.version)
        elif message.kind == "final" and message.mass is not None:
            self._learn_final(message.origin or peer.identity, message.version, message.mass)
        peer.reply = reply
        self._send(peer, reply)
        if owes_half:
            self._send_half(peer, self._last_tick, RETURNED)

    def _owes_half(self, message: Message) -> bool:
        """Whether it must answer a share with half of its mass, as it took more than it gave.

        So a node whose loop hangs still mixes with the others. A half that comes back is not
        counted as taken: if it were, two nodes that hang would never have to give.
        """
        self._received += message.text != RETURNED
        is_over = self._received > self._max_received and message.text != RETURNED
        return is_over and not (self.wants_mass or self.is_finished)

    def _send_half(self, peer: Peer, now: float, text: str = "") -> None:
        self._send_parcel("share", peer, self._holder.halve(), now, event="grant", text=text)

    def _average(self, peer: Peer, message: Message) -> Mass | None:
        mine = self._holder.read()
        change = (message.mass - mine) / 2 if message.mass is not None else None
        # If two nodes ask each other at once and both answer, they swap models and do not average.
        # So the one with the smaller identity declines, and only its ask is answered.
        crosses = peer.parcel is not None and peer.parcel.kind == "ask"
        is_won = crosses and self.identity < peer.identity
        is_affordable = message.mass is not None and self._is_affordable(
            mine, message.mass.weight_at(mine.exponent)
        )
        if change is None or is_won or not is_affordable:
            self._journal("decline", peer.identity.life, message.number, None)
            return None
        self._journal("average", peer.identity.life, message.number, change)
        self._holder.add(change)
        return change

    def _undo(self, peer: Peer) -> None:
        """Undoes an average whose answer did not arrive, because the asker will not apply it."""
        assert peer.reply is not None
        change = peer.reply.mass
        total = self._holder.total
        # The weight must stay above 0; this node may have sent most of it on since.
        if change is not None and total.w > change.weight_at(total.exponent):
            self._journal("undo", peer.identity.life, peer.applied, -change)
            self._holder.add(-change)
            peer.reply = peer.reply._replace(kind="refuse", mass=None, text="not answered in time")

    def _settle(self, peer: Peer, message: Message) -> None:
        parcel = peer.parcel
        if parcel is None or parcel.number != message.number:
            self._drop("doubled")
            return
        if peer.is_stuck and message.mass is not None:
            self._drop("an answer that came too late")
            return
        peer.is_stuck = False
        if message.kind == "refuse":
            self._drop(f"refused by place {peer.identity.place}: {message.text}")
            if parcel.kind == "ask":
                self._journal("declined", peer.identity.life, message.number, None)
            self._return(peer)
            return
        peer.parcel = None
        if parcel.mass is not None:
            if parcel.text != RETURNED:
                self._received = 0
            self.acknowledged += 1
            self.staleness += self.steps[self.identity.place] - peer.parcel_step
            self._shunned.pop(peer.identity.address, None)
            took = max(peer.spoke - peer.parcel_since, MIN_SECONDS)
            peer.seconds = (peer.seconds + took) / 2 if peer.seconds else took
        if parcel.kind == "bye":
            del self.peers[peer.identity.life]
        elif parcel.kind == "ask" and parcel.mass is not None:
            if message.mass is None:
                self._journal("declined", peer.identity.life, message.number, None)
            else:
                self._journal("averaged", peer.identity.life, message.number, -message.mass)
                self._holder.add(-message.mass)

    def _learn(self, peer: Peer, view: View, now: float) -> None:
        made = self.steps[self.identity.place]
        super()._learn(peer, view, now)
        if self._is_founder and self.steps[self.identity.place] > made:
            # An earlier life made these steps. It founded the job, and its model is in what the
            # others hold: a second founder would add another model.
            self._note(
                "founds",
                f"place {self.identity.place} founds once: an earlier life of it has made steps, "
                "which are in what the others hold. It gave up the model that it brought, and asks "
                "for half of theirs: leave out is_founder=True where it is started again.",
            )
            self._give_up(now)
            self._estate = None
            return
        peer.wanted |= view.wants_mass
        declarers = [who for who, life, _ in view.deaths if life == self.identity.life]
        if any(self._is_dead_to(declarer, view, now) for declarer in declarers):
            self._give_up(now)
        elif self.wants_mass and not view.wants_mass:
            self._beg(peer, now)
        else:
            peer.waits = view.wants_mass and (view.begs or peer.waits)
            self._give(now)
        if view.query:
            self._send_view(peer, echo=view.query)

    # Which nodes come.

    def _give(self, now: float) -> None:
        """Sends half of this node's mass to each node that waits for it, once it can be spared."""
        if self.wants_mass or self._is_leaving or self.finals:  # final masses are being counted
            return
        for peer in self.peers.values():
            is_free = peer.waits and self._may_send(peer)
            if is_free and self._is_affordable(self._holder.total, 0):
                peer.waits = False  # it asks again if it still has no mass
                self._send_half(peer, now)

    def _admit(self, clock: int) -> None:
        if self.wants_mass:
            self.clock = self.joined_at = clock
            self._journal("admit", self.identity.life, clock, None)
            self._next_beat = self._last_tick  # others may send it shares from now on
            self._end_want()

    def _end_want(self) -> None:
        self._wants_mass_since = None
        self._estate = None

    def _beg_in_turn(self, now: float) -> None:
        givers = [peer for peer in self.peers.values() if not peer.view.wants_mass]
        if givers and self.wants_mass and not self.is_finished:
            self._beg(givers[next(self._beg_turns) % len(givers)], now)

    def _beg(self, peer: Peer, now: float) -> None:
        """Asks one node at a time for half of its mass, unless both may found the job together."""
        waits = peer.wanted and self._estate is not None and not self._gave_up
        if waits and not self._is_calm(now):
            return
        if now - self._last_beg >= self._patience / BEATS:
            self._last_beg = now
            self._send_view(peer, begs=True)

    # Which nodes die.

    def _is_dead_to(self, declarer: Identity, view: View, now: float) -> bool:
        """Whether, by a view, a life has declared this life dead and goes on in place of it."""
        if declarer.life not in self._declared:
            return True
        # Two that declared each other dead settle that as soon as they hear each other. If only
        # others hear both, the elder goes on.
        if declarer not in view.members:
            return False
        since = self._disputes.setdefault(declarer.life, now)
        is_late = self.is_finished or now - since > self._patience / 2
        return is_late and declarer < self.identity

    def _answer_the_dead(self, message: Message, now: float) -> None:
        sender = message.sender
        view = message.view or View()
        is_mutual = self.identity.life in {life for _, life, _ in view.deaths}
        # If both gave up, all mass of a job of two would be lost.
        if is_mutual and not self._outlives(sender, view.members):
            self._give_up(now)
            return
        self._drop("of the dead")
        if message.kind != "dead":
            message = Message("dead", self.identity, sender.life)
            self.outbox.append((sender.address, message))

    def _declare_dead(self, peer: Peer) -> None:
        super()._declare_dead(peer)
        self._return(peer)  # a share that it has not acknowledged

    def _bury(self, message: Message, address: str) -> None:
        """Declares a life dead, because another life says that it has the address now."""
        peer = self.peers.get(message.text)
        if peer is not None and peer.identity.address == address:
            self._declare_dead(peer)
            self._end_final(peer.identity)

    def _return(self, peer: Peer) -> None:
        parcel = peer.parcel
        if parcel is not None and parcel.kind == "share" and parcel.mass is not None:
            self._journal("return", peer.identity.life, parcel.number, parcel.mass)
            self._holder.add(parcel.mass)
        peer.parcel = None

    def _give_up(self, now: float) -> None:
        """Begins a new life without mass, and keeps the old mass in case nobody gives any."""
        mass = self._holder.take()
        self._journal("give up", self.identity.life, 0, mass)
        if self._wants_mass_since is None:
            self._estate = mass
            self._gave_up = True
            self._wants_mass_since = now
        self._is_founder = False
        self._begin_life(now)

    def write_off(self, now: float) -> None:
        """Begins a new life after a model that is not finite; the weight of the model is lost."""
        self._journal("write off", self.identity.life, 0, self._holder.take())
        self._wants_mass_since = now
        self._is_founder = False
        self._begin_life(now)

    def _is_calm(self, now: float) -> bool:
        since = self._wants_mass_since
        return since is not None and now - max(since, self._met) > self._patience

    def _found(self, now: float) -> None:
        """If nobody is left to give mass, takes the old mass back or brings a model."""
        if self._estate is None or self._wants_mass_since is None:
            return
        is_calm = self._is_calm(now)
        places = {self.identity.place, *(peer.identity.place for peer in self.peers.values())}
        # Long enough ago that the node met last has heard that this one holds nothing.
        is_known = now - self._met > self._patience / BEATS
        all_are_heard = 0 < self._num_nodes <= len(places) and is_known
        is_new = not any(self.steps.values())
        # The nodes that were heard without mass found the job together.
        nobody_gives = all(peer.wanted for peer in self.peers.values())
        if self._gave_up:
            may = is_calm and not self.list_members()
        elif self._has_saved:
            may = nobody_gives and (is_calm or all_are_heard)
        else:
            # A node that hears few others may be cut off from a job that goes on.
            most_are_heard = 2 * len(places) > self._num_nodes
            may = (all_are_heard and is_new) or (
                nobody_gives and is_calm and (all_are_heard or (is_new and most_are_heard))
            )
        if may:
            self._journal(
                "revive" if self._gave_up else "found", self.identity.life, 0, self._estate
            )
            self._is_founder = not self._gave_up
            self._holder.add(self._estate)
            if self._has_saved and self.contacts and not self.peers:
                self._note(
                    "alone",
                    f"no other node was heard for {self._patience:g} s, so this one goes on alone "
                    "from what it had saved. If another lives, their models go apart until they "
                    "hear each other, and one side is then given up: see whether its address, the "
                    "firewall and GOSSIPJAX_SECRET are right.",
                )
            self._next_beat = now
            self._end_want()

    def _take_leave(self, peer: Peer, message: Message) -> bool:
        """Says goodbye to a node that leaves; False if an answer to it is still on its way."""
        parcel = peer.parcel
        if parcel is not None and parcel.number <= message.applied:
            if parcel.kind == "ask":
                # It has answered this ask and changed its mass, but the answer is not here yet. If
                # it left now, this node could not make the opposite change.
                self._send(peer, parcel)
                return False
            peer.parcel = None
        self._return(peer)
        del self.peers[peer.identity.life]
        self._left[peer.identity.life] = None
        if len(self._left) > MAX_LIVES:
            del self._left[next(iter(self._left))]
        return True

    # Time, and what is sent.

    def tick(self, now: float) -> None:
        """Declares silent lives dead, repeats parcels, and tells others that this node lives."""
        self._notice_absence(now)
        for peer in list(self.peers.values()):
            since = peer.heard
            if peer.parcel is not None:  # only what the peer itself says can acknowledge it
                since = max(peer.spoke, peer.parcel_since)
                if (
                    peer.is_stuck
                ):  # a peer that speaks, but does not answer the withdrawal, dies too
                    since = min(since, peer.progress + (STUCK + 1) * self._patience)
            if now - since > self._patience:
                self._declare_dead(peer)
            elif peer.parcel is not None and now - peer.parcel_time > self._patience / 2:
                peer.parcel_time = now
                is_late = now - peer.progress > STUCK * self._patience
                if is_late and peer.parcel.mass is not None:
                    self._withdraw(peer)
                else:
                    self._send(peer, peer.parcel)
        if self.wants_mass and not self.is_finished:
            self._found(now)
        elif self._is_leaving:
            self._go_on_leaving(now)
        elif self.is_finished and not self.is_ended:
            self._go_on_ending(now)
        if now >= self._next_beat:
            self._next_beat = now + self._patience / BEATS
            self._forget(now)
            self._beg_in_turn(now)
            self._beat(now)
        self._send_views()

    def _withdraw(self, peer: Peer) -> None:
        """Takes back a parcel that does not arrive, by a small message, which may arrive.

        The peer refuses the parcel, or says that it has acted upon it, so the parcel counts once. A
        peer that does not answer is declared dead. After a withdrawal nothing is sent to the peer
        for a while, and each time for longer.
        """
        assert peer.parcel is not None
        peer.fails |= peer.parcel.kind == "final"
        if not peer.is_stuck:
            peer.is_stuck = True
            address = peer.identity.address
            _, seconds = self._shunned.get(address, (0.0, 0.0))
            seconds = max(2 * seconds, MEMORY * self._patience)
            seconds = min(seconds, MAX_SHUNNED * self._patience)
            self._shunned[address] = self._last_tick + seconds, seconds
            self._note(
                address,
                f"place {peer.identity.place} at {address} lives, but does not acknowledge what "
                "this node sends: it is left out for a while. If the path there loses large "
                "packets, lower the MTU of both machines.",
            )
            self._drop(f"not acknowledged by place {peer.identity.place} at {address}")
            self.gone.append(address)  # the pieces that are still to be sent
        number = peer.parcel.number
        message = Message("withdraw", self.identity, peer.identity.life, number, text=TAKEN_BACK)
        self._send(peer, message)

    def _make_view(self) -> View:
        return super()._make_view()._replace(wants_mass=self.wants_mass, is_ready=self.is_ready)

    def _is_affordable(self, mine: Mass, weight: Any) -> bool:
        """Whether enough weight is left after an average with `weight`, and after all pending asks.

        An answer to an ask takes at most half of the mass that this node held when it asked.
        """
        parcels = (p.parcel for p in self.peers.values() if not p.is_stuck)
        asked = (p.mass for p in parcels if p and p.kind == "ask" and p.mass is not None)
        promised = sum(mass.weight_at(mine.exponent) for mass in asked)
        return (mine.w + weight) / 2 - promised / 2 >= mine.w / MIN_KEPT > 0
