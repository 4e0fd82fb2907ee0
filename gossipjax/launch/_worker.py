"""Runs one process of a job on this machine: its session, signals, output and exit."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, NamedTuple

from gossipjax.launch._reaper import Reaper, signal_group

MAX_WAITING_BYTES = 1 << 24  # of each stream; then the processes wait, as at any full pipe
MAX_LINE_BYTES = 1 << 16  # longer lines are split
LAST_LINES = 20  # lines of a failed process's output that are shown
DRAIN_SECONDS = 2.0  # time to read the output of a process that has exited
LOOK_SECONDS = 0.02  # between two looks whether output is written
NOTICE_SECONDS = 4.0  # after a signal; a process that has lost a peer has ended by then
NO_SIGNAL = b"\0"
GRACE = "GOSSIPJAX_GRACE"  # environment variable of a process: seconds from SIGTERM to SIGKILL
BAD_USAGE = 2  # exit status of a program that was called wrongly, or would fail again
CANNOT_EXECUTE = (126, 127)  # exit statuses of a shell, and of a program that lacks a library
# The last line on stderr of Python, which may be colored, where the program cannot be imported.
IMPORT_FAILED = re.compile(
    rb"(\x1b\[[\d;]*m)*(ModuleNotFound|Import|Syntax|Indentation|Tab)Error\b|.*: No module named "
)

# The shell reports its process id to the reaper before it becomes the command, so that no process
# starts unknown to the reaper.
REPORT_AND_EXEC = 'echo $$ >&0 && exec "$@" </dev/null'


class Exited(NamedTuple):
    """A process has exited."""

    rank: int
    code: int  # exit status, or minus the number of the signal that ended the process

    @property
    def status(self) -> int:
        """The exit status as a shell reports it; after a signal it is 128 + its number."""
        return self.code if self.code >= 0 else 128 - self.code


class OutputClosed(NamedTuple):
    """Nobody reads the output of the launcher any more."""


class Signaled(NamedTuple):
    """The launcher got a signal that asks it to stop."""

    number: int


class Output:
    """A stream of the launcher. A thread writes it, so that nothing else waits for the reader.

    If the reader pauses, as `less` does, the lines wait in this object.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lines = queue.SimpleQueue[tuple[bytes, Callable[[], object] | None]]()
        self._lock = threading.Lock()
        self._num_bytes = 0  # bytes of the lines that are not written yet
        self._thread: threading.Thread | None = None

    def put(self, line: bytes, on_closed: Callable[[], object] | None = None) -> None:
        """Add a line. `on_closed` is called on another thread if nobody reads the stream."""
        with self._lock:
            self._num_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_lines, daemon=True)
                self._thread.start()
        self._lines.put((line, on_closed))

    def has_room(self) -> bool:
        return self._num_bytes < MAX_WAITING_BYTES

    def is_written(self) -> bool:
        return self._num_bytes == 0

    def _write_lines(self) -> None:
        while True:
            line, on_closed = self._lines.get()
            try:
                data = memoryview(line)
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                if on_closed is not None:
                    on_closed()
            with self._lock:
                self._num_bytes -= len(line)


STDOUT = Output(1)
STDERR = Output(2)
STREAMS = (STDOUT, STDERR)


def log(text: str) -> None:
    """Write a message of the launcher to stderr, without waiting for its reader."""
    STDERR.put(f"[launch] {text}\n".encode())


class Worker:
    """A running process of the job.

    The process leads its own session. Signals reach its whole process group. When the process
    exits, the rest of the group is killed, but not children that lead other sessions. `rank` is the
    prefix of its output. Other threads call `report` with `OutputClosed` when nobody reads the
    lines, and with `Exited` at the end.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        report: Callable[[Exited | OutputClosed], None],
        reaper: Reaper,
    ):
        self.rank = rank
        self._report = report
        self._reaper = reaper
        self._last_lines = deque[bytes](maxlen=LAST_LINES)
        self._last_on_stderr = b""
        self._lock = threading.Lock()  # for `_is_running`, and for every signal to the group
        self._is_running = True
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", REPORT_AND_EXEC, "sh", *command],
            stdin=reaper.pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group, if the process has not exited."""
        with self._lock:
            if self._is_running:
                signal_group(self._process.pid, number)

    @property
    def process_id(self) -> int:
        """The number of the process, and of its session."""
        return self._process.pid

    def join(self) -> None:
        """Wait until the process has exited and its output is read."""
        self._thread.join()

    def describe_failure(self, exited: Exited, consequence: str = "stopping the others") -> str:
        """Describe why the process failed, what follows, and the last lines of its output."""
        code = exited.code
        reason = f"exit status {code}" if code > 0 else describe_signal(-code)
        lines = [line.decode(errors="replace").rstrip() for line in list(self._last_lines)]
        output = ["its last lines:", *(f"    {line}" for line in lines)] if lines else ["no output"]
        return f"rank {self.rank} failed ({reason}), {consequence}; " + "\n".join(output)

    def cannot_start(self, exited: Exited) -> bool:
        """Whether the program cannot be executed, or Python cannot import it."""
        import_failed = exited.code == 1 and IMPORT_FAILED.match(self._last_on_stderr)
        return bool(import_failed) or exited.code in CANNOT_EXECUTE

    def _wait(self) -> None:
        streams = ((self._process.stdout, STDOUT), (self._process.stderr, STDERR))
        readers = [
            threading.Thread(target=self._forward, args=pair, daemon=True) for pair in streams
        ]
        for reader in readers:
            reader.start()
        code = self._wait_for_exit()
        for reader in readers:
            reader.join(DRAIN_SECONDS)
        self._report(Exited(self.rank, code))

    def _wait_for_exit(self) -> int:
        """Wait for the exit of the process, kill the rest of its group, and return its code."""
        process_id = self._process.pid
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._is_running = False
            signal_group(process_id, signal.SIGKILL)
            self._reaper.discard(process_id)
            # Collect the status last, because then another process may get the number.
            return self._process.wait()

    def _forward(self, stream: IO[bytes], output: Output) -> None:
        """Pass lines on with the rank in front, and keep the last lines.

        After the process has exited, the rest of its pipe is passed on without waiting for room.
        """
        with stream:
            for line in iter(lambda: stream.readline(MAX_LINE_BYTES), b""):
                line = line if line.endswith(b"\n") else line + b"\n"
                self._last_lines.append(line)
                if output is STDERR:
                    self._last_on_stderr = line
                while self._is_running and not output.has_room():
                    time.sleep(LOOK_SECONDS)
                output.put(b"[%d] " % self.rank + line, lambda: self._report(OutputClosed()))


Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers(
    signals: Iterable[signal.Signals], handler: Handler, notice: Callable[[], str] | None = None
) -> Iterator[None]:
    """Handles signals by `handler` while the context is open, and then restores former handlers.

    On other threads than the main thread `signal_handlers` does nothing, because Python sets signal
    handlers on the main thread only. If SIGHUP is ignored (`nohup`), it stays ignored.

    Args:
      signals: the signals that are handled.
      handler: the function, as for `signal.signal`.
      notice: a function that returns a text. If the context is still open 4 s after a signal, a
        thread writes the text to stderr, once. The thread runs even while the main thread compiles,
        when no handler can run.

    >>> import signal
    >>> from gossipjax import launch
    >>> received = []
    >>> with launch.signal_handlers([signal.SIGTERM], lambda number, _: received.append(number)):
    ...     signal.raise_signal(signal.SIGTERM)
    >>> received == [signal.SIGTERM]
    True
    """
    caught = [s for s in signals if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        caught = []
    noticing = _noticing(caught, notice) if notice and caught else contextlib.nullcontext()
    former_handlers = {s: signal.signal(s, handler) for s in caught}
    try:
        with noticing:
            yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)


@contextlib.contextmanager
def _noticing(signals: Sequence[int], notice: Callable[[], str]) -> Iterator[None]:
    near, far = os.pipe()
    os.set_blocking(far, False)
    _forget_in_children()
    former = signal.set_wakeup_fd(far, warn_on_full_buffer=False)
    arguments = (near, former, signals, notice)
    threading.Thread(target=_notice, args=arguments, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.write(far, NO_SIGNAL)  # children may have this end, too, so closing it tells nothing
        os.close(far)


@functools.cache
def _forget_in_children() -> None:
    """After a fork, signals to the child do not reach this process."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _notice(near: int, former: int, signals: Sequence[int], notice: Callable[[], str]) -> None:
    """Reads the numbers of signals from a pipe, to which Python writes them at once."""
    seconds = None
    with open(near, "rb", buffering=0) as numbers:
        while True:
            if not select.select([numbers], [], [], seconds)[0]:
                grace = os.environ.get(GRACE)
                limit = f" It is killed {grace} s after the signal (--grace)." if grace else ""
                print(f"gossipjax: {notice()}{limit}", file=sys.stderr, flush=True)
                seconds = None
                signals = ()  # once is enough
                continue
            number = numbers.read(1)
            if number == NO_SIGNAL:
                return
            if former != -1:
                os.write(former, number)
            if number[0] in signals:
                seconds = NOTICE_SECONDS


def describe_signal(number: int) -> str:
    """Returns the name and number of a signal.

    >>> describe_signal(9)
    'SIGKILL, signal 9'
    """
    names = {int(s): s.name for s in signal.Signals}
    return f"{names.get(number, 'unnamed')}, signal {number}"
