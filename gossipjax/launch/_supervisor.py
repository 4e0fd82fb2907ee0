"""The processes of a job on this machine: started together, ended together, none left behind.

Run as a program, this file is the guard: it kills what a launcher that was killed has left.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

LAST_LINES = 20  # of a failed process' output
LONGEST_LINE = 1 << 16  # bytes; a longer one is cut
GRACE_AFTER_FAILURE = 5.0  # seconds at most: without the one that failed, the others cannot save
DRAIN_SECONDS = 2.0  # for the output of a process that has ended
BAD_USAGE = 2  # the exit status of a program that was called wrongly, or would fail again
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
WRITING = {1: threading.Lock(), 2: threading.Lock()}  # stdout and stderr

# For glibc: memory that XLA gives back is kept, and not fetched anew from the kernel, page by page,
# for the next step's buffers. A mixing round of 20 MB on CPU: 29 ms instead of 51.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}

# The guard hears of a process before it becomes the command, so that none starts unseen.
ENTRY = 'echo $$ >&0 && exec "$@" </dev/null'


class Job(NamedTuple):
    """What runs: a command, in how many processes, the devices of each, the seconds to end in; and
    what tells it from other jobs."""

    command: Sequence[str]
    processes: int
    local_devices: int = 1
    grace: float = 30
    name: str = ""


class Ended(NamedTuple):
    """A process that has ended: its exit status, or minus the number of the signal."""

    rank: int
    code: int


Events = queue.SimpleQueue[Ended | int]  # an int is the number of a signal to the launcher


def supervise(job: Job, max_restarts: int = 0, elastic: bool = False) -> int:
    """Runs a job to its end, with restarts; returns the exit status. On the main thread.

    A process that fails ends all: SIGTERM, then SIGKILL. Then all are started again, at most
    `max_restarts` times, unless the status was 2 (bad usage) or a signal asked to stop. With
    `elastic` there is one process less for each that failed by itself, but one at least. The others
    fail because of it, too; so what counts is the first failure, and whatever a fault or SIGKILL
    ended that was not ours.

    A process leads a session of its own; all of that gets the signals, and ends with the process.
    """
    events: Events = queue.SimpleQueue()
    job = job._replace(name=job.name or uuid.uuid4().hex)
    at_start, status = job.processes, 0
    with handling(STOPS, lambda number, _: events.put(number)), _guard() as guard:
        for restart in range(max_restarts + 1):
            status, lost, stopped = _Attempt(job, restart, at_start, events, guard).run()
            if stopped or status in (0, BAD_USAGE) or restart == max_restarts:
                break
            if elastic:
                job = job._replace(processes=max(1, job.processes - lost))
            _say(f"restart {restart + 1} of {max_restarts}, with {job.processes} processes")
    return status


class _Attempt:
    """One start of all processes."""

    def __init__(self, job: Job, restart: int, at_start: int, events: Events, guard: IO[bytes]):
        self._job, self._restart, self._at_start = job, restart, at_start
        self._events, self._guard = events, guard
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._last = [deque[bytes](maxlen=LAST_LINES) for _ in range(job.processes)]

    def run(self) -> tuple[int, int, bool]:
        """The exit status, how many failed by themselves, and whether a signal asked to stop."""
        first, stopped, lost, left = None, 0, 0, self._job.processes
        deadline, killed, waiters = math.inf, False, []
        with _reserved_port() as port:
            try:
                waiters.extend(self._start(rank, port) for rank in range(left))
                while left:
                    event = self._next(deadline)
                    if isinstance(event, Ended):
                        left -= 1
                        lost += -event.code in FAULTS and not killed and first is not None
                        if event.code == 0 or first or stopped:
                            continue
                        first, lost, words = event, 1, self._last_words(event)
                        grace = min(self._job.grace, GRACE_AFTER_FAILURE)
                    elif event == signal.SIGPIPE and stopped:
                        continue
                    elif event is None or stopped:
                        deadline, killed = math.inf, True
                        self._tell(signal.SIGKILL)
                        continue
                    else:
                        stopped, grace = event, self._job.grace
                        words = f"{_signal_name(event)}: the processes have {grace:g} s to end"
                    self._tell(signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + grace)
                    _say(words)
            finally:
                self._tell(signal.SIGKILL)
                for waiter in waiters:
                    waiter.join()
        status = 128 + stopped if stopped else _status(first.code) if first else 0
        return status, lost, bool(stopped)

    def _next(self, deadline: float) -> Ended | int | None:
        """The next event; None if the deadline comes first."""
        seconds = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _start(self, rank: int, port: int) -> threading.Thread:
        process = subprocess.Popen(
            ["/bin/sh", "-c", ENTRY, "sh", *self._job.command],
            stdin=self._guard,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(rank, port),
            start_new_session=True,
        )
        self._running[rank] = process
        waiter = threading.Thread(target=self._wait, args=(rank, process), daemon=True)
        waiter.start()
        return waiter

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        processes, devices = self._job.processes, self._job.local_devices
        first = rank * devices
        # NPROC is the size of XLA's pool on CPU: with no more threads than devices, those that wait
        # in a collective leave none for the others' computations.
        defaults = {
            "NPROC": str(max(2 * devices, (os.cpu_count() or 1) // processes)),
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + devices))),
            "PYTHONUNBUFFERED": "1",
            **KEEP_MEMORY,
        }
        ours = {
            "GOSSIPJAX_COORDINATOR": f"127.0.0.1:{port}",
            "GOSSIPJAX_PROCESSES": str(processes),
            "GOSSIPJAX_PROCESS": str(rank),
            "GOSSIPJAX_PROCESSES_AT_START": str(self._at_start),
            "GOSSIPJAX_RESTART": str(self._restart),
            "GOSSIPJAX_JOB": self._job.name,
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        return {**defaults, **os.environ, **ours}

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        pumps = [
            threading.Thread(target=self._pump, args=(rank, stream, to), daemon=True)
            for stream, to in ((process.stdout, 1), (process.stderr, 2))
        ]
        for pump in pumps:
            pump.start()
        code = process.wait()
        _kill_group(process.pid, signal.SIGKILL)  # what it has left
        del self._running[rank]
        with contextlib.suppress(OSError):
            self._guard.write(b"-%d\n" % process.pid)
        for pump in pumps:
            pump.join(DRAIN_SECONDS)
        self._events.put(Ended(rank, code))

    def _pump(self, rank: int, stream: IO[bytes], to: int) -> None:
        for read in iter(lambda: stream.readline(LONGEST_LINE), b""):
            line = read if read.endswith(b"\n") else read + b"\n"
            self._last[rank].append(line)
            try:
                _write(to, b"[%d] " % rank + line)
            except OSError:  # nobody reads our output any more
                self._events.put(signal.SIGPIPE)

    def _tell(self, number: int) -> None:
        for process in list(self._running.values()):
            _kill_group(process.pid, number)

    def _last_words(self, ended: Ended) -> str:
        how = f"exit status {ended.code}" if ended.code > 0 else _signal_name(-ended.code)
        lines = [line.decode(errors="replace").rstrip() for line in self._last[ended.rank]]
        last = ["its last lines:", *(f"    {line}" for line in lines)] if lines else ["no output"]
        return f"rank {ended.rank} failed ({how}), and ends the others; " + "\n".join(last)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    names = {int(s): s.name for s in signal.Signals}
    return f"{names.get(number, 'a signal')}, signal {number}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        _write(2, f"[launch] {text}\n".encode())


def _write(to: int, data: bytes) -> None:
    with WRITING[to]:
        while data:
            data = data[os.write(to, data) :]


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


@contextlib.contextmanager
def handling(signals: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """These signals call `handler` in this context. Threads other than the main one cannot ask.

    A closed terminal that is ignored (nohup) stays ignored.
    """
    caught = [s for s in signals if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        caught = []
    before = {s: signal.signal(s, handler) for s in caught}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A loopback port that the kernel gives to nobody else, and on which process 0 may listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere two sockets cannot share it
            holder.close()
        yield port


@contextlib.contextmanager
def _guard() -> Iterator[IO[bytes]]:
    """A process that outlives us by a moment: its input ends when we do."""
    command = [sys.executable, "-I", "-S", __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True
    ) as guard:
        assert guard.stdin is not None
        yield guard.stdin


def _stand_guard(lines: Iterable[str]) -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for number in map(int, lines):  # minus the number: it has ended
        groups = groups | {number} if number > 0 else groups - {-number}
    for group in groups:
        _kill_group(group, signal.SIGKILL)


if __name__ == "__main__":
    _stand_guard(sys.stdin)
