"""Finds which processes of a job are stuck, and lets stuck processes write their stacks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gossipjax.launch._progress import LAYOUT, NO_STEP, STACK_SIGNAL, Beat

MARGIN = 0.1  # processes that stopped within this part of the limit count as stopped together
MAX_LOOK_SECONDS = 0.5  # the most that counts from one look to the next, as after a suspension
HOW_TO_ADVANCE = "the program must call gx.TrainStep or gossipjax.launch.advance() at every step"


@dataclasses.dataclass
class Watched:
    """What the launcher knows about a running process."""

    rank: int
    path: Path  # of the file in which it says that it advances
    beat: Beat  # what it last said
    quiet_seconds: float = 0.0  # time since the last advance, or since the start

    @property
    def has_advanced(self) -> bool:
        """Says whether the process has ever called `advance`."""
        return self.beat.nanoseconds > 0

    def is_overdue(self, seconds: float, slow_seconds: float) -> bool:
        """Says whether the process has not advanced for too long."""
        is_slow = self.beat.is_slow or not self.has_advanced
        return self.quiet_seconds >= (slow_seconds if is_slow else seconds)

    def describe(self) -> str:
        """Says for how long the process has not advanced, and since which step."""
        step = "" if self.beat.step == NO_STEP else f", the last at step {self.beat.step}"
        text = f"rank {self.rank}, no advance for {self.quiet_seconds:.1f} s{step}"
        return text if self.has_advanced else f"{text}: {HOW_TO_ADVANCE}"


def find_stall(
    processes: Sequence[Watched], seconds: float, slow_seconds: float
) -> tuple[list[int], str] | None:
    """Returns the stuck processes (none if it is not known which they are), and why they count so.

    `seconds` without an advance are too long between two steps, and `slow_seconds` at the start and
    after `slow=True`. The processes need each other; the result is None if they go on.

    If one process is stuck, all other processes soon wait for it, and no process advances any more.
    While one process advances, the others may just wait for it, for example during an evaluation.
    So a job is stuck if no process has advanced in time.

    A process that is stuck before step k has not said that it begins step k; all others have. Where
    the steps do not tell, the processes are stuck that advanced longest ago.
    """
    if not processes or not all(process.is_overdue(seconds, slow_seconds) for process in processes):
        return None
    # A process that advanced last before this time counts as one of the first to stop.
    first_until = min(process.beat.nanoseconds for process in processes) + seconds * MARGIN * 1e9
    step = min(process.beat.step for process in processes)  # NO_STEP if one has named none
    # Each reason says which processes are behind. The first that tells some from others counts.
    marks = {
        "not advancing since the start": [not p.has_advanced for p in processes],
        "behind the others in steps": [p.beat.step == step != NO_STEP for p in processes],
        "the first to advance no more": [p.beat.nanoseconds <= first_until for p in processes],
    }
    for reason, is_behind in marks.items():
        if any(is_behind) and not all(is_behind):
            pairs = zip(processes, is_behind, strict=True)
            return [process.rank for process, is_stuck in pairs if is_stuck], reason
    if len(processes) == 1:
        return [processes[0].rank], "not advancing"
    return [], "all processes stopped advancing together"


class Watch:
    """Watches the processes of a job, by rank; `folder` contains their files.

    Time counts only while the launcher runs. So if the machine suspends the whole job, the time in
    which no process could advance does not count.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._last_look = time.monotonic()
        self._processes: dict[int, Watched] = {}

    def add(self, rank: int) -> str:
        """Makes the file of a process that is about to start at a rank; returns its path."""
        path = self._folder / f"{rank}-{time.monotonic_ns()}"
        path.write_bytes(LAYOUT.pack(*Beat()))
        self._processes[rank] = Watched(rank, path, Beat())
        return str(path)

    def forget(self, rank: int, group: Sequence[int]) -> None:
        """Forgets a process that has ended; its group may have waited for it, and gets new time."""
        del self._processes[rank]
        for process in self._processes.values():
            if process.rank in group:
                process.quiet_seconds = 0.0

    def look(self) -> list[Watched]:
        """Reads what the running processes have last written; returns what is known of each."""
        now = time.monotonic()
        seconds = min(now - self._last_look, MAX_LOOK_SECONDS)
        self._last_look = now
        for process in self._processes.values():
            former = process.beat
            with contextlib.suppress(OSError):  # a cleaner may have removed the file
                process.beat = Beat(*LAYOUT.unpack(process.path.read_bytes()))
            process.quiet_seconds += seconds
            if process.beat.nanoseconds != former.nanoseconds:
                process.quiet_seconds = 0.0
        return list(self._processes.values())


def describe_stall(processes: Sequence[Watched], ranks: Sequence[int], reason: str) -> str:
    """Says which process is stuck, and for how long it and all others have not advanced."""
    names = ", ".join(f"rank {rank}" for rank in ranks)
    ordered = sorted(processes, key=lambda process: process.rank not in ranks)
    lines = [f"{names} stalled: {reason}".lstrip(), *(process.describe() for process in ordered)]
    return "\n    ".join(lines)


def ask_for_stack(process: Watched, session: int) -> None:
    """Asks a process to write its stacks to stderr, which takes it a moment.

    A process that is suspended, as by SIGSTOP, is resumed, as it could not write otherwise. It then
    runs on, so the caller must end it.
    `session` is the id of the session of the process's `Worker`.
    """
    process_id = process.beat.process_id
    with contextlib.suppress(OSError):
        # By now, or in a container, this id may be of another process. That has another session.
        if os.getsid(process_id) == session:
            os.kill(process_id, STACK_SIGNAL)
            os.kill(process_id, signal.SIGCONT)
