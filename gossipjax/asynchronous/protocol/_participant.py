"""The protocol of nodes that wait for nobody, without sockets, clocks and threads.

A node is told what arrives and what time it is, and makes messages. It never waits for one:

- A share leaves its sender at once. The sender keeps it until the receiver acknowledges it, sends
  it again where that takes long, and takes it back when it declares the receiver dead.
- Parcels of a pair of lives are numbered, and there is at most one that is not acknowledged. The
  receiver acts on the next number only, so each counts once, whatever is lost, late or doubled.
- A node that is not heard for `patience` seconds is declared dead by whoever does not hear it, and
  told so when it is heard again. What it holds is given up then: it goes on as a new life that asks
  for half of a living node's mass. Where two declare each other dead, the younger one gives up.

So the sum over what living nodes hold, what is on its way and what the dead held is constant. If a
life had applied a share that its sender took back, because the acknowledgement was lost, the share
counts as taken out of what that life held at its death.
"""

from __future__ import annotations

from typing import Any

from gossipjax.asynchronous.protocol._mass import Mass
from gossipjax.asynchronous.protocol._membership import BEATS, Membership
from gossipjax.asynchronous.protocol._messages import Identity, Message
from gossipjax.asynchronous.protocol._peers import Peer


class Participant(Membership):
    """One node's side of the protocol.

    Args:
      args, options: those of `Membership`.

    Attributes:
      finals: what each node held at the end, once it has said so, by its identity.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.finals: dict[Identity, Mass] = {}
        self._left: set[str] = set()
        self._is_leaving = False
        self._said_goodbye = False

    @property
    def gives_mass(self) -> bool:
        """Whether nodes that have none get half of what it holds, until the end is counted."""
        return super().gives_mass and not self._is_leaving and not self.finals

    @property
    def all_are_drained(self) -> bool:
        """Whether so are this node and all that it hears: no mass moves any more."""
        return self.is_drained and all(peer.view.is_drained for peer in self.peers.values())

    @property
    def has_finals(self) -> bool:
        """Whether it knows what every node holds at the end."""
        living = {self.identity, *(peer.identity for peer in self.peers.values())}
        return self.all_are_drained and living <= self.finals.keys()

    def list_unfinished(self) -> list[int]:
        """Returns the places of the nodes whose mass at the end it does not know."""
        peers = (peer.identity for peer in self.peers.values())
        return sorted(peer.place for peer in peers if peer not in self.finals)

    # What the training loop asks for.

    def list_free_peers(self) -> list[Identity]:
        """Returns the nodes that may be sent a parcel: with none on its way to them."""
        return [
            peer.identity
            for peer in self.peers.values()
            if peer.parcel is None and not peer.view.wants_mass and not peer.view.is_finished
        ]

    def share(self, peer: Identity, mass: Mass, now: float) -> None:
        """Sends a share, which was taken out of what this node holds and fits into the wire."""
        self._send_parcel("share", self.peers[peer.life], mass, now, is_narrow=True)

    def ask(self, peer: Identity, now: float) -> bool:
        """Asks for the average of what both hold; False if too much is promised to others."""
        mass = self._holder.read()
        if not self._is_affordable(mass, 0):
            return False
        self._send_parcel("ask", self.peers[peer.life], mass, now)
        return True

    def count_step(self) -> None:
        """Counts a local step."""
        self.steps[self.identity.life] += 1

    # What arrives.

    def receive(self, message: Message, now: float) -> None:
        """Acts on a message."""
        self._notice_absence(now)
        sender = message.sender
        if message.receiver not in (None, self.identity.life) or sender.life == self.identity.life:
            self._drop("of an earlier life")
        elif sender.life in self._left:
            self._acknowledge_goodbye(message)
        elif sender.life in self._declared:
            self._answer_the_dead(message, now)
        else:
            peer = self.peers.get(sender.life) or self._meet(sender, now)
            peer.heard = now
            self._learn_steps(sender.life, message.steps)
            self._dispatch(peer, message, now)

    def _dispatch(self, peer: Peer, message: Message, now: float) -> None:
        if message.kind == "view" and message.view is not None:
            self._learn(peer, message.view, now)
        elif message.kind == "dead":
            self._give_up(now)
        elif message.kind in ("ack", "answer"):
            self._settle(peer, message)
            self._give(now)  # what was promised to a peer can be spared now
        elif peer.query:
            self._drop("before it is known whether this life was declared dead")
        elif message.number == peer.applied and peer.reply is not None:
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
        if message.kind == "ask":
            reply = reply._replace(kind="answer", mass=self._average(peer, message))
        elif message.kind == "share" and message.mass is not None:
            self._journal("receive", peer.identity.life, message.number, message.mass)
            self._holder.add(message.mass)
            self._admit(message.mass)
        elif message.kind == "final" and message.mass is not None:
            self.finals[peer.identity] = message.mass
        peer.reply = reply
        self._send(peer, reply)

    def _average(self, peer: Peer, message: Message) -> Mass | None:
        mine = self._holder.read()
        change = (message.mass - mine) / 2 if message.mass is not None else None
        # Two asks that cross would swap what the two hold: the elder one's counts.
        crosses = peer.parcel is not None and peer.parcel.kind == "ask"
        is_won = crosses and self.identity < peer.identity
        is_affordable = message.mass is not None and self._is_affordable(mine, message.mass.w)
        if change is None or is_won or not is_affordable:
            self._journal("decline", peer.identity.life, message.number, None)
            return None
        self._journal("average", peer.identity.life, message.number, change)
        self._holder.add(change)
        return mine

    def _settle(self, peer: Peer, message: Message) -> None:
        parcel = peer.parcel
        if parcel is None or parcel.number != message.number:
            self._drop("doubled")
            return
        peer.parcel = None
        if parcel.kind == "bye":
            del self.peers[peer.identity.life]
        elif parcel.kind == "ask" and parcel.mass is not None:
            if message.mass is None:
                self._journal("declined", peer.identity.life, message.number, None)
            else:
                change = (message.mass - parcel.mass) / 2
                self._journal("averaged", peer.identity.life, message.number, change)
                self._holder.add(change)

    # The end.

    def leave(self) -> None:
        """Starts to leave: hands what it holds over to a node that goes on, and says goodbye.

        Where no other goes on, it keeps what it holds. `has_left` says when it is done.
        """
        self.is_finished = True
        self._is_leaving = True

    @property
    def has_left(self) -> bool:
        """Whether it has said goodbye to all that it hears."""
        return self._is_leaving and self._said_goodbye and not self.peers

    def _go_on_leaving(self, now: float) -> None:
        if any(peer.parcel for peer in self.peers.values()):
            return
        heirs = [peer for peer in self.peers.values() if not peer.view.is_finished]
        if heirs and self._holder.read().w and not self._said_goodbye:
            mass = self._holder.take()
            self._send_parcel("share", heirs[0], mass, now, event="hand over")
            return
        self._said_goodbye = True
        for peer in self.peers.values():
            self._send_parcel("bye", peer, None, now)

    def _take_leave(self, peer: Peer, message: Message) -> bool:
        """Says goodbye to a node that leaves; False if its answer to an ask is on its way."""
        parcel = peer.parcel
        if parcel is not None and parcel.number <= message.applied:
            if parcel.kind == "ask":
                self._send(peer, parcel)
                return False
            peer.parcel = None
        self._return(peer)
        del self.peers[peer.identity.life]
        self._left.add(peer.identity.life)
        return True

    def _acknowledge_goodbye(self, message: Message) -> None:
        self._drop("of a node that has left")
        if message.kind == "bye":
            sender = message.sender
            reply = Message("ack", self.identity, sender.life, message.number)
            self.outbox.append((sender.address, reply))

    def _send_finals(self, now: float) -> None:
        mass = self._holder.read()
        said = self.finals.get(self.identity)
        has_changed = said is not None and (said.w, said.count) != (mass.w, mass.count)
        self.finals[self.identity] = mass
        for peer in self.peers.values():
            peer.has_final = peer.has_final and not has_changed
            if not peer.has_final and peer.parcel is None:
                peer.has_final = True
                self._send_parcel("final", peer, mass, now)

    # Time.

    def tick(self, now: float) -> None:
        """Declares the silent dead, sends again what was not acknowledged, says that it lives."""
        self._notice_absence(now)
        for peer in list(self.peers.values()):
            if now - peer.heard > self._patience:
                self._declare_dead(peer)
            elif peer.parcel is not None and now - peer.parcel_time > self._patience / 2:
                peer.parcel_time = now
                self._send(peer, peer.parcel)
        if self.wants_mass and not self.is_finished:
            self._revive(now)
        elif self._is_leaving:
            self._go_on_leaving(now)
        elif self.all_are_drained:
            self._send_finals(now)
        if now >= self._next_beat:
            self._next_beat = now + self._patience / BEATS
            self._beat(now)
