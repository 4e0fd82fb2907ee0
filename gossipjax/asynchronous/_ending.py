"""How a node leaves, and how all nodes agree on their final masses when training is over.

docs/internals/asynchronous_protocol.md describes the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gossipjax.asynchronous._membership import Membership, Peer
from gossipjax.asynchronous._messages import Identity, Mass, View
from gossipjax.asynchronous._model import Holding
from gossipjax.asynchronous._post import RETURNED, STUCK, Post

OVER = 1 << 40  # the version of the final mass of a life that is over


class Ending:
    """Ends a life of this node (see `Identity`), alone or together with all other nodes."""

    def __init__(self, members: Membership, post: Post, holder: Holding):
        # The final mass of each life, once it is known, and its version.
        self.finals: dict[Identity, tuple[int, Mass]] = {}
        self.is_ended = False  # whether `finals` are the masses that count, the same on all nodes
        # Whether this node has no part in the end, because final masses did not arrive, from the
        # others here or from here at the others.
        self.is_cut_off = False
        self.is_finished = False  # whether it makes no more steps and sends no more shares
        self.is_leaving = False
        self.is_averaging = False  # whether the program waits in `Node.average`
        self.said_goodbye = False
        self._members = members
        self._post = post
        self._holder = holder
        # When the eldest said that no share is on its way any more; None before.
        self._drained_since: float | None = None
        # Of each peer that says that training is over, the view that says which masses count.
        self._verdicts: dict[Identity, View] = {}
        self._last_report: Any = None  # what this node last told the eldest about its end

    def finish(self) -> None:
        """Notes that this node makes no more steps, and tells the other nodes at once."""
        self.is_finished = True
        self._members.next_beat = self._members.now

    def leave(self) -> None:
        """Starts to leave: says goodbye, and gives its mass to a node that goes on, if any."""
        self.is_finished = self.is_leaving = True

    @property
    def has_left(self) -> bool:
        """Says whether this node has said goodbye to all nodes that it hears."""
        return self.said_goodbye and not self._members.peers

    def list_heirs(self) -> list[Peer]:
        """Returns the nodes that go on and could take the mass of this node, if it has any."""
        peers = self._members.peers.values()
        return [p for p in peers if not p.view.is_finished] if self._holder.total.w else []

    def go_on(self) -> None:
        """Makes the next step, at each tick, of leaving or of agreeing on the end."""
        if self.is_leaving:
            self._go_on_leaving()
        elif self.is_finished and not (self.is_ended or self.is_cut_off):
            self._go_on_ending()

    def _go_on_leaving(self) -> None:
        """Hands the mass to one heir when nothing is on its way, and then says goodbye to all."""
        if any(peer.parcel for peer in self._members.peers.values()):
            return
        heirs = self.list_heirs()
        if heirs and not self.said_goodbye:
            mass = self._holder.take()
            self._post.put("share", heirs[0], mass, event="hand over", text=RETURNED)
            return
        self.said_goodbye = True
        for peer in self._members.peers.values():
            self._post.put("bye", peer, mass=None)

    @property
    def _is_drained(self) -> bool:
        """Says whether this node is finished, and no share or ask of it is on its way any more."""
        parcels = [peer.parcel for peer in self._members.peers.values()]
        is_sending = any(p and p.message.kind in ("share", "ask") for p in parcels)
        return self.is_finished and not is_sending

    def learn(self, peer: Peer, view: View) -> None:
        """Learns from a peer's view whether all are drained, and which final masses count."""
        if view.is_ending and self._drained_since is None:
            self._drained_since = self._members.now
        if view.is_ended:
            self._verdicts[peer.identity] = view

    def _go_on_ending(self) -> None:
        """Exchanges final masses with the others, and ends when the eldest says which count.

        The eldest is the node with the smallest identity, perhaps this one. It decides, so that all
        nodes end with the same masses.
        """
        peers = self._members.peers.values()
        deaths = self._members.deaths
        reachable = [peer for peer in peers if not peer.lacks_final]
        # Among many nodes, some hear late that an elder node is dead. So the word of a younger one
        # is believed if all that are elder have been declared dead.
        living = [peer.identity for peer in reachable if peer.identity.life not in deaths]
        eldest_living = min(living, default=None)
        if eldest_living is not None and eldest_living in self._verdicts:
            self._end(self._verdicts[eldest_living])
            return
        if 2 * len(reachable) < len(peers):  # most peers have not received the final mass
            self.is_cut_off = True
            self.leave()
            return
        if self._drained_since is not None and self._is_drained:
            self._send_finals(reachable)
        eldest = min(reachable, key=lambda peer: peer.identity, default=None)
        if eldest is None or self._members.identity < eldest.identity:
            self._decide(reachable)
        else:
            knows_all = len(self.finals) > len(peers)
            report = (eldest.identity, self._is_drained, self._drained_since, knows_all)
            if report != self._last_report or self._members.now >= self._members.next_beat:
                self._last_report = report
                eldest.owe_view()

    def _decide(self, reachable: list[Peer]) -> None:
        """Says, as the eldest, when all are drained, and when all know the final masses that count.

        A node tells its final mass when everything that it sent has arrived. So no mass can change
        any more when all nodes know the final masses of all nodes.
        """
        members = self._members
        if not (self._is_drained and all(peer.view.is_drained for peer in reachable)):
            return
        if not reachable and members.now - members.reborn < self._members.patience:
            return  # this life has just begun, and has not heard the others yet
        if self._drained_since is None:
            self._drained_since = members.now
        else:
            lives = [members.identity, *(peer.identity for peer in reachable)]
            if (
                not self.finals.keys() >= {*lives}
                or any(not self._knows_all(peer) for peer in reachable)
                or any(self._list_unheard())
            ):
                return
            self.is_ended = True
        for peer in members.peers.values():
            peer.owe_view()

    def _knows_all(self, peer: Peer) -> bool:
        """Says whether a peer knows the same final masses, in the same versions, as this node."""
        return sorted(peer.view.finals) == sorted(self._list_versions())

    def _end(self, view: View) -> None:
        """Ends with the final masses that the eldest's view names; is cut off if one is missing."""
        versions = dict(view.finals)
        finals = self.finals.items()
        kept = {who: final for who, final in finals if versions.get(who.life) == final[0]}
        if len(kept) < len(versions) or self._members.identity not in kept:
            self.is_cut_off = True
        else:
            self.finals = kept
            self.is_ended = True
            self._members.next_beat = self._members.now

    def _list_versions(self) -> tuple[tuple[str, int], ...]:
        """Lists the lives whose final masses this node knows, each with the version that it has."""
        return tuple((who.life, version) for who, (version, _) in self.finals.items())

    def _send_finals(self, reachable: list[Peer]) -> None:
        """Sends each peer this node's final mass, and those of nodes that a peer does not hear."""
        own = self._members.identity
        total = self._holder.total
        version, told = self.finals.get(own, (0, None))
        # A share that came back has changed the mass: then this is its next version.
        if told is None or (told.w, told.exponent) != (total.w, total.exponent):
            self.finals[own] = version + 1, self._holder.read()
        for peer in reachable:
            origins = (own, *self._list_lacking(peer)) if peer.parcel is None else ()
            for origin in origins:  # one a call: a peer gets one parcel at a time
                version, final = self.finals[origin]
                if peer.parcel is None and peer.sent_finals.get(origin.life) != version:
                    peer.sent_finals[origin.life] = version
                    self._post.put("final", peer, final, origin=origin, version=version)

    def _list_lacking(self, peer: Peer) -> list[Identity]:
        """Lists the nodes whose final masses a peer lacks, and which the peer does not hear."""
        own = self._members.identity
        waited = self._members.now - (self._drained_since or self._members.now)
        # The path between two others may be bad. After a while the eldest, which hears all nodes,
        # passes on the final masses that should have come over such a path.
        is_eldest = own < min(peer.view.members, default=own)
        passes_all = is_eldest and waited > (STUCK + 1) * self._members.patience
        heard = {own} if passes_all else {*peer.view.members, peer.identity}
        known = {life for life, _ in peer.view.finals}
        return [who for who in self.finals if who.life not in known and who not in heard]

    def learn_final(self, origin: Identity, version: int, mass: Mass) -> None:
        """Keeps the final mass of another node, `origin`, if its version is newer."""
        known, _ = self.finals.get(origin, (0, None))
        is_new = version > known and origin != self._members.identity and not self.is_ended
        if is_new and self._members.has_room(self.finals):
            self.finals[origin] = version, mass

    def forget_final(self, origin: Identity) -> None:
        """Sets the final mass of a former life to 0, because its node has begun another life."""
        if origin in self.finals and not self.is_ended:
            mass = self.finals[origin][1]
            self.finals[origin] = OVER, mass - mass
            self._members.next_beat = self._members.now

    def mark(self, view: View) -> View:
        """Returns this node's view with the fields that tell how far its end has come."""
        return view._replace(
            finals=self._list_versions(),
            is_finished=self.is_finished,
            is_drained=self._is_drained,
            is_ending=self._drained_since is not None,
            is_ended=self.is_ended,
        )

    def explain_missing(self) -> list[str]:
        """Returns texts that say for which nodes the end still waits, and why."""
        reasons = [f"place {who.place}: not heard here" for who in self._list_unheard()]
        members = self._members
        for peer in sorted(members.peers.values(), key=lambda peer: peer.identity.place):
            place = peer.identity.place
            if not peer.view.is_finished:
                seconds = members.now - members.stepped.get(place, members.now)
                reason = f"still trains, at step {members.steps.get(place)} for {seconds:.0f} s"
            elif not peer.view.is_drained:
                reason = "waits until what it sent has arrived"
            elif peer.identity not in self.finals:
                reason = "has not said what it holds"
            elif not self._knows_all(peer):
                reason = "does not know the end of all others"
            else:
                continue
            reasons.append(f"place {place}: {reason}")
        return reasons

    def _list_unheard(self) -> Iterator[Identity]:
        """Yields the nodes that only a peer hears, and whose end this node does not know."""
        members = self._members
        told = {who for peer in members.peers.values() for who in peer.view.members}
        known_lives = members.peers.keys() | members.declared | members.left
        for who in sorted(told - self.finals.keys() - {members.identity}):
            if who.life not in known_lives:
                yield who
