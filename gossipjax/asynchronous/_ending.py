"""How a node leaves, and how all nodes agree on their final masses when training is over.

docs/internals/asynchronous_protocol.md describes the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from gossipjax.asynchronous._membership import MAX_PLACES, Membership, Peer
from gossipjax.asynchronous._messages import Identity, Mass, View
from gossipjax.asynchronous._settings import Settings

# In units of patience: a parcel without progress for so long is taken back.
STUCK = 2
RETURNED = "half of what the sender holds"  # the text of the share that answers a share
OVER = 1 << 40  # the version of the final mass of a life that is over


@runtime_checkable  # the tests check types
class Holder(Protocol):
    """The mass of a node: `read` copies it, `add` adds to it, `halve` takes half, `take` takes all.

    The protocol changes the mass only by these methods.
    """

    def read(self) -> Mass: ...
    @property
    def total(self) -> Mass: ...  # the weight, without the numerator
    def add(self, mass: Mass) -> None: ...
    def halve(self) -> Mass: ...
    def take(self) -> Mass: ...


class Ending(Membership):
    """A life that ends, alone or together with all other lives."""

    def __init__(self, settings: Settings, holder: Holder, *more: Any):
        super().__init__(settings, *more)
        # The final mass of each life, once it is known, and its version.
        self.finals: dict[Identity, tuple[int, Mass]] = {}
        self.is_ended = False  # whether `finals` are the masses that count, the same on all nodes
        self.is_cut_off = False  # whether final masses did not arrive, here or at the others
        self.is_finished = False  # whether it makes no more steps and sends no more shares
        self._holder = holder
        self._is_leaving = False
        self._said_goodbye = False
        self._ending_since: float | None = None  # when all were drained, as the eldest said
        self._told: Any = None  # what the eldest last heard about the end

    def finish(self, now: float) -> None:
        """Makes no more steps, and tells the other nodes."""
        self.is_finished = True
        self._next_beat = now

    def leave(self) -> None:
        """Starts to leave: says goodbye, and gives its mass to a node that goes on, if any."""
        self.is_finished = True
        self._is_leaving = True

    @property
    def has_left(self) -> bool:
        """Whether this node has said goodbye to all nodes that it hears."""
        return self._is_leaving and self._said_goodbye and not self.peers

    def list_heirs(self) -> list[Peer]:
        """Returns the nodes that go on and could take the mass of this node, if it has any."""
        going_on = [peer for peer in self.peers.values() if not peer.view.is_finished]
        return going_on if self._holder.total.w else []

    @property
    def is_drained(self) -> bool:
        """Whether this node sends nothing any more, and none of its messages is on its way."""
        parcels = (peer.parcel for peer in self.peers.values())
        is_sending = any(parcel and parcel.kind in ("share", "ask") for parcel in parcels)
        return self.is_finished and not is_sending

    def explain_missing(self) -> list[str]:
        """Says for each node whose end is not known to all nodes yet why it is not."""
        reasons = [f"place {who.place}: not heard here" for who in self._list_indirect()]
        known = self._list_versions()
        for peer in sorted(self.peers.values(), key=lambda peer: peer.identity.place):
            place = f"place {peer.identity.place}:"
            if not peer.view.is_finished:
                steps = self.steps.get(peer.identity.place, 0)
                seconds = self._last_tick - self._stepped.get(peer.identity.place, self._began)
                reasons.append(f"{place} still trains, at step {steps} for {seconds:.0f} s")
            elif not peer.view.is_drained:
                reasons.append(f"{place} waits until what it sent has arrived")
            elif peer.identity not in self.finals:
                reasons.append(f"{place} has not said what it holds")
            elif set(peer.view.finals) != set(known):
                reasons.append(f"{place} does not know the end of all others")
        return reasons

    def _list_indirect(self) -> Iterator[Identity]:
        """Yields the lives that only a peer hears, and whose end this node does not know."""
        members = {who for peer in self.peers.values() for who in peer.view.members}
        for who in sorted(members - self.finals.keys() - {self.identity}):
            is_over = who.life in self._declared or who.life in self._left
            if who.life not in self.peers and not is_over:
                yield who

    def _learn(self, peer: Peer, view: View, now: float) -> None:
        super()._learn(peer, view, now)
        if view.is_ending and self._ending_since is None:
            self._ending_since = now
        if self._ending_since is not None:
            peer.lacks = self._list_lacking(peer, now)
        if view.is_ended and self.is_finished and not (self.is_ended or self.is_cut_off):
            self._end(view)

    def _go_on_leaving(self, now: float) -> None:
        if any(peer.parcel for peer in self.peers.values()):
            return
        heirs = self.list_heirs()
        if heirs and not self._said_goodbye:
            mass = self._holder.take()
            self._send_parcel("share", heirs[0], mass, now, event="hand over", text=RETURNED)
            return
        self._said_goodbye = True
        for peer in self.peers.values():
            self._send_parcel("bye", peer, None, now)

    def _go_on_ending(self, now: float) -> None:
        """Exchanges final masses, once the eldest says that all are drained and who counts."""
        near = [peer for peer in self.peers.values() if not peer.fails]
        if 2 * len(near) < len(self.peers):
            self.is_cut_off = True
            self.leave()
            return
        if self._ending_since is not None and self.is_drained:
            self._send_finals(near)
        eldest = min(near, key=lambda peer: peer.identity, default=None)
        if eldest is None or self.identity < eldest.identity:
            self._decide(near, now)
        else:
            knows_all = len(self.finals) > len(self.peers)
            tells = (eldest.identity, self.is_drained, self._ending_since, knows_all)
            if tells != self._told or now >= self._next_beat:
                self._told = tells
                self._send_view(eldest)

    def _decide(self, near: list[Peer], now: float) -> None:
        """As the eldest, says that all are drained, and later that the masses all know count.

        When a node tells its final mass, everything that it sent has arrived. So a node that knows
        the final masses of all nodes will get no more.
        """
        if not (self.is_drained and all(peer.view.is_drained for peer in near)):
            return
        if not near and now - self._reborn < self._patience:
            return  # it knows nobody yet
        if self._ending_since is None:
            self._ending_since = now
        else:
            versions = self._list_versions()
            count = len(versions)
            if (
                any(len(peer.view.finals) != count for peer in near)
                or any(peer.identity not in self.finals for peer in near)
                or self.identity not in self.finals
                or any(set(peer.view.finals) != set(versions) for peer in near)
                or any(self._list_indirect())
            ):
                return
            self.is_ended = True
        for peer in self.peers.values():
            self._send_view(peer)

    def _end(self, view: View) -> None:
        """Takes over the masses that count; has no part in the end if one is missing."""
        counts = dict(view.finals)
        finals = self.finals.items()
        kept = {who: final for who, final in finals if counts.get(who.life) == final[0]}
        if len(kept) < len(counts):
            self.is_cut_off = True
        else:
            self.finals = kept
            self.is_ended = True
            self._next_beat = self._last_tick

    def _list_versions(self) -> tuple[tuple[str, int], ...]:
        return tuple((who.life, version) for who, (version, _) in self.finals.items())

    def _send_finals(self, near: list[Peer]) -> None:
        """Tells each peer the final mass of this life, and of lives whose end it does not know."""
        total = self._holder.total
        version, said = self.finals.get(self.identity, (0, None))
        if said is None or (said.w, said.exponent) != (total.w, total.exponent):
            self.finals[self.identity] = version + 1, self._holder.read()
        for peer in near:
            if peer.parcel is not None:
                continue
            for origin in (self.identity, *peer.lacks):
                version, final = self.finals[origin]
                if peer.finals.get(origin.life) != version:
                    peer.finals[origin.life] = version
                    self._send_parcel(
                        "final", peer, final, self._last_tick, origin=origin, version=version
                    )
                    break

    def _list_lacking(self, peer: Peer, now: float) -> list[Identity]:
        """Lists the ends that a peer does not know, by its view, nor can hear from others."""
        late = now - (self._ending_since or now)
        # A path between two others may be bad: the eldest passes on what is late, as it hears all.
        is_eldest = self.identity < min(peer.view.members, default=self.identity)
        passes_all = is_eldest and late > (STUCK + 1) * self._patience
        heard = {self.identity} if passes_all else {*peer.view.members, peer.identity}
        known = {life for life, _ in peer.view.finals}
        return [who for who in self.finals if who.life not in known and who not in heard]

    def _learn_final(self, origin: Identity, version: int, mass: Mass) -> None:
        known, _ = self.finals.get(origin, (0, None))
        is_new = version > known and origin != self.identity and not self.is_ended
        if is_new and len(self.finals) < MAX_PLACES:
            self.finals[origin] = version, mass

    def _end_final(self, origin: Identity) -> None:
        """Sets the final mass of a life to nothing, because its process has begun another life.

        All nodes learn this in the way in which they learn final masses. If a node was killed after
        it told its final mass, the mass counts on all nodes.
        """
        if origin in self.finals and not self.is_ended:
            zero = self.finals[origin][1]
            zero -= zero
            self.finals[origin] = OVER, zero
            self._next_beat = self._last_tick

    def _begin_life(self, now: float) -> None:
        self._end_final(self.identity)
        super()._begin_life(now)

    def _make_view(self) -> View:
        view = super()._make_view()
        return view._replace(
            finals=self._list_versions(),
            is_finished=self.is_finished,
            is_drained=self.is_drained,
            is_ending=self._ending_since is not None,
            is_ended=self.is_ended,
        )
