"""The thread of a node that receives, acknowledges and sends during the computation."""

from __future__ import annotations

import contextlib
import json
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
    decode,
    encode,
    read_json,
)
from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._settings import Settings
from gossipjax.asynchronous._transfer import FIRST_PIECE, PROGRESS, Transfers

TICKS = 50  # ticks during the time after which a node is declared dead
MISFIT = b"M"  # the first byte of what tells a node of another job so
MAX_MISFIT_BYTES = 4000
MAX_STRANGERS = 256  # addresses that are answered, and that no node of the job has named
PACKET = 1000  # bytes that fit into a packet on all networks
LINGER_SECONDS = 0.2  # time to send the rest when a node leaves


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
        # Held while the protocol or what the node holds is used.
        self.lock = threading.Condition(threading.RLock())
        self.sent_bytes = 0  # of messages with a mass
        self.misfits: dict[str, str] = {}  # address -> why the node there takes this one for none
        self._sockets = Sockets(settings.listen, settings.secret)
        self.address = self._sockets.address
        self.is_refused_at = self._sockets.is_refused_at
        self.wake = self._sockets.wake  # makes the thread send the outbox now
        buffers = zip(job.sizes, job.dtypes, strict=True)
        max_bytes = MAX_HEADER_BYTES + sum(size * dtype.itemsize for size, dtype in buffers)
        self._transfers = Transfers(self.address, patience, max_bytes, self._sockets.send)
        self._strangers: dict[str, float] = {}  # strangers, and when they were answered
        self._held: list[tuple[str, Message]] = []  # until the journal is written
        self._patience = patience
        self._job = job
        self._interval = patience / TICKS
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gossip", daemon=True)

    def start(self, node: Participant, has_written: Callable[[float], bool]) -> None:
        """Starts the thread; it calls `has_written(seconds)` to wait for the journal."""
        self._node = node
        self._has_written = has_written
        self._thread.start()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a condition of the node holds; tries it after every event.

        A caller waits for other nodes, so the launcher is told that this process advances.
        """

        def is_over() -> bool:
            launch.advance()
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
        try:
            while not self._is_closed:
                self._exchange(self._sockets.receive(self._interval))
            self._exchange([])
        except BaseException as error:
            with self.lock:
                self._error = error
                self.lock.notify_all()

    def _exchange(self, arrived: list[list[Any]]) -> None:
        node = self._node
        now = time.monotonic()
        heard: list[tuple[str | None, bool]] = []
        # Every number is checked here, before the lock, for which a step would have to wait.
        messages = [m for frames in arrived if (m := self._read(frames, now, heard)) is not None]
        with self.lock:
            for _, message in self._held:  # no path is to blame for what has not left yet
                peer = node.members.peers.get(str(message.receiver))
                if peer is not None and peer.parcel is not None:
                    peer.parcel.repeated = peer.parcel.progress = now
            for life, has_arrived in heard:
                node.members.note_progress(life, now, has_arrived)
            for message in messages:
                with self._survive():
                    node.receive(message, now)
            node.tick(now)
            outbox = node.post.outbox
            node.post.outbox = []
            gone = node.post.gone
            node.post.gone = []
            self.lock.notify_all()
        # A step does not wait for sockets either.
        for address in gone:
            self._sockets.forget(address)
            self._transfers.forget(address)
        # What leaves is in the journal, or a kill would spoil the account. While the disk freezes,
        # all that has no mass goes on.
        outbox = self._held + outbox
        self._held = [item for item in outbox if item[1].mass is not None]
        if self._held and not self._has_written(self._interval):
            outbox = [item for item in outbox if item[1].mass is None]
        else:
            self._held = []
        for address, message in outbox:
            with self._survive():
                self._note_stranger(address, now)
                self._send(address, message)
        self._transfers.tick(now)

    @contextlib.contextmanager
    def _survive(self) -> Iterator[None]:
        """Counts an error that one message raises, so that the node goes on."""
        try:
            yield
        except MessageError as error:
            self._node.post.drop(str(error))
        except Exception as error:
            self._node.post.drop(f"raising {type(error).__name__}")

    def _read(
        self, frames: list[Any], now: float, heard: list[tuple[str | None, bool]]
    ) -> Message | None:
        """Returns the message in these frames, or in the pieces of which they are the last."""
        with self._survive():
            if bytes(frames[0][:1]) == MISFIT:
                self._note_misfit(frames)
                return None
            piece = self._transfers.receive(frames, now)
            if piece is not None:
                heard.append((piece[0], bytes(frames[0][:1]) == PROGRESS))
                if piece[1] is None:
                    return None
                frames = piece[1]
            try:
                return decode(frames, self._job)
            except MisfitError as error:
                self._node.post.drop(str(error))
                self._answer_misfit(error, now)
        return None

    def _note_stranger(self, address: str, now: float) -> None:
        """If many strangers were answered, drops what waits for the one answered first."""
        if address in self._node.members.contacts:
            return
        self._strangers.pop(address, None)
        self._strangers[address] = now
        if len(self._strangers) > MAX_STRANGERS:
            first = next(iter(self._strangers))
            del self._strangers[first]
            if first not in self._node.members.contacts:
                self._sockets.forget(first)

    def _answer_misfit(self, error: MisfitError, now: float) -> None:
        """Tells a node of another job now and then why nobody answers it."""
        if now - self._strangers.get(error.address, -self._patience) < self._patience:
            return
        self._note_stranger(error.address, now)
        said = json.dumps([self.address, f"{error}, not {error.own[:MAX_TEXT]!r}"])
        self._sockets.send(error.address, [MISFIT + said.encode()])

    def _note_misfit(self, frames: list[Any]) -> None:
        match read_json(frames[0][1:MAX_MISFIT_BYTES]):
            case [str() as address, str() as reason] if (address + reason).isprintable():
                with self.lock:
                    if address in self._node.members.contacts:
                        self.misfits[address] = reason
                    self.lock.notify_all()

    def _send(self, address: str, message: Message) -> None:
        frames = encode(message, self._job)
        size = sum(memoryview(frame).nbytes for frame in frames)
        has_mass = message.mass is not None
        if has_mass and size > FIRST_PIECE:
            key = message.receiver, message.kind, message.number
            is_sent = self._transfers.put(address, message.sender.life, key, frames)
        else:
            # Where a path loses full packets, the small ones that say that a node lives still pass.
            is_sent = self._sockets.send(address, frames, has_mass and size > PACKET)
        self.sent_bytes += size * (has_mass and is_sent)
