"""The thread of a node that receives, acknowledges and sends beside the computation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossipjax import launch
from gossipjax.asynchronous._messages import Format, Message, MessageError, decode, encode
from gossipjax.asynchronous._participant import Participant

if TYPE_CHECKING:
    from gossipjax.asynchronous._sockets import Sockets

TICKS = 50  # of the clock, in the time after which a node is declared dead


class Service:
    """Runs a node's protocol on its sockets, in a thread.

    Attributes:
      address: where the node listens.
      lock: held while the protocol or what the node holds is used.
      dropped: reason -> number of messages that were not of this job.
      sent_bytes: of messages with a mass.
    """

    def __init__(self, listen: str, job: Format, patience: float, secret: str | None):
        self.lock = threading.Condition(threading.RLock())
        self.dropped: dict[str, int] = {}
        self.sent_bytes = 0
        self._sockets = _open_sockets(listen, job.max_bytes, secret)
        self.address = self._sockets.address
        self._job = job
        self._interval = patience / TICKS
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._node: Participant | None = None

    @property
    def all_dropped(self) -> dict[str, int]:
        """`dropped`, and connections that were none."""
        failed = self._sockets.failed_handshakes
        return self.dropped | ({"failed handshakes": failed} if failed else {})

    def start(self, node: Participant) -> None:
        """Starts the thread."""
        self._node = node
        self._thread = threading.Thread(target=self._run, name="gossip", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Has what is in the outbox sent now."""
        self._sockets.wake()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Waits until a condition of the node holds, which is tried after everything that happens.

        Who waits here waits for other nodes: for the launcher, it advances.
        """

        def is_over() -> bool:
            launch.advance()
            return self._error is not None or condition()

        with self.lock:
            self.lock.wait_for(is_over, timeout)
            self.require_running()
            return condition()

    def require_running(self) -> None:
        """Raises `RuntimeError` if the thread ended by an error."""
        if self._error is not None:
            raise RuntimeError(f"gossip stopped: {self._error!r}.") from self._error

    def close(self, linger: float) -> None:
        """Ends the thread, after what is in the outbox was sent."""
        self._is_closed = True
        self._sockets.wake()
        if self._thread is not None:
            self._thread.join()
        self._sockets.close(linger)

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
        assert node is not None
        messages = [message for frames in arrived if (message := self._decode(frames)) is not None]
        with self.lock:
            now = time.monotonic()
            for message in messages:
                node.receive(message, now)
            node.tick(now)
            outbox, node.outbox = node.outbox, []
            gone, node.gone = node.gone, []
            self.lock.notify_all()
        for address in gone:
            self._sockets.forget(address)
        for address, message in outbox:
            self._send(address, message)

    def _decode(self, frames: list[Any]) -> Message | None:
        try:
            return decode(frames, self._job)
        except MessageError as error:
            self.dropped[str(error)] = self.dropped.get(str(error), 0) + 1
            return None

    def _send(self, address: str, message: Message) -> None:
        frames = encode(message, self._job)
        is_sent = self._sockets.send(address, frames)
        if is_sent and message.mass is not None:
            self.sent_bytes += sum(memoryview(frame).nbytes for frame in frames)


def _open_sockets(listen: str, max_bytes: int, secret: str | None) -> Sockets:
    try:
        from gossipjax.asynchronous._sockets import Sockets
    except ModuleNotFoundError as error:
        raise ImportError(
            "an asynchronous node needs pyzmq, which is not installed: "
            'pip install "gossipjax[asynchronous]".'
        ) from error
    return Sockets(listen, max_bytes, secret)
