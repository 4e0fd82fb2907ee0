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
    If it does not hear all nodes then, the job may go on without it, so its mass is a branch. A
    branch is given up when its node hears of the job, or of an older branch.
    """

    def __init__(
        self, settings: Settings, members: Membership, holder: Holding, journal: JournalAdd
    ):
        # The clock of the node that gave mass, until the training loop has set its schedules to it.
        self.joined_at: int | None = None
        # The branch to which the mass belongs: when it began, in microseconds since 1970; 0 is the
        # job itself.
        self.branch = 0
        self._members = members
        self._holder = holder
        self._journal = journal
        self._num_nodes = settings.num_nodes
        self._is_founder = bool(settings.is_founder)
        # Since when this node has had no mass; None while it has some.
        self._wants_since = None if settings.is_founder else members.now
        # A model to go on with if nobody gives mass, and where it is from.
        self._reserve: tuple[Estate, Mass] | None = None
        self._last_ask = members.now - settings.patience
        journal("found" if settings.is_founder else "join", members.identity.life, 0)

    @property
    def wants_mass(self) -> bool:
        """Says whether this node has no mass, and so cannot make a step."""
        return self._wants_since is not None

    @property
    def may_go_on_alone(self) -> bool:
        """Says whether this node could go on alone: with a model that was saved or given up."""
        return self._reserve is not None and self._reserve[0] is not Estate.FIRST

    def bring(self, mass: Mass, steps: int = 0, clock: int = 0, branch: int = 0) -> None:
        """Keeps a model in reserve, for the case that no node of the job holds mass.

        A saved model has `steps` above 0: the steps that this node had made until the save, those
        before restarts included, with the clock and the branch of then. A first model has none.
        """
        self.branch = branch
        self._reserve = (Estate.SAVED if steps else Estate.FIRST), mass
        self._members.learn_steps(self._members.identity.place, steps)
        self._members.clock = clock

    def want(self, given_up: Mass | None = None) -> None:
        """Begins to want mass, after this node gave up its own; that may stay in reserve.

        A node that already wanted mass keeps the model that it has in reserve.
        """
        self._is_founder = False
        if self._wants_since is None:
            self._wants_since = self._members.now
            self._reserve = None if given_up is None else (Estate.GIVEN_UP, given_up)

    def founded_before(self, known_steps: int) -> bool:
        """Says whether a view has told this founder of steps that it made before it restarted.

        Before the view it had `known_steps`. It has founded the job already, and its model is in
        what the other nodes hold. If it founded the job again, it would add a second model.
        """
        if not self._is_founder or self._members.own_steps <= known_steps:
            return False
        self._members.note(
            "founds",
            f"place {self._members.identity.place} founds once: an earlier life has made steps, "
            "which are in what the others hold. It gave up the model that it brought, and asks "
            "for half of theirs: leave out is_founder=True where it is started again.",
        )
        return True

    def must_yield_to(self, view: View) -> bool:
        """Says whether this node must give up its mass, and notes it for the user if so.

        It must if it holds a branch, and the view is of the job (0), or of a branch that began
        earlier.
        """
        if self.wants_mass or view.wants_mass or view.branch >= self.branch:
            return False
        self._members.note(
            "branch",
            "this node had gone on alone from what it had saved, but others had gone on, too. It "
            "gave up its model, and asks for half of theirs.",
        )
        return True

    def admit(self, clock: int, branch: int) -> None:
        """Takes the clock and the branch of a share if it brings this node its first mass."""
        if self.wants_mass:
            self.branch = branch
            self._members.clock = self.joined_at = clock
            self._journal("admit", self._members.identity.life, clock)
            self._end_want()

    def _end_want(self) -> None:
        """Ends the wait of this node, which has mass now, and drops the model in reserve."""
        self._wants_since = self._reserve = None
        self._members.next_beat = self._members.now  # others may send it shares from now on

    def _ask_for_half(self, peer: Peer) -> None:
        """Asks a peer that holds mass for half of it, at most one peer in a beat.

        If the peer has just founded the job, this node may found it, too, with its own model. So it
        asks only when it has waited for that in vain.
        """
        founds_too = (
            peer.came_without_mass and self._reserve and self._reserve[0] is not Estate.GIVEN_UP
        )
        if founds_too and not self._is_calm():
            return
        if self._members.now - self._last_ask >= self._members.patience / BEATS:
            self._last_ask = self._members.now
            peer.owe_view(begs=True)

    def found(self) -> None:
        """Goes on with the model in reserve, if there is one and no node can give mass."""
        if self._reserve is None or not self._may_bring(self._reserve[0]):
            return
        kind, mass = self._reserve
        is_back = kind is Estate.GIVEN_UP
        self._journal("revive" if is_back else "found", self._members.identity.life, 0, mass)
        self._is_founder = not is_back
        if kind is Estate.SAVED:
            # With all nodes it is the job. Else it stays the branch that it was, or begins one. If
            # the number of nodes is not known, those that are heard count as all.
            is_job = self._all_are_heard() if self._num_nodes else bool(self._members.peers)
            self.branch = 0 if is_job else self.branch or time.time_ns() // 1000
        self._holder.add(mass)
        if kind is Estate.SAVED and self._members.contacts and not self._members.peers:
            self._members.note_alone(" from what it had saved")
        self._end_want()

    def _all_are_heard(self) -> bool:
        """Says whether this node hears all nodes, and all have heard that it has no mass."""
        all_know = self._members.now - self._members.met > self._members.patience / BEATS
        return 0 < self._num_nodes <= len(self._places()) and all_know

    def _places(self) -> set[int]:
        """Returns the places of this node and of all nodes that it hears."""
        others = {peer.identity.place for peer in self._members.peers.values()}
        return others | {self._members.identity.place}

    def _may_bring(self, kind: Estate) -> bool:
        """Says whether this node may use its reserve: no node holds mass, as far as it knows."""
        peers = self._members.peers.values()
        all_are_heard = self._all_are_heard()
        # Nodes that were heard without mass found the job together, each with its model.
        nobody_had = all(peer.came_without_mass for peer in peers)
        nobody_gives = nobody_had and self._is_calm()
        is_new = not any(self._members.steps.values())
        match kind:
            case Estate.GIVEN_UP:  # the node that declared it dead goes on, unless it died, too
                return self._is_calm() and not self._members.list_members()
            case Estate.SAVED:
                return nobody_gives or (all_are_heard and nobody_had)
            case Estate.FIRST if all_are_heard:  # a new job begins, or one that lost all its mass
                return is_new or nobody_gives
            case Estate.FIRST:  # a node that hears few may be cut off from a job that goes on
                return is_new and nobody_gives and 2 * len(self._places()) > self._num_nodes

    def _is_calm(self) -> bool:
        """Says whether this node has wanted mass, and met no node, for longer than the patience."""
        since = self._wants_since
        calm_since = None if since is None else max(since, self._members.met)
        return calm_since is not None and self._members.now - calm_since > self._members.patience

    def learn(self, peer: Peer, view: View) -> None:
        """Asks a peer for half of its mass if the peer has some and this node has none.

        Else notes whether the peer still waits for half of the mass of this node.
        """
        peer.came_without_mass |= view.wants_mass
        if self.wants_mass and not view.wants_mass:
            self._ask_for_half(peer)
        else:
            # A peer that has begged waits until it has mass.
            peer.awaits_half = view.wants_mass and (view.begs or peer.awaits_half)
