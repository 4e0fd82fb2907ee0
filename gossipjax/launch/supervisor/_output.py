"""The launcher's output: what its processes print, and what it says itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 24  # of each stream; then the processes wait, as at any full pipe


class Output:
    """A stream of the launcher, written by a thread, so that nothing else waits for its reader.

    A reader may pause, as `less` does. Until it goes on, the lines wait here.

    Args:
      descriptor: that of the stream.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._num_bytes = 0  # of these lines and of those that are being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._on_closed: Callable[[], object] | None = None

    def put(self, line: bytes, on_closed: Callable[[], object] | None = None) -> None:
        """Add a line. `on_closed` is called on another thread if nobody reads the stream."""
        with self._changed:
            self._lines.append(line)
            self._num_bytes += len(line)
            self._on_closed = on_closed or self._on_closed
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_lines, daemon=True)
                self._thread.start()

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until fewer than `MAX_WAITING_BYTES` wait; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_bytes < MAX_WAITING_BYTES, seconds)

    def wait_until_written(self, seconds: float) -> bool:
        """Wait until no line waits; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_bytes == 0, seconds)

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                data = memoryview(b"".join(self._lines))
                self._lines.clear()
            num_bytes = len(data)
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                if self._on_closed is not None:
                    self._on_closed()
            with self._changed:
                self._num_bytes -= num_bytes
                self._changed.notify_all()


STDOUT = Output(1)
STDERR = Output(2)
STREAMS = (STDOUT, STDERR)


def log(text: str) -> None:
    """Write the launcher's own message to stderr. This never waits."""
    STDERR.put(f"[launch] {text}\n".encode())
