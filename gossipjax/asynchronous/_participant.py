"""The protocol of asynchronous nodes, without sockets and threads: what a node does with its mass.

docs/internals/asynchronous_protocol.md describes the messages, and which sum of masses is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossipjax.asynchronous._clipping import REMEMBERED, find_limits, measure, pull
from gossipjax.asynchronous._ending import Ending
from gossipjax.asynchronous._founding import Founding
from gossipjax.asynchronous._membership import BEATS, UNKNOWN, Membership, Peer
from gossipjax.asynchronous._messages import Identity, Mass, Message, View
from gossipjax.asynchronous._model import Holding
from gossipjax.asynchronous._post import RETURNED, JournalAdd, Post
from gossipjax.asynchronous._settings import Settings
from gossipjax.asynchronous.algorithms import Choose

MAX_ON_WAY = 2  # no share is sent while this times the weight on its way exceeds what is held
MIN_KEPT = 8  # an average is declined if less than 1 / 8 of the weight might be left after it
HOARDS = "takes more than it gives"  # why a node refuses a share: it must give first


class Participant:
    """The side of one node in the protocol: acts on messages and on time, and moves the mass.

    `members` knows who lives, `post` sends, `founding` gets mass when there is none, and `ending`
    leaves or agrees on the end. None of these four knows the participant. `holder` has the mass,
    `new_life` makes the identity of each life, and `journal` adds a line for each event.
    """

    def __init__(
        self,
        settings: Settings,
        holder: Holding,
        new_life: Callable[[], Identity],
        journal: JournalAdd,
        now: float,
    ):
        self.members = Membership(settings, new_life(), now)
        self.post = Post(self.members, journal)
        self.founding = Founding(settings, self.members, holder, journal)
        self.ending = Ending(self.members, self.post, holder)
        self.is_ready = False  # whether the program has called `Node.wait_for_members`
        self.is_compiling = False  # as `describe` says, so that users know why no step is made
        self._holder = holder
        self._new_life = new_life
        self._journal = journal
        self._settings = settings
        self._received_shares = 0  # since a node last acknowledged a mass from here

    @property
    def life(self) -> str:
        """The name of this node's life; a node that was declared dead begins another life."""
        return self.members.identity.life

    @property
    def may_change(self) -> bool:
        """Says whether this node holds mass that its own steps may still move."""
        return not (self.founding.wants_mass or self.ending.is_finished)

    def all_are_ready(self, count: int) -> bool:
        """Says whether `count` nodes, with this one, are ready to begin, or another has begun."""
        peers = self.members.peers.values()
        views = [peer.view for peer in peers if peer.view.is_ready]
        has_begun = any(self.members.steps.get(peer.identity.place) for peer in peers)
        # Each of them must hear as many others, so that all begin at the same time.
        num_heard = min([len(views), *(len(view.members) for view in views)])
        return has_begun or num_heard + 1 >= count

    def describe(self) -> str:
        """Says what this node does, or what it waits for."""
        ending = self.ending
        members = self.members
        if self.is_compiling:
            return "compiles"
        if ending.is_leaving:
            return "leaves"
        if ending.is_ended or (ending.is_finished and not ending.is_averaging):
            return "has ended its steps"
        if ending.is_finished:
            first, *others = ending.explain_missing() or ["the others"]
            return f"waits in average() for {first}" + f" and {len(others)} more" * bool(others)
        if self.founding.wants_mass:
            givers = sorted(one.place for one in members.list_members())
            heard = sorted(peer.identity.place for peer in members.peers.values())
            if givers:
                return f"waits for a model of one of nodes {givers}"
            return f"waits for a model: hears {f'{heard}, which have none' if heard else 'nobody'}"
        idle = members.now - members.stepped.get(members.identity.place, members.now)
        return "trains" if idle < members.patience else f"has made no step for {idle:.0f} s"

    def report(self) -> dict[str, Any]:
        """Says for an observer what this node does and holds, and what it knows of others."""
        members = self.members
        own: dict[str, Any] = {"steps": members.own_steps, "doing": self.describe()}
        own["weight"] = self._holder.total.weight
        ended = {life: f"dead to {who.place}" for life, (who, _) in members.deaths.items()}
        ended |= dict.fromkeys(members.left, "has left")
        others = [
            peer.identity._asdict()
            | {"steps": members.steps.get(peer.identity.place, 0)}
            | {"ago": members.now - peer.heard}
            for peer in members.peers.values()
        ]
        return {"node": members.identity._asdict() | own, "others": others, "over": ended}

    def choose(self, choose: Choose, turn: int) -> Identity | None:
        """Returns the node to send to at a turn: an algorithm's `choose` takes one in reach."""
        peers = self.members.peers.values()
        reachable = [p.identity for p in peers if not (p.view.wants_mass or self.post.shuns(p))]
        seconds = {peer.identity: peer.message_seconds for peer in peers if peer.message_seconds}
        return choose(reachable, self.members.identity, turn, seconds)

    def may_send(self, identity: Identity, is_share: bool) -> bool:
        """Says whether this node may send another node a share or, if not `is_share`, an ask.

        The other node must hold mass and train, and no parcel may be on its way to it. For a share,
        this node must have mass to spare.
        """
        peer = self.members.peers.get(identity.life)  # None for this node itself
        if peer is None or peer.view.wants_mass or peer.view.is_finished:
            return False
        return self.post.is_free(peer) and (self._can_spare_share() or not is_share)

    def _can_spare_share(self) -> bool:
        """Says whether so little of this node's mass is on its way that it may send more."""
        # A mass on its way gets no updates, and needs memory. So at most two thirds of what a node
        # has may be on their way.
        total = self._holder.total
        shares = self.post.list_moving()
        return MAX_ON_WAY * sum(mass.weight_at(total.exponent) for mass in shares) <= total.w

    def share(self, peer: Identity, mass: Mass, now: float) -> None:
        """Sends a share, which was taken out of this node's mass and is in the form of the wire."""
        self.post.put("share", self.members.peers[peer.life], mass, since=now, is_narrow=True)

    def ask(self, peer: Identity, now: float) -> bool:
        """Asks a peer to average both masses; returns False if too much is promised to others."""
        mass = self._holder.read()
        if not self._is_affordable(mass, 0):
            return False
        self.post.put("ask", self.members.peers[peer.life], mass, since=now)
        return True

    def receive(self, message: Message, now: float) -> None:
        """Lets `_dispatch` act on a peer's message to this life; drops or answers all others."""
        members = self.members
        post = self.post
        members.notice_absence(now)
        sender = message.sender
        if sender.life == self.life:
            post.drop("of this node itself")
        elif message.receiver is None and message.kind != "view":  # only a call is for anybody
            post.drop("for nobody")
        elif message.receiver not in (None, self.life):
            post.drop("of an earlier life")
            post.say(sender, "gone", text=message.receiver)
        elif sender.life in members.left:
            post.drop("of a node that has left")
            if message.kind == "bye":  # this node has answered it, but the answer was lost
                post.say(sender, "ack", number=message.number)
        elif sender.life in members.declared:
            self._answer_the_dead(message)
        elif message.receiver is None and sender.life not in members.peers:
            # A call: a view for whoever listens here, perhaps of a stranger. It is answered and not
            # remembered. Only who receives the answer can name this life, and so becomes a peer.
            post.say(sender, "view", view=self._make_view())
        else:
            peer = members.peers.get(sender.life) or members.meet(sender)
            peer.heard = peer.spoke = now
            members.learn_steps(sender.place, message.steps)
            self._dispatch(peer, message)

    def _dispatch(self, peer: Peer, message: Message) -> None:
        """Acts on a message of a peer by its kind; each parcel is applied once and in order."""
        if message.kind == "view" and message.view is not None:
            self._learn(peer, message.view)
        elif message.kind == "dead":
            self.give_up()
        elif message.kind == "gone":
            self._bury_former_life(message, peer.identity.address)
        elif message.kind in ("ack", "answer", "refuse"):
            self._act_on_answer(peer, message)
            self._give()  # mass that was promised to a peer can be spared now
        elif peer.view is UNKNOWN:
            # The sender or this node may hold a branch, whose mass must not get into the job. The
            # view of the sender tells, and is still to come.
            self.post.drop("of a node that has not told yet what it holds")
        elif peer.query:
            # This node was stopped for a while. If it was declared dead meanwhile, the sender has
            # taken back what it sent before, and adding it here would count it twice.
            self.post.drop("before it is known whether this life was declared dead")
            peer.owe_view()
        elif message.number == peer.applied and peer.reply is not None:
            # The reply was lost, so the same one goes out again: nothing is added twice.
            if message.kind == "withdraw":
                self._undo_average(peer)
            self.post.drop("doubled")
            self.post.send(peer, peer.reply)
        elif self.ending.said_goodbye and message.kind != "bye":
            self.post.drop("after goodbye")  # this mass would be lost; its sender takes it back
        elif message.number == peer.applied + 1:
            self._apply(peer, message)
        else:
            self.post.drop("out of order")

    def _apply(self, peer: Peer, message: Message) -> None:
        """Applies the next parcel of a peer, and acknowledges it; or refuses the parcel.

        A node that has taken too many shares must answer a share with half of its mass. If it
        cannot send that half now, it refuses the share.
        """
        if message.kind == "bye" and not self._take_leave(peer, message):
            return
        peer.applied = message.number
        reply = Message("ack", self.members.identity, peer.identity.life, message.number)
        owes_half = message.kind == "share" and self._owes_half(message)
        can_give = owes_half and self.post.is_free(peer) and self._can_spare_share()
        # A parcel without mass was withdrawn, or cannot be read: its text says which.
        reason = HOARDS if owes_half and not can_give else message.text
        if message.kind != "bye" and (message.mass is None or reason == HOARDS):
            self.post.drop(reason)
            reply = reply._replace(kind="refuse", text=reason)
            owes_half = False
        elif message.kind == "ask":
            reply = reply._replace(kind="answer", mass=self._average(peer, message))
        elif message.kind == "share" and message.mass is not None:
            mass, parts = self._clip(peer, message.mass)
            self._journal("receive", peer.identity.life, message.number, mass, parts or 1.0)
            self._holder.add(mass)
            self.founding.admit(message.version, peer.view.branch)
        elif message.kind == "final" and message.mass is not None:
            self.ending.learn_final(message.origin or peer.identity, message.version, message.mass)
        peer.reply = reply
        self.post.send(peer, reply)
        if owes_half:
            self.post.put("share", peer, self._holder.halve(), event="grant", text=RETURNED)

    def _clip(self, peer: Peer, mass: Mass) -> tuple[Mass, tuple[float, ...]]:
        """Pulls a share towards this node's model (and momentum) if it is too far from them.

        Returns the share, and for each of them the part of the distance that is kept; `()` if all.
        """
        clip = self._settings.clip
        if clip is None or not (self._holder.total.w and mass.w):  # else nothing to compare
            return mass, ()
        own = self._holder.read()
        models = self._settings.algorithm.models
        limits = find_limits([p.distances for p in self.members.peers.values()], clip, models)
        distances = measure(mass, own, models)
        peer.distances = (*peer.distances, distances)[-REMEMBERED:]
        mass, parts = pull(mass, own, distances, limits)
        if parts:  # this only counts the share: the node takes it
            self.post.drop(f"clipped, of place {peer.identity.place}")
        return mass, parts

    def _owes_half(self, message: Message) -> bool:
        """Counts a share that came; says whether this node must answer it with half of its mass.

        It must if it has taken more than `max_received` shares since it last gave one. Else a slow
        node would gather all weight.
        """
        # Even a node whose training hangs answers with such halves. So they count neither as taken
        # here, nor as given in `_act_on_answer`: else it would seem to train.
        if message.text == RETURNED:
            return False
        self._received_shares += 1
        return self._received_shares > self._settings.max_received and self.may_change

    def _average(self, peer: Peer, message: Message) -> Mass | None:
        """Averages with the asker; returns the change here, which the asker subtracts from its own.

        Returns None, which declines, if that could leave this node without enough weight.
        """
        assert message.mass is not None
        mine = self._holder.read()
        # If two nodes ask each other at once and both answer, they swap models and do not average.
        # So the one with the smaller identity declines, and only its ask is answered.
        crosses = peer.parcel is not None and peer.parcel.message.kind == "ask"
        own_ask_wins = crosses and self.members.identity < peer.identity
        if own_ask_wins or not self._is_affordable(mine, message.mass.weight_at(mine.exponent)):
            self._journal("decline", peer.identity.life, message.number)
            return None
        change = (message.mass - mine) / 2
        self._journal("average", peer.identity.life, message.number, change)
        self._holder.add(change)
        return change

    def _is_affordable(self, mine: Mass, weight: Any) -> bool:
        """Says whether enough of `mine` is left after an average with `weight` and pending asks.

        An average with weight 0 takes half of `mine`. An answer to a pending ask takes at most half
        of the mass that this node held when it asked.
        """
        parcels = [peer.parcel for peer in self.members.peers.values()]
        asks = [p.message for p in parcels if p and not p.is_stuck and p.message.kind == "ask"]
        promised = sum(ask.mass.weight_at(mine.exponent) for ask in asks if ask.mass is not None)
        return (mine.w + weight) / 2 - promised / 2 >= mine.w / MIN_KEPT > 0

    def _undo_average(self, peer: Peer) -> None:
        """Undoes the newest average with a peer that got no answer and has withdrawn its ask."""
        assert peer.reply is not None
        change = peer.reply.mass
        total = self._holder.total
        # The weight must stay above 0; this node may have sent most of it on since.
        if change is not None and total.w > change.weight_at(total.exponent):
            self._journal("undo", peer.identity.life, peer.applied, -change)
            self._holder.add(-change)
            peer.reply = peer.reply._replace(kind="refuse", mass=None, text="not answered in time")

    def _act_on_answer(self, peer: Peer, message: Message) -> None:
        """Acts on a peer's acknowledgement, answer or refusal of the parcel of this node."""
        parcel = self.post.close_parcel(peer, message)
        if parcel is None:  # the answer came twice or too late
            return
        if message.kind == "refuse":
            self.post.drop(f"refused by place {peer.identity.place}: {message.text}")
            self._take_back(parcel)
        elif parcel.mass is not None and parcel.text != RETURNED:
            self._received_shares = 0
        life = peer.identity.life
        if parcel.kind == "bye":
            del self.members.peers[life]
        elif parcel.kind == "ask" and message.mass is not None:
            self._journal("averaged", life, message.number, -message.mass)
            self._holder.add(-message.mass)
        elif parcel.kind == "ask":
            self._journal("declined", life, message.number)

    def _take_back(self, parcel: Message) -> None:
        """Adds back the mass of a share that its receiver has not applied and will never apply."""
        if parcel.kind == "share" and parcel.mass is not None:
            self._journal("return", str(parcel.receiver), parcel.number, parcel.mass)
            self._holder.add(parcel.mass)

    def _learn(self, peer: Peer, view: View) -> None:
        """Learns from a peer's view; gives up this node's mass if the view says that it must.

        Else gives half of the mass to nodes that wait for it or, without mass, asks the peer.
        """
        known_steps = self.members.own_steps
        self.members.learn(peer, view)
        self.ending.learn(peer, view)
        if self.founding.founded_before(known_steps):
            self.give_up(keeps=False)
        elif self.founding.must_yield_to(view) or self.members.is_dead_to_others(
            view, self.ending.is_finished
        ):
            self.give_up()
        else:
            self.founding.learn(peer, view)
            self._give()

    def _give(self) -> None:
        """Sends half of this node's mass to each node that waits for it, once it can be spared."""
        ending = self.ending
        # While final masses are being counted, none may change.
        if self.founding.wants_mass or ending.is_leaving or ending.finals:
            return
        for peer in self.members.peers.values():
            may_send = peer.awaits_half and self.post.is_free(peer) and self._can_spare_share()
            if may_send and self._is_affordable(self._holder.total, 0):
                peer.awaits_half = False  # it asks again if it still has no mass
                self.post.put("share", peer, self._holder.halve(), event="grant")

    def _answer_the_dead(self, message: Message) -> None:
        """Tells a node that this one has declared it dead.

        If each has declared the other dead, the one that does not outlive the other gives up.
        """
        sender = message.sender
        view = message.view or View()
        is_mutual = self.life in {life for _, life, _ in view.deaths}
        # If both gave up, a job of two would lose its mass.
        if is_mutual and not self.members.outlives(sender, view.members):
            self.give_up()
            return
        self.post.drop("of the dead")
        if message.kind != "dead":
            self.post.say(sender, "dead")

    def _declare_dead(self, peer: Peer) -> None:
        """Declares a peer dead, and takes back the share that it has not acknowledged."""
        self.members.declare_dead(peer)
        self.post.gone.append(peer.identity.address)
        # If the peer lives and has applied the share, nothing is counted twice: it is told of its
        # death before it is heard again, and then gives up all that it holds.
        if peer.parcel is not None:
            self._take_back(peer.parcel.message)

    def _bury_former_life(self, message: Message, address: str) -> None:
        """Declares a former life of a node dead: at its address the node has begun another one."""
        former_life = message.text  # to which this node wrote
        peer = self.members.peers.get(former_life)
        if peer is not None and peer.identity.address == address:
            self._declare_dead(peer)
            self.ending.forget_final(peer.identity)

    def give_up(self, event: str = "give up", keeps: bool = True) -> None:
        """Takes this node's mass (its model and weight) away, and begins a new life without mass.

        If `keeps`, the mass stays in reserve, in case that no other node gives any.
        """
        mass = self._holder.take()
        self._journal(event, self.life, 0, mass)
        self.founding.want(mass if keeps else None)
        self.ending.forget_final(self.members.identity)
        self.members.begin_life(self._new_life())
        self._journal("join", self.life, 0)

    def _take_leave(self, peer: Peer, message: Message) -> bool:
        """Forgets a peer that says goodbye; returns False if its answer must arrive here first."""
        parcel = None if peer.parcel is None else peer.parcel.message
        if parcel is not None and parcel.number > message.applied:
            self._take_back(parcel)  # it leaves without having applied this parcel
        elif parcel is not None and parcel.kind == "ask":
            # It has answered this ask and changed its mass, but the answer is not here yet. If
            # it left now, this node could not make the opposite change.
            self.post.send(peer, parcel)
            return False
        del self.members.peers[peer.identity.life]
        self.members.left.add(peer.identity.life)
        return True

    def tick(self, now: float) -> None:
        """Does what is due by now: repeats parcels, finds the dead, tells that this node lives."""
        members = self.members
        members.notice_absence(now)
        for peer in self.post.repeat():
            self._declare_dead(peer)
        if self.founding.wants_mass and not self.ending.is_finished:
            self.founding.found()
        else:
            self.ending.go_on()
        calls: list[str] = []
        if now >= members.next_beat:
            members.next_beat = now + self.members.patience / BEATS
            calls, gone = members.beat()
            self.post.gone += gone
        self._send_views(calls)

    def _send_views(self, calls: list[str]) -> None:
        """Sends the views that are due, and `calls`, before all else in the outbox.

        A peer drops parcels of a node of which it has got no view yet.
        """
        owing = [(p, p.owed_view) for p in self.members.peers.values() if p.owed_view is not None]
        if not (owing or calls):
            return
        later = self.post.outbox
        self.post.outbox = []
        view = self._make_view()
        for peer, says in owing:
            peer.owed_view = None
            self.post.say(peer.identity, "view", view=view._replace(query=peer.query, **says))
        call = Message("view", self.members.identity, None, view=view)
        self.post.outbox += [(address, call) for address in calls]
        self.post.outbox += later

    def _make_view(self) -> View:
        """Makes the view that says what this node knows, does and wants."""
        view = self.members.make_view()
        view = view._replace(
            wants_mass=self.founding.wants_mass,
            is_ready=self.is_ready,
            branch=self.founding.branch,
        )
        return self.ending.mark(view)
