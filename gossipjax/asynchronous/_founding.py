"""How a node without mass gets some: another node gives half of its own, or it brings a model."""

from __future__ import annotations

import enum
import time

from gossipjax.asynchronous._membership import BEATS, Membership, Peer
from gossipjax.asynchronous._messages import Mass, View
from gossipjax.asynchronous._model import Holding
from gossipjax.asynchronous._post import JournalAdd
from gossipjax.asynchronous._settings import Settings


class Estate(enum.Enum):
    """The origin of a model that a node without mass may bring."""

    FIRST = enum.auto()  # from the program, as in all nodes of a new job
    SAVED = enum.auto()  # from a checkpoint of an earlier process of this node
    GIVEN_UP = enum.auto()  # from this process, which was declared dead


class Founding:
    """Gets mass for a node that has none, and says who founds the job.

    A node brings a model only where nobody holds mass: a second model would draw the others back.
    What a node brings while it does not hear all is a branch.
    """

    def __init__(self, settings: Settings, members: Membership, holder: Holding, add: JournalAdd):
        self.joined_at: int | None = None  # the clock of who gave, until the loop has taken note
        # When the branch began to which the mass belongs, in microseconds since 1970; 0 is the job.
        self.branch = 0
        self._members = members
        self._holder = holder
        self._journal = add
        self._num_nodes = settings.num_nodes
        self._is_founder = bool(settings.is_founder)
        self._wants_since = None if settings.is_founder else members.now
        self._estate: tuple[Estate, Mass] | None = None  # a model for the case that nobody gives
        self._last_beg = members.now - settings.patience
        add("found" if settings.is_founder else "join", members.identity.life, 0, None)

    @property
    def wants_mass(self) -> bool:
        """Whether this node has no mass, and so cannot make a step."""
        return self._wants_since is not None

    @property
    def may_go_on_alone(self) -> bool:
        """Whether it has a model other than a first one, to go on with if nobody gives mass."""
        return self._estate is not None and self._estate[0] is not Estate.FIRST

    def bring(self, mass: Mass, steps: int = 0, clock: int = 0, branch: int = 0) -> None:
        """Keeps a model, a first one or a saved one, for a job in which no node holds mass.

        With a saved model, `steps` are the steps that all lives of this node had made by then.
        """
        self.branch = branch
        self._estate = (Estate.SAVED if steps else Estate.FIRST), mass
        self._members.learn_steps(self._members.identity.place, steps)
        self._members.clock = clock

    def want(self, given_up: Mass | None = None) -> None:
        """Begins to want mass, and keeps the mass that it gave up in case nobody gives any.

        A node that wanted mass before keeps the model that it had for that case.
        """
        self._is_founder = False
        if self._wants_since is None:
            self._wants_since = self._members.now
            self._estate = None if given_up is None else (Estate.GIVEN_UP, given_up)

    def has_founded_before(self, made: int) -> bool:
        """Whether this founder, which made these steps, has learned that its place made more.

        An earlier life made them. It founded the job, and its model is in what the others hold: a
        second founder would add another model.
        """
        if not self._is_founder or self._members.own_steps <= made:
            return False
        self._members.note(
            "founds",
            f"place {self._members.identity.place} founds once: an earlier life has made steps, "
            "which are in what the others hold. It gave up the model that it brought, and asks "
            "for half of theirs: leave out is_founder=True where it is started again.",
        )
        return True

    def is_outdated(self, view: View) -> bool:
        """Whether it holds a branch, and hears of the job, or of an older branch."""
        if self.wants_mass or view.wants_mass or self.branch <= view.branch:
            return False
        self._members.note(
            "branch",
            "this node had gone on alone from what it had saved, but others had gone on, too. It "
            "gave up its model, and asks for half of theirs.",
        )
        return True

    def admit(self, clock: int, branch: int) -> None:
        """Has got a share, with the clock of who gave it, and the branch that it belongs to."""
        if self.wants_mass:
            self.branch = branch
            self._members.clock = self.joined_at = clock
            self._journal("admit", self._members.identity.life, clock, None)
            self._end_want()

    def _end_want(self) -> None:
        self._wants_since = self._estate = None
        self._members.next_beat = self._members.now  # others may send it shares from now on

    def _beg(self, peer: Peer) -> None:
        """Asks one node at a time for half of its mass, unless both may found the job together."""
        founds_too = peer.wanted and self._estate and self._estate[0] is not Estate.GIVEN_UP
        if founds_too and not self._is_calm():
            return
        if self._members.now - self._last_beg >= self._members.patience / BEATS:
            self._last_beg = self._members.now
            peer.owe_view(begs=True)

    def found(self) -> None:
        """If nobody is left to give mass, takes the old mass back or brings a model."""
        if self._estate is None or not self._may_bring(self._estate[0]):
            return
        kind, mass = self._estate
        is_back = kind is Estate.GIVEN_UP
        self._journal("revive" if is_back else "found", self._members.identity.life, 0, mass)
        self._is_founder = not is_back
        if kind is Estate.SAVED:  # an older branch stays one
            # Where nobody has said how many nodes there are, those that are heard are all.
            is_job = self._all_are_heard() if self._num_nodes else bool(self._members.peers)
            self.branch = 0 if is_job else self.branch or time.time_ns() // 1000
        self._holder.add(mass)
        if kind is Estate.SAVED and self._members.contacts and not self._members.peers:
            self._members.note_alone(" from what it had saved")
        self._end_want()

    def _all_are_heard(self) -> bool:
        # Long enough ago that the node met last has heard that this one holds nothing.
        is_known = self._members.now - self._members.met > self._members.patience / BEATS
        return 0 < self._num_nodes <= len(self._places()) and is_known

    def _places(self) -> set[int]:
        others = {peer.identity.place for peer in self._members.peers.values()}
        return others | {self._members.identity.place}

    def _may_bring(self, kind: Estate) -> bool:
        peers = self._members.peers.values()
        all_are_heard = self._all_are_heard()
        # Nodes that were heard without mass found the job together, each with its model.
        nobody_had = all(peer.wanted for peer in peers)
        nobody_gives = nobody_had and self._is_calm()
        is_new = not any(self._members.steps.values())
        match kind:
            case Estate.GIVEN_UP:  # who declared it dead goes on with the job, unless it died, too
                return self._is_calm() and not self._members.list_members()
            case Estate.SAVED:
                return nobody_gives or (all_are_heard and nobody_had)
            case Estate.FIRST if all_are_heard:  # a new job begins, or one that lost all its mass
                return is_new or nobody_gives
            case Estate.FIRST:  # a node that hears few may be cut off from a job that goes on
                return is_new and nobody_gives and 2 * len(self._places()) > self._num_nodes

    def _is_calm(self) -> bool:
        """Whether it has wanted mass for long, and met no other node meanwhile."""
        since = self._wants_since
        calm_since = None if since is None else max(since, self._members.met)
        return calm_since is not None and self._members.now - calm_since > self._members.patience

    def learn(self, peer: Peer, view: View) -> None:
        """Learns from a view whether a peer has mass, and whether it waits for some."""
        peer.wanted |= view.wants_mass
        if self.wants_mass and not view.wants_mass:
            self._beg(peer)
        else:
            peer.waits = view.wants_mass and (view.begs or peer.waits)
