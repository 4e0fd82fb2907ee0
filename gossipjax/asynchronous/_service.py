"""The thread of a node that receives, acknowledges and sends, and knows why nobody answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gossipjax import launch
from gossipjax.asynchronous._messages import (
    MAX_HEADER_BYTES,
    MAX_TEXT,
    Format,
    Message,
    MessageError,
    MisfitError,
    count_bytes,
    decode,
    encode,
)
from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._settings import COMPARE, Settings, may_connect
from gossipjax.asynchronous._transfer import FIRST_PIECE, PROGRESS, Transfers

MAX_ANSWER_BYTES = 4000
TICKS = 50  # ticks during the time after which a node is declared dead
MAX_STRANGERS = 256  # addresses that are answered, and that no node of the job has named
PACKET = 1000  # bytes that fit into a packet on all networks
UNREACHED = "but cannot reach it at"
LINGER_SECONDS = 0.2  # time to send the rest when a node leaves
MAX_SHOWN = 8  # nodes that an error names
LOOK = b"?"  # with which an observer asks a node what it knows
NOTICE_SECONDS = 5.0  # after this wait a line says so
REPEAT_SECONDS = 60.0
FIT = "Give all nodes of the job the same"
OPEN = "Open its port to the others, and let it listen at an address by which they reach it"
LARGE = "If the path loses large packets, lower the MTU of both machines"
WAYS_OUT = (FIT, COMPARE, OPEN, LARGE)  # the first that helps is shown


class Service:
    """Runs the protocol of a node on its sockets, in a thread."""

    def __init__(self, settings: Settings, job: Format):
        try:
            from gossipjax.asynchronous._sockets import Sockets
        except ModuleNotFoundError as error:
            raise ImportError(
                "an asynchronous node needs pyzmq, which is not installed: pip install pyzmq."
            ) from error
        patience = settings.patience
        # Held by whoever uses the protocol or the mass of the node; notified after each exchange.
        self.lock = threading.Condition(threading.RLock())
        self.sent_bytes = 0  # of messages with a mass
        self.misfits: dict[str, str] = {}  # address -> why the node there refuses this one
        # Address -> since when the node there says that it hears this node, while this node hears
        # nothing of it. Then messages pass in one direction only.
        self.hears_us_since: dict[str, float] = {}
        self._sockets = Sockets(settings.listen, settings.secret, patience)
        self.address = self._sockets.address
        self.wake = self._sockets.wake  # makes the thread send the outbox now
        forms = job.list_forms(is_narrow=False)  # the longest that buffers can have
        max_bytes = MAX_HEADER_BYTES + sum(count_bytes(*form) for form in forms)
        self._transfers = Transfers(self.address, patience, max_bytes, self._sockets.send)
        self._strangers: dict[str, float] = {}  # address of a stranger -> when it was answered
        # Messages with a mass, by address, that are sent once the journal on disk has them.
        self._awaiting_journal: list[tuple[str, Message]] = []
        self._settings = settings
        self._job = job
        self._interval = patience / TICKS
        self._last_doing = ""  # what the node did at the last tick, as `Participant.describe` says
        self._next_notice = 0.0  # when a line tells the user that it still does the same
        self._is_closed = False
        self._error: BaseException | None = None  # which ended the thread
        self._thread = threading.Thread(target=self._run, name="gossip", daemon=True)

    def start(self, node: Participant, has_written: Callable[[float], bool]) -> None:
        """Starts the thread; it calls `has_written(seconds)` to wait for the journal."""
        self._node = node
        self._has_written = has_written
        self._thread.start()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a condition holds, tried after each exchange; returns whether it does."""

        def is_over() -> bool:
            launch.advance()  # who waits for other nodes is not stuck
            return self._error is not None or condition()

        with self.lock:
            self.lock.wait_for(is_over, timeout)
            if self._error is not None:
                raise RuntimeError(f"gossip stopped: {self._error!r}.") from self._error
            return condition()

    def close(self) -> None:
        """Ends the thread after it has sent the outbox."""
        self._is_closed = True
        self._sockets.wake()
        self._thread.join()
        self._sockets.close(LINGER_SECONDS)

    def _run(self) -> None:
        """Exchanges messages until `close`; keeps an error, which `wait_until` then raises."""
        try:
            while not self._is_closed:
                self._exchange(self._sockets.receive(self._interval))
            self._exchange([])
        except BaseException as error:
            with self.lock:
                self._error = error
                self.lock.notify_all()

    def _exchange(self, arrived: list[list[Any]]) -> None:
        """Lets the protocol act on what has arrived and on the time, and sends its outbox."""
        node = self._node
        now = time.monotonic()
        # Lives from which a piece came, or (True) the acknowledgement of one.
        heard: list[tuple[str | None, bool]] = []
        # This checks every number of a model, so it is done before the lock, for which steps wait.
        read = [self._read(*frames, now=now, heard=heard) for frames in arrived]
        messages = [message for message in read if message is not None]
        with self.lock:
            # No path is to blame for messages that have not left yet: they are not late.
            for _, message in self._awaiting_journal:
                peer = node.members.peers.get(str(message.receiver))
                if peer is not None and peer.parcel is not None:
                    peer.parcel.last_sent = peer.parcel.progress = now
            for life, has_arrived in heard:
                node.members.note_progress(life, now, has_arrived)
            for message in messages:
                with self._count_errors():
                    node.receive(message, now)
            node.tick(now)
            self._print_wait(node.describe(), now)
            for peer in node.members.peers.values() if self.hears_us_since else ():
                self.hears_us_since.pop(peer.identity.address, None)  # this node hears it now
            outbox = node.post.outbox
            node.post.outbox = []
            gone = node.post.gone
            node.post.gone = []
            self.lock.notify_all()
        # A step does not wait for sockets either.
        for address in gone:
            self._sockets.forget(address)
            self._transfers.forget(address)
        # A message with a mass leaves after its line in the journal is written: else a killed node
        # would have sent weight of which no journal tells. While the disk freezes, these messages
        # wait, and all others leave.
        outbox = self._awaiting_journal + outbox
        self._awaiting_journal = [item for item in outbox if item[1].mass is not None]
        if self._awaiting_journal and not self._has_written(self._interval):
            outbox = [item for item in outbox if item[1].mass is None]
        else:
            self._awaiting_journal = []
        for address, message in outbox:
            with self._count_errors():
                self._note_stranger(address, now)
                self._send(address, message, now)
        self._transfers.tick(now)

    def _print_wait(self, doing: str, now: float) -> None:
        """Prints that the node still compiles or waits: after 5 seconds, and again each minute."""
        reason = doing.split(":")[0]
        if reason != self._last_doing:
            self._last_doing = reason
            self._next_notice = now + NOTICE_SECONDS
        elif now >= self._next_notice and reason.startswith(("compiles", "waits")):
            self._next_notice = now + REPEAT_SECONDS
            print(f"gossipjax: node {self._settings.place} {doing}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _count_errors(self) -> Iterator[None]:
        """Counts a message whose handling raises an error as dropped, so that the node goes on."""
        try:
            yield
        except MessageError as error:
            self._node.post.drop(str(error))
        except Exception as error:
            self._node.post.drop(f"raising {type(error).__name__}")

    def _read(
        self, route: Any, *frames: Any, now: float, heard: list[tuple[str | None, bool]]
    ) -> Message | None:
        """Returns the message in these frames, or the one of which they are the last piece.

        Returns None for other pieces, which it notes in `heard`, for what it answers at once (an
        observer, a node of another job), and for what is no message.
        """
        with self._count_errors():
            if bytes(frames[0][:2]) == LOOK:
                with self.lock:
                    report = self._node.report()
                report["node"]["sent"] = self._sockets.sent
                report["node"]["received"] = self._sockets.received
                self._sockets.answer(bytes(route), json.dumps(report).encode())
                return None
            piece = self._transfers.receive(frames, now)
            if piece is not None:
                heard.append((piece[0], bytes(frames[0][:1]) == PROGRESS))
                if piece[1] is None:
                    return None
                frames = tuple(piece[1])
            try:
                message = decode(frames, self._job)
            except MisfitError as error:
                reason, own = error.args
                self._node.post.drop(reason)
                refusal = f"{self.address} {reason}, not {own[:MAX_TEXT]!r}"
                self._sockets.answer(bytes(route), refusal.encode())
                return None
            # A call is answered over its own connection, too. So its sender knows that this node
            # hears it, even if this node cannot connect to it.
            if message.receiver is None:
                self._sockets.answer(bytes(route), self.address.encode())
            return message
        return None

    def _note_stranger(self, address: str, now: float) -> None:
        """Notes an answered address if it is a stranger's; forgets the oldest of too many."""
        if address in self._node.members.contacts:
            return
        self._strangers.pop(address, None)
        self._strangers[address] = now
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            if oldest not in self._node.members.contacts:
                self._sockets.forget(oldest)

    def _read_answers(self, address: str, now: float) -> None:
        """Reads what an address that is no peer yet has answered to this node's calls.

        An answer says who is there, or why it refuses. Whoever answers and does not become a peer
        hears this node, but cannot connect to this node's address.
        """
        for answer in self._sockets.look_after(address):
            who, _, reason = answer[:MAX_ANSWER_BYTES].decode(errors="replace").partition(" ")
            with self.lock:
                members = self._node.members
                others = {peer.identity.address for peer in members.peers.values()}
                if reason.isprintable() and reason:
                    self.misfits[address] = reason
                elif who not in others | {self.address}:  # else this is another name of a peer
                    since = self.hears_us_since.setdefault(address, now)
                    if now - since > self._settings.patience:
                        members.note(
                            f"one way {address}",
                            f"the node at {address} hears this one, {UNREACHED} {self.address}: "
                            "open this port to it, or listen where it can reach this node.",
                        )

    def _send(self, address: str, message: Message, now: float) -> None:
        """Sends a message to an address; a large one with a mass goes in pieces."""
        if message.receiver is None:
            self._read_answers(address, now)
        frames = encode(message, self._job)
        size = sum(memoryview(frame).nbytes for frame in frames)
        has_mass = message.mass is not None
        if has_mass and size > FIRST_PIECE:
            key = message.receiver, message.kind, message.number
            is_sent = self._transfers.put(address, message.sender.life, key, frames)
        else:
            # A mass that fills packets has a connection for itself. On a path that loses large
            # packets, the small messages, which say that a node lives, then still pass.
            is_sent = self._sockets.send(address, frames, is_bulk=has_mass and size > PACKET)
        if has_mass and is_sent:
            self.sent_bytes += size

    def is_refused(self) -> bool:
        """Says whether waiting is useless: all known nodes have another secret, or another job."""
        if self._node.founding.may_go_on_alone or not self._node.members.contacts:
            return False
        return all(way_out in (FIT, COMPARE) for _, way_out in self._ask_all())

    def explain_silence(self) -> str:
        """Says for each address why nothing came from it, and then what to do."""
        answers = list(itertools.islice(self._ask_all(), MAX_SHOWN))
        ways_out = {way_out for _, way_out in answers}
        if known := [way_out for way_out in WAYS_OUT if way_out in ways_out]:
            way_out = known[0]  # the most useful one
        elif self._settings.num_nodes and self._settings.is_founder is None:
            way_out = (
                f"A job of {self._settings.num_nodes} nodes begins when all of them are there, or "
                "most of them if none has made a step. Start the others"
            )
        elif self._node.members.peers or not answers:  # all wait for mass, or nobody is known
            way_out = "One node must found the job: give it no address, or is_founder=True"
        else:
            way_out = "Give the address of a node that runs"
        text = "; ".join(text for text, _ in answers)
        return f"{text or 'there is no address'}. {way_out}."

    def _ask_all(self) -> Iterator[tuple[str, str | None]]:
        """Yields for each address why nothing came from it, and the way out if there is one."""
        sockets = self._sockets
        with self.lock:
            members = self._node.members
            contacts = sorted(a for a in members.contacts if may_connect(a, self._settings.secret))
            peers = members.peers.values()
            has_mass = {peer.identity.address: not peer.view.wants_mass for peer in peers}
        for address in contacts:
            if address in self.misfits:
                yield f"{address} says that this node is {self.misfits[address]}", FIT
            elif has_mass.get(address):
                yield f"{address} answers and holds a model, but nothing of it arrives here", LARGE
            elif address in has_mass:
                yield f"{address} answers, but has nothing to give", None
            elif obstacle := sockets.find_obstacle(address):
                yield obstacle
            elif address in self.hears_us_since:
                yield f"the node at {address} hears this one, {UNREACHED} {self.address}", OPEN
            else:
                yield f"{address} listens, but does not speak with this node", None
