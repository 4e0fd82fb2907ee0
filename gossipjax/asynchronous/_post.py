"""What a node sends: its outbox, and parcels, which it repeats until they are acknowledged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gossipjax.asynchronous._membership import BEATS, MAX_REASONS, MEMORY, Membership, Parcel, Peer
from gossipjax.asynchronous._messages import Identity, Mass, Message

# In units of patience: a parcel without progress for so long is taken back.
STUCK = 2
SLOW = 8  # a share counts as on its way for this many times the time on the fastest path
MAX_SHUNNED = 16 * MEMORY  # in units of patience: for how long a peer gets no parcel, at most
MIN_SECONDS = 1e-4  # shortest time of a message that clocks can measure
TAKEN_BACK = "taken back by its sender"
RETURNED = "half of what the sender holds"  # the text of the share that answers a share
JournalAdd = Callable[..., None]  # `Journal.add`


class Post:
    """Sends messages, and repeats parcels; each peer gets one parcel at a time."""

    def __init__(self, members: Membership, journal: JournalAdd):
        self.outbox: list[tuple[str, Message]] = []  # messages to send, by address
        self.gone: list[str] = []  # addresses for which waiting messages can be dropped
        self.dropped: dict[str, int] = {}  # reason -> messages that were not acted upon
        self.acknowledged = 0  # parcels with a mass that were acknowledged
        self.staleness = 0  # the sum of the local steps during which each of these was on its way
        self._members = members
        self._journal = journal
        # Addresses at which parcels did not arrive: until when these get none, and for how long in
        # all. A node that begins another life at the same address gets none either.
        self._shunned: dict[str, tuple[float, float]] = {}

    def send(self, peer: Peer, message: Message) -> None:
        """Puts a message to a peer into the outbox; it may get lost on its way."""
        message = message._replace(steps=self._members.own_steps)
        self.outbox.append((peer.identity.address, message))

    def say(self, to: Identity, kind: str, **more: Any) -> None:
        """Makes a message, and sends it to a node, even to one that this node does not hear."""
        more |= {"steps": self._members.own_steps}
        self.outbox.append((to.address, Message(kind, self._members.identity, to.life, **more)))

    def drop(self, reason: str) -> None:
        """Counts a message that is dropped. A reason may contain texts of other nodes."""
        if reason in self.dropped or len(self.dropped) < MAX_REASONS:
            self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def put(
        self,
        kind: str,
        peer: Peer,
        mass: Mass | None,
        *,
        event: str | None = None,
        since: float | None = None,
        **more: Any,
    ) -> None:
        """Sends a peer a parcel, which `repeat` sends again until the peer acknowledges it.

        A share or an ask is journaled first, as `event`. `since` is when it was made.
        """
        members = self._members
        peer.sent += 1
        receiver = peer.identity.life
        more = {"version": members.clock, "applied": peer.applied} | more
        message = Message(kind, members.identity, receiver, peer.sent, mass, **more)
        since = members.now if since is None else since
        peer.parcel = Parcel(message, since, members.own_steps, last_sent=since, progress=since)
        if kind in ("share", "ask"):
            self._journal(event or kind, receiver, peer.sent, mass)
        self.send(peer, message)

    def is_free(self, peer: Peer) -> bool:
        """Says whether this node may send a peer a parcel with a mass now."""
        return peer.parcel is None and not self.shuns(peer)

    def list_moving(self) -> list[Mass]:
        """Returns the shares on their way, without those that a bad or slow path holds up.

        A node sends no more shares while those returned are many, and one path must not stop it.
        """
        now = self._members.now
        peers = self._members.peers.values()
        known = [peer.message_seconds for peer in peers if peer.message_seconds]
        fastest = min(known, default=math.inf)
        slow_before = now - max(SLOW * fastest, self._members.patience / BEATS)
        bad_before = now - self._members.patience / 2
        parcels = [peer.parcel for peer in peers if peer.parcel]
        moving = [p.message for p in parcels if p.progress > bad_before and p.since > slow_before]
        return [one.mass for one in moving if one.kind == "share" and one.mass is not None]

    def shuns(self, peer: Peer) -> bool:
        """Says whether a peer gets no parcels for now, because the last ones did not reach it."""
        until, _ = self._shunned.get(peer.identity.address, (0.0, 0.0))
        is_stuck = peer.parcel is not None and peer.parcel.is_stuck
        return is_stuck or self._members.now < until

    def close_parcel(self, peer: Peer, message: Message) -> Message | None:
        """Ends the parcel that a peer has now acknowledged, answered or refused, and returns it.

        Returns None, and changes nothing, if the message came twice or too late.
        """
        parcel = peer.parcel
        if parcel is None or parcel.message.number != message.number:
            self.drop("doubled")
            return None
        # This node has withdrawn its ask for an average, as no answer came. This late answer has a
        # mass: the change that the peer made when it averaged. The peer undoes that change when the
        # withdrawal arrives, so this node must not make the opposite change.
        if parcel.is_stuck and message.mass is not None:
            self.drop("an answer that came too late")
            return None
        peer.parcel = None
        if message.kind != "refuse" and parcel.message.mass is not None:
            self.acknowledged += 1
            self.staleness += self._members.own_steps - parcel.step
            self._shunned.pop(peer.identity.address, None)
            # A running mean, in which the newest time counts half.
            took = max(peer.spoke - parcel.since, MIN_SECONDS)
            former = peer.message_seconds or took
            peer.message_seconds = (former + took) / 2
        return parcel.message

    def repeat(self) -> list[Peer]:
        """Repeats late parcels, or withdraws them; returns peers that are silent for too long."""
        now = self._members.now
        patience = self._members.patience
        silent: list[Peer] = []
        for peer in self._members.peers.values():
            parcel = peer.parcel
            last_sign = peer.heard
            # A peer must speak itself if it has a parcel. Else it is enough if others hear it.
            if parcel is not None:
                last_sign = max(peer.spoke, parcel.since)
                # A peer that speaks, but does not answer a withdrawal, counts as silent, too.
                if parcel.is_stuck:
                    last_sign = min(last_sign, parcel.progress + (STUCK + 1) * patience)
            if now - last_sign > patience:
                silent.append(peer)
            elif parcel is not None and now - parcel.last_sent > patience / 2:
                parcel.last_sent = now
                is_late = now - parcel.progress > STUCK * patience
                if is_late and parcel.message.mass is not None:
                    self._withdraw(peer, parcel)
                else:
                    self.send(peer, parcel.message)
        return silent

    def _withdraw(self, peer: Peer, parcel: Parcel) -> None:
        """Asks a peer not to apply a parcel that does not arrive: a small message may get through.

        The peer then refuses the parcel, or says that it has applied it. So the parcel counts once.
        """
        peer.lacks_final |= parcel.message.kind == "final"
        place, _, address = peer.identity
        if not parcel.is_stuck:
            parcel.is_stuck = True
            _, pause = self._shunned.get(address, (0.0, 0.0))  # in units of patience
            pause = min(max(2 * pause, MEMORY), MAX_SHUNNED)
            self._shunned[address] = self._members.now + pause * self._members.patience, pause
            self._members.note(
                address,
                f"place {place} at {address} lives, but does not acknowledge what "
                "this node sends: it is left out for a while. If the path there loses large "
                "packets, lower the MTU of both machines.",
            )
            self.drop(f"not acknowledged by place {place} at {address}")
            self.gone.append(address)  # so that no more pieces of it are sent
        self.say(peer.identity, "withdraw", number=parcel.message.number, text=TAKEN_BACK)
