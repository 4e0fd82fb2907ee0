"""Sends large messages in pieces, so that nothing waits long, and each piece shows progress.

If nothing comes back for much longer than the measured rate explains, the connection has broken,
and the sender repeats the pieces that were not acknowledged.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gossipjax.asynchronous._messages import MessageError, is_address, read_as, read_json

MIN_SECONDS = 1e-4  # that clocks can measure
MIN_PIECE = 1 << 14  # bytes
MAX_PIECE = 1 << 20
FIRST_PIECE = 1 << 16  # while the rate is not known; smaller messages travel whole
WINDOW = 4  # pieces on their way
PIECES_IN_PATIENCE = 20
MAX_BUFFERS = 1000
MAX_ARRIVALS = 10_000
MAX_SLOWNESS = 8  # how many times longer than the rate says a piece may take
MIN_ROOM = 1 << 26  # bytes of messages that may arrive at the same time
PIECE = b"P"
PROGRESS = b"A"
ALIGNMENT = 64  # bytes; XLA for CPUs reads an array without a copy if it begins at a multiple

# `(address, frames, is_bulk)`: sends frames; returns False if too much waits already.
Send = Callable[[str, list[Any], bool], bool]


@dataclasses.dataclass
class _Stream:
    """A message that is sent in pieces, and how much of it has arrived."""

    life: str  # the life of the sender
    key: tuple[str | None, str, int]  # the life of its receiver, its kind, and its number
    number: int  # of this transfer; later ones of the same process have larger numbers
    buffers: list[memoryview]
    acknowledged: int = 0  # bytes that have arrived
    sent: int = 0  # bytes that were sent
    # When the measurement of the rate began, None if there is none, and how much was acknowledged
    # by then. After a break of the connection, the rest of the message is measured anew.
    since: float | None = None
    before: int = 0

    def __post_init__(self) -> None:
        self.lengths = [len(buffer) for buffer in self.buffers]
        self.total = sum(self.lengths)

    def cut(self, start: int, end: int) -> list[memoryview]:
        """Returns the bytes from `start` to `end`, as views of the buffers that contain them."""
        at = 0
        parts = []
        for buffer in self.buffers:
            if at < end and at + len(buffer) > start:
                parts.append(buffer[max(0, start - at) : end - at])
            at += len(buffer)
        return parts


@dataclasses.dataclass
class _Queue:
    """The messages for one address. The first is on its way, and the others wait."""

    streams: deque[_Stream] = dataclasses.field(default_factory=deque)
    rate: float = 0.0  # bytes per second of the newest message, as measured; 0 is unknown
    moved: float = 0.0  # when the last progress was made


@dataclasses.dataclass
class _Arrival:
    """A message that arrives from another node, in one of its lives; see `Identity`."""

    number: int  # of the transfer
    buffer: np.ndarray | None  # None when the message is complete
    received: int = 0  # bytes
    moved: float = 0.0  # when the last piece came


class Transfers:
    """Sends and receives the large messages of one process, in pieces."""

    def __init__(self, address: str, patience: float, max_bytes: int, send: Send):
        self._address = address
        self._patience = patience
        self._max_bytes = max_bytes
        self._send = send
        self._numbers = itertools.count(1)
        self._queues: dict[str, _Queue] = {}
        self._arrivals: dict[str, _Arrival] = {}  # by the sender's life

    def put(
        self, address: str, life: str, key: tuple[str | None, str, int], frames: Sequence[Any]
    ) -> bool:
        """Sends a message of `life`, named by `key`; returns False if it is on its way already."""
        queue = self._queues.setdefault(address, _Queue())
        # The protocol repeats what is not acknowledged in time, and a slow link needs longer.
        if any(stream.key == key for stream in queue.streams):
            return False
        header = bytes(frames[0])
        header += b" " * (-len(header) % ALIGNMENT)  # JSON ignores spaces
        buffers = [memoryview(frame).cast("B") for frame in (header, *frames[1:])]
        queue.streams.append(_Stream(life, key, next(self._numbers), buffers))
        self._send_pieces(address, queue, time.monotonic())
        return True

    def forget(self, address: str) -> None:
        """Drops the messages to an address that have not arrived as a whole."""
        self._queues.pop(address, None)

    def tick(self, now: float) -> None:
        """Repeats pieces that a broken connection lost; forgets messages that stopped arriving."""
        for address, queue in self._queues.items():
            if queue.streams:
                stream = queue.streams[0]
                on_way = stream.sent - stream.acknowledged
                expected_seconds = on_way / queue.rate if queue.rate else self._patience
                if now - queue.moved > max(self._patience, MAX_SLOWNESS * expected_seconds):
                    stream.since = None  # lost pieces say nothing about the rate
                    stream.sent = stream.acknowledged
                self._send_pieces(address, queue, now)
        for life, arrival in list(self._arrivals.items()):
            if now - arrival.moved > 10 * self._patience:
                del self._arrivals[life]

    def receive(
        self, frames: Sequence[Any], now: float
    ) -> tuple[str | None, list[Any] | None] | None:
        """Takes a piece of a message, or the acknowledgement of a piece.

        Returns None for all other frames. Else returns the life (`Identity.life`) of the node that
        sent it, if it is known, and the frames of the message, if this was its last piece.
        """
        kind = bytes(frames[0][:1])
        if kind not in (PIECE, PROGRESS):
            return None
        match read_json(frames[0][1:]):
            case [str() as address, str() as own_life, number, offset] if kind == PROGRESS:
                read_as(tuple[int, int], [number, offset])  # raises unless they are integers
                return self._acknowledge(address, own_life, number, offset, now), None
            case [str() as address, life, number, offset, [*lengths]] as header if (
                kind == PIECE and is_address(address) and 0 < len(lengths) <= MAX_BUFFERS
            ):
                read_as(tuple[int, ...], [number, offset, *lengths])
                return read_as(str, life), self._add_piece(header, frames[1:], now)
        raise MessageError("a malformed piece or acknowledgement")

    def _send_pieces(self, address: str, queue: _Queue, now: float) -> None:
        """Sends pieces of the first message of a queue, up to a window of pieces on their way.

        A piece is so small that many pass within the patience: each shows that the node lives.
        """
        if not queue.streams:
            return
        stream = queue.streams[0]
        if stream.since is None:
            stream.since = queue.moved = now
            stream.before = stream.acknowledged
        size = FIRST_PIECE
        window = 1
        if queue.rate:
            size = int(queue.rate * self._patience / PIECES_IN_PATIENCE)
            size = max(MIN_PIECE, min(MAX_PIECE, size))
            window = WINDOW
        while stream.sent < stream.total and stream.sent - stream.acknowledged < window * size:
            header = [self._address, stream.life, stream.number, stream.sent, stream.lengths]
            end = min(stream.sent + size, stream.total)
            parts = stream.cut(stream.sent, end)
            frames = [PIECE + json.dumps(header).encode(), *parts]
            if not self._send(address, frames, True):  # is bulk
                return
            stream.sent = end

    def _acknowledge(
        self, address: str, life: str, number: int, offset: int, now: float
    ) -> str | None:
        """Notes that a message has arrived up to `offset`, and sends more of it.

        Returns the life that receives it; None if this message is not on its way.
        """
        queue = self._queues.get(address)
        if queue is None or not queue.streams:
            return None
        stream = queue.streams[0]
        if (stream.life, stream.number) != (life, number):
            return None
        if not stream.acknowledged < offset <= stream.total:
            return stream.key[0]
        queue.moved = now
        measured = offset - stream.before
        if measured >= FIRST_PIECE:  # the time of fewer bytes is mostly the delay of the path
            queue.rate = measured / max(now - (stream.since or 0.0), MIN_SECONDS)
        stream.acknowledged = offset
        stream.sent = max(stream.sent, offset)
        if offset == stream.total:
            queue.streams.popleft()
        self._send_pieces(address, queue, now)
        return stream.key[0]

    def _add_piece(
        self, header: Sequence[Any], parts: Sequence[Any], now: float
    ) -> list[Any] | None:
        """Adds a piece to its message, and acknowledges it; returns a whole message's frames.

        `header` is `[the sender's address, its life, the transfer, offset, lengths of all frames]`.
        """
        address, life, number, offset, lengths = header
        total = sum(lengths)
        arrival = self._arrivals.get(life)
        if arrival is None or arrival.number < number:
            if total > self._max_bytes:
                raise MessageError("too large")
            if offset or not self._has_room(total, life, now):
                return None  # no room, or the first piece is lost: it is repeated
            # The frames must begin at a multiple of ALIGNMENT.
            memory = np.empty(total + ALIGNMENT, np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            arrival = self._arrivals[life] = _Arrival(number, memory[start : start + total])
        if arrival.number > number:  # a piece of an earlier transfer
            return None
        arrival.moved = now
        buffer = arrival.buffer
        if offset == arrival.received and buffer is not None:
            for part in parts:
                end = arrival.received + len(part)
                if end > len(buffer):
                    raise MessageError("a malformed piece or acknowledgement")
                buffer[arrival.received : end] = np.frombuffer(part, np.uint8)
                arrival.received = end
        # Also for a piece that came twice or too early: the sender learns where to go on.
        progress = [self._address, life, number, arrival.received]
        self._send(address, [PROGRESS + json.dumps(progress).encode()], False)  # is not bulk
        if buffer is None or not arrival.received == len(buffer) == total:
            return None
        arrival.buffer = None
        ends = itertools.accumulate(lengths)
        return [buffer.data[end - size : end] for end, size in zip(ends, lengths, strict=True)]

    def _has_room(self, size: int, life: str, now: float) -> bool:
        """Says whether a message of `life` has room: alone, or with others if all are small.

        Others that make no progress do not count: a stranger could hold up all others by them.
        """
        others = [a for other, a in self._arrivals.items() if other != life]
        moving = [a.buffer for a in others if now - a.moved <= 2 * self._patience]
        waiting = sum(len(buffer) for buffer in moving if buffer is not None)
        return len(others) < MAX_ARRIVALS and (not waiting or waiting + size <= MIN_ROOM)
