"""Which processes of a job are stuck: a decision on what they have said, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from gossipjax.launch.supervisor._progress import Beat

STALL_STATUS = 124  # exit status of a process that was ended because it was stuck, as of `timeout`
STOPPED = "stopped by a signal (state T)"
MARGIN = 0.1  # of the limit: processes whose last advances are not further apart stopped together


@dataclasses.dataclass(frozen=True)
class StallLimits:
    """Seconds without an advance after which a process is stuck.

    Attributes:
      seconds: between two steps.
      slow_seconds: from its start to its first advance, and where it expects something slow.
    """

    seconds: float
    slow_seconds: float


class Watched(NamedTuple):
    """What the launcher knows of a process that runs.

    Attributes:
      rank: its number.
      beat: what it last said.
      quiet_seconds: for which it has not advanced, since its start if it never has.
      stopped_seconds: for which it has been stopped by a signal; None if it is not.
    """

    rank: int
    beat: Beat
    quiet_seconds: float
    stopped_seconds: float | None

    @property
    def has_advanced(self) -> bool:
        return self.beat.nanoseconds > 0

    def is_stopped(self, limits: StallLimits) -> bool:
        """Whether it has been stopped for too long."""
        return self.stopped_seconds is not None and self.stopped_seconds >= limits.seconds

    def is_overdue(self, limits: StallLimits) -> bool:
        """Whether it has not advanced for too long."""
        is_slow = self.beat.is_slow or not self.has_advanced
        limit = limits.slow_seconds if is_slow else limits.seconds
        return self.quiet_seconds >= limit or self.is_stopped(limits)


class Verdict(NamedTuple):
    """The processes that are stuck, and why they and not the others.

    Attributes:
      ranks: of those; empty if it cannot be told which they are.
      reason: a clause about them, or about the job.
    """

    ranks: list[int]
    reason: str


def find_stall(processes: Sequence[Watched], limits: StallLimits) -> Verdict | None:
    """Judges a job whose processes need each other; None if it goes on.

    If one is stuck the others soon wait for it, so none of them advances any more. While one does,
    the others may wait for it: for an evaluation, for example. So a job is stuck if no process has
    advanced in time, or if one has been stopped by a signal, which is never part of a program.

    Args:
      processes: those that run.
      limits: of the job.
    """
    is_stuck = bool(processes) and all(process.is_overdue(limits) for process in processes)
    if not is_stuck and not any(process.is_stopped(limits) for process in processes):
        return None
    stopped = [process.rank for process in processes if process.stopped_seconds is not None]
    if stopped:
        return Verdict(stopped, STOPPED)
    return _find_last(processes, limits.seconds * MARGIN)


def _find_last(processes: Sequence[Watched], margin: float) -> Verdict:
    """Names the processes behind the others: in steps, or else in the time of their last advance.

    One that is stuck before step k has not said that it begins step k, and the others have.
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
