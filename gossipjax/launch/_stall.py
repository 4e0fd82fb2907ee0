"""Finds which processes of a job are stuck, and lets stuck processes write their stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gossipjax.launch._progress import (
    PROGRESS,
    STACK_SIGNAL,
    Beat,
    create_beat,
    read_beat,
)

BAD_USAGE = 2  # exit status of a program that was called wrongly, or would fail again
STALL_STATUS = 124  # exit status of a process that was ended because it was stuck, as of `timeout`
STOPPED = "stopped by a signal (state T)"
MARGIN = 0.1  # part of the limit: processes that stopped within it stopped together
LOOKS = 10  # in the time after which a process is stuck
MAX_LOOK_SECONDS = 0.5  # between two looks
STACK_SECONDS = 1.0  # time for processes to write their stacks before the caller ends them


class StallLimits(NamedTuple):
    """The seconds without an advance after which a process counts as stuck."""

    seconds: float  # between two steps
    slow_seconds: float  # from the start to the first advance, and after `slow=True`


class Watched(NamedTuple):
    """What the launcher knows about a running process."""

    rank: int
    beat: Beat  # what it last said
    quiet_seconds: float  # time since the last advance, or since the start
    stopped_seconds: float | None  # how long a signal has stopped it; None if it is not stopped

    @property
    def has_advanced(self) -> bool:
        return self.beat.nanoseconds > 0

    def is_stopped(self, limits: StallLimits) -> bool:
        """Whether a signal has stopped the process for too long."""
        return self.stopped_seconds is not None and self.stopped_seconds >= limits.seconds

    def is_overdue(self, limits: StallLimits) -> bool:
        """Whether the process has not advanced for too long."""
        is_slow = self.beat.is_slow or not self.has_advanced
        limit = limits.slow_seconds if is_slow else limits.seconds
        return self.quiet_seconds >= limit or self.is_stopped(limits)


class Verdict(NamedTuple):
    """Why a job is stuck, and its stuck processes (none if it is not known which they are)."""

    ranks: list[int]
    reason: str  # a clause about the processes, or about the job


def find_stall(processes: Sequence[Watched], limits: StallLimits) -> Verdict | None:
    """Judges a job whose processes need each other; returns None if the job goes on.

    If one process is stuck, all other processes soon wait for it, and no process advances any more.
    While one process advances, the others may just wait for it, for example during an evaluation.
    So a job is stuck if no process has advanced in time, or if a signal has stopped a process,
    which is never part of a program.
    """
    is_stuck = bool(processes) and all(process.is_overdue(limits) for process in processes)
    if not is_stuck and not any(process.is_stopped(limits) for process in processes):
        return None
    stopped = [process.rank for process in processes if process.stopped_seconds is not None]
    if stopped:
        return Verdict(stopped, STOPPED)
    return _find_last(processes, limits.seconds * MARGIN)


def _find_last(processes: Sequence[Watched], margin: float) -> Verdict:
    """Names the processes that are behind in steps, or else those that advanced longest ago.

    A process that is stuck before step k has not said that it begins step k; all others have.
    """
    if len(processes) == 1:
        return Verdict([processes[0].rank], "not advancing")
    fresh = [process.rank for process in processes if not process.has_advanced]
    if len(fresh) == len(processes):
        return Verdict([], "no process has advanced since its start")
    if fresh:
        return Verdict(fresh, "not advancing since its start")
    steps = {p.rank: p.beat.step for p in processes if p.beat.step is not None}
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(steps) == len(processes) and len(behind) < len(processes):
        return Verdict(behind, "behind the others in steps")
    seconds = {process.rank: process.beat.nanoseconds * 1e-9 for process in processes}
    first = min(seconds.values())
    early = [rank for rank, value in seconds.items() if value <= first + margin]
    if len(early) < len(processes):
        return Verdict(early, "the first to advance no more")
    return Verdict([], "all processes stopped advancing together")


@dataclasses.dataclass
class _Process:
    """A process of the job. Times are on the clock of the watch."""

    path: Path  # path of the file in which the process says that it advances
    beat: Beat  # what it last said
    advanced_at: float  # when the beat was seen
    session: int = 0  # 0 until the process is started
    stopped_at: float | None = None  # since when a signal has stopped the process

    def find_state(self) -> str | None:
        """Its state as one letter, as in `ps`; None if it is not known (no Linux)."""
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.beat.process_id or self.session}/stat").read_text()
            return stat.rpartition(")")[2].split()[0]
        return None


class Watch:
    """Watches the processes of a job, by rank; `folder` contains their files.

    The clock of the watch runs only while the launcher runs. So if the machine suspends the whole
    job, the time in which no process could advance does not count. `next_look` is a time of
    `time.monotonic()`.
    """

    def __init__(self, limits: StallLimits, folder: Path):
        self.limits = limits
        self._has_advanced = False
        self._folder = folder
        self._interval = min(limits.seconds / LOOKS, MAX_LOOK_SECONDS)
        self._num_files = 0
        self._clock = 0.0
        self._last_look = time.monotonic()
        self.next_look = self._last_look + self._interval
        self._processes: dict[int, _Process] = {}

    def add(self, rank: int) -> dict[str, str]:
        """Returns the environment of a process to be started, and forgets a former process."""
        path = self._folder / f"{rank}-{self._num_files}"
        self._num_files += 1
        create_beat(path)
        self._processes[rank] = _Process(path, read_beat(path), self._clock)
        return {PROGRESS: str(path)}

    def follow(self, rank: int, session: int) -> None:
        """Watches a process that was started."""
        self._processes[rank].session = session

    def forget(self, rank: int) -> None:
        """Forgets a process that has ended."""
        self._processes.pop(rank, None)

    def look(self) -> list[Watched]:
        """Returns the last beats of the running processes."""
        now = time.monotonic()
        self._clock += min(now - self._last_look, 2 * self._interval)
        self._last_look = now
        self.next_look = now + self._interval
        return [self._look_at(rank, process) for rank, process in self._processes.items()]

    def _look_at(self, rank: int, process: _Process) -> Watched:
        beat = process.beat
        with contextlib.suppress(OSError):  # a cleaner may have removed the file
            beat = read_beat(process.path)
        if beat.nanoseconds != process.beat.nanoseconds:
            process.advanced_at = self._clock
            self._has_advanced = True
        process.beat = beat
        stopped_seconds = None
        if process.find_state() != "T":
            process.stopped_at = None
        else:
            process.stopped_at = self._clock if process.stopped_at is None else process.stopped_at
            stopped_seconds = self._clock - process.stopped_at
        return Watched(rank, beat, self._clock - process.advanced_at, stopped_seconds)

    def find_status(self, verdict: Verdict) -> int:
        """Returns the exit status of a stuck job: bad usage if the program never calls `advance`.

        A restart would not help a program that never calls `advance`.
        """
        is_silent = not self._has_advanced and verdict.reason != STOPPED
        return BAD_USAGE if is_silent else STALL_STATUS

    def describe(self, processes: Sequence[Watched], verdict: Verdict, consequence: str) -> str:
        """Says which process is stuck, and for how long it and all others have not advanced."""
        names = ", ".join(f"rank {rank}" for rank in verdict.ranks)
        lines = [f"{names} stalled: {verdict.reason}, {consequence}".lstrip()]
        if self.find_status(verdict) == BAD_USAGE:
            lines.append(
                f"    no process has advanced in {self.limits.slow_seconds:g} s (--stall-slow): "
                "the program must call gx.TrainStep or gossipjax.launch.advance() at every step; "
                "leave --stall out where it does not, give a longer --stall-slow where its start "
                "takes longer"
            )
        ordered = sorted(processes, key=lambda process: process.rank not in verdict.ranks)
        return "\n".join([*lines, *(f"    {describe_progress(process)}" for process in ordered)])

    def ask_for_stacks(self, processes: Sequence[Watched]) -> None:
        """Lets processes write their stacks to stderr, for which they need `STACK_SECONDS`.

        The caller must end them then, as those that a signal has stopped are continued.
        """
        for rank, beat in ((process.rank, process.beat) for process in processes):
            with contextlib.suppress(OSError):
                # Its number might be that of another process: in a container, or after its end.
                if beat.has_stacks and os.getsid(beat.process_id) == self._processes[rank].session:
                    os.kill(beat.process_id, STACK_SIGNAL)
                    os.kill(beat.process_id, signal.SIGCONT)


@contextlib.contextmanager
def watching(limits: StallLimits | None) -> Iterator[Watch | None]:
    """Makes a watch and its folder while the context is open; None without limits."""
    if limits is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="gossipjax-") as folder:
        yield Watch(limits, Path(folder))


def describe_progress(process: Watched) -> str:
    """Says for how long a process has not advanced, and since which step."""
    beat = process.beat
    start = f"rank {process.rank}, no advance"
    if not beat.process_id:
        start += ", no stack (it has called neither gossipjax.launch.initialize() nor advance())"
    elif not beat.has_stacks:
        start += f", no stack (it handles {STACK_SIGNAL.name} itself)"
    if not process.has_advanced:
        return f"{start} in the {process.quiet_seconds:.1f} s since its start"
    step = "" if beat.step is None else f", the last at step {beat.step}"
    slow = ", where something slow was expected" if beat.is_slow else ""
    return f"{start} for {process.quiet_seconds:.1f} s{step}{slow}"
