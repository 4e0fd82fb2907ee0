"""Finds which processes of a job are stuck, and lets stuck processes write their stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gossipjax.launch._progress import PROGRESS, STACK_SIGNAL, Beat, create_beat, read_beat

BAD_USAGE = 2  # exit status of a program that was called wrongly, or would fail again
STALL_STATUS = 124  # exit status of a process that was ended because it was stuck, as of `timeout`
MARGIN = 0.1  # part of the limit: processes that stopped within it stopped together
LOOKS = 10  # in the time after which a process is stuck
MAX_LOOK_SECONDS = 0.5  # between two looks
STACK_SECONDS = 1.0  # time for processes to write their stacks before the caller ends them


class StallLimits(NamedTuple):
    """The seconds without an advance after which a process counts as stuck."""

    seconds: float  # between two steps
    slow_seconds: float  # from the start to the first advance, and after `slow=True`


@dataclasses.dataclass
class Watched:
    """What the launcher knows about a running process."""

    rank: int
    beat: Beat  # what it last said
    quiet_seconds: float = 0.0  # time since the last advance, or since the start
    path: Path = Path()  # of the file in which it says that it advances

    @property
    def has_advanced(self) -> bool:
        return self.beat.nanoseconds > 0

    def is_overdue(self, limits: StallLimits) -> bool:
        """Whether the process has not advanced for too long."""
        is_slow = self.beat.is_slow or not self.has_advanced
        return self.quiet_seconds >= (limits.slow_seconds if is_slow else limits.seconds)


class Verdict(NamedTuple):
    """Why a job is stuck, and its stuck processes (none if it is not known which they are)."""

    ranks: list[int]
    reason: str  # a clause about the processes, or about the job


def find_stall(processes: Sequence[Watched], limits: StallLimits) -> Verdict | None:
    """Judges a job whose processes need each other; returns None if the job goes on.

    If one process is stuck, all other processes soon wait for it, and no process advances any more.
    While one process advances, the others may just wait for it, for example during an evaluation.
    So a job is stuck if no process has advanced in time.
    """
    if processes and all(process.is_overdue(limits) for process in processes):
        return _find_last(processes, limits.seconds * MARGIN)
    return None


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


class Watch:
    """Watches the processes of a job, by rank; `folder` contains their files.

    Time counts only while the launcher runs. So if the machine suspends the whole job, the time in
    which no process could advance does not count. `interval`: seconds from one look to the next.
    """

    def __init__(self, limits: StallLimits, folder: Path):
        self.limits = limits
        self.interval = min(limits.seconds / LOOKS, MAX_LOOK_SECONDS)
        self._has_advanced = False
        self._folder = folder
        self._num_files = 0
        self._last_look = time.monotonic()
        self._processes: dict[int, Watched] = {}

    def add(self, rank: int) -> dict[str, str]:
        """Returns the environment of a process to be started, and forgets a former process."""
        path = self._folder / f"{rank}-{self._num_files}"
        self._num_files += 1
        create_beat(path)
        self._processes[rank] = Watched(rank, read_beat(path), path=path)
        return {PROGRESS: str(path)}

    def forget(self, rank: int, group: Sequence[int]) -> None:
        """Forgets a process that has ended. The others of its group may have waited for it."""
        del self._processes[rank]
        for process in self._processes.values():
            if process.rank in group:
                process.quiet_seconds = 0.0

    def look(self) -> list[Watched]:
        """Reads the last beats of the running processes, and returns these."""
        now = time.monotonic()
        seconds = min(now - self._last_look, 2 * self.interval)
        self._last_look = now
        for process in self._processes.values():
            former = process.beat
            with contextlib.suppress(OSError):  # a cleaner may have removed the file
                process.beat = read_beat(process.path)
            process.quiet_seconds += seconds
            if process.beat.nanoseconds != former.nanoseconds:
                process.quiet_seconds = 0.0
                self._has_advanced = True
        return list(self._processes.values())

    def find_status(self) -> int:
        """Returns the exit status of a stuck job: bad usage if the program never calls `advance`.

        A restart would not help a program that never calls `advance`.
        """
        return STALL_STATUS if self._has_advanced else BAD_USAGE

    def describe(self, processes: Sequence[Watched], verdict: Verdict, consequence: str) -> str:
        """Says which process is stuck, and for how long it and all others have not advanced."""
        names = ", ".join(f"rank {rank}" for rank in verdict.ranks)
        lines = [f"{names} stalled: {verdict.reason}, {consequence}".lstrip()]
        if not self._has_advanced:
            lines.append(
                f"    no process has advanced in {self.limits.slow_seconds:g} s (--stall-slow): "
                "the program must call gx.TrainStep or gossipjax.launch.advance() at every step; "
                "leave --stall out where it does not, give a longer --stall-slow where its start "
                "takes longer"
            )
        ordered = sorted(processes, key=lambda process: process.rank not in verdict.ranks)
        return "\n".join([*lines, *(f"    {describe_progress(process)}" for process in ordered)])


def ask_for_stacks(processes: Sequence[Watched], sessions: Mapping[int, int]) -> None:
    """Lets processes write their stacks to stderr, for which they need `STACK_SECONDS`.

    The caller must end them then, as those that a signal has stopped are continued. `sessions`:
    the numbers of their sessions, by rank.
    """
    for process in processes:
        number = process.beat.process_id
        with contextlib.suppress(OSError):
            # It might be the number of another process: in a container, or after its end.
            if os.getsid(number) == sessions[process.rank]:
                os.kill(number, STACK_SIGNAL)
                os.kill(number, signal.SIGCONT)


def describe_progress(process: Watched) -> str:
    """Says for how long a process has not advanced, and since which step."""
    beat = process.beat
    start = f"rank {process.rank}, no advance"
    if not beat.process_id:
        start += ", no stack (it has called neither gossipjax.launch.initialize() nor advance())"
    if not process.has_advanced:
        return f"{start} in the {process.quiet_seconds:.1f} s since its start"
    step = "" if beat.step is None else f", the last at step {beat.step}"
    slow = ", where something slow was expected" if beat.is_slow else ""
    return f"{start} for {process.quiet_seconds:.1f} s{step}{slow}"
