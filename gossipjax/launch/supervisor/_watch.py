"""Watches whether the processes of a job advance, and reports those that do not."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from gossipjax.launch.supervisor._progress import PROGRESS, Beat, create_beat, read_beat
from gossipjax.launch.supervisor._stacks import Source, read_state, take_stacks
from gossipjax.launch.supervisor._stall import STALL_STATUS, STOPPED, StallLimits, Verdict, Watched
from gossipjax.launch.supervisor._worker import BAD_USAGE

LOOKS = 10  # in the time after which a process is stuck
MAX_LOOK_SECONDS = 0.5  # between two looks


@dataclasses.dataclass
class _Process:
    """A process of the job.

    Attributes:
      path: the file in which it says that it advances.
      session: that of the process; 0 until it is started.
      beat: what it last said.
      advanced_at, stopped_at: on the clock of the watch, when that was seen, and when it was first
        seen stopped since it was last seen otherwise.
    """

    path: Path
    beat: Beat
    advanced_at: float
    session: int = 0
    stopped_at: float | None = None


class Watch:
    """The processes of a job, by rank.

    Its clock runs while the launcher does. If the machine suspends the whole job, the time in
    which nobody could advance does not count.

    Args:
      limits: of the job.
      folder: for the files of the processes.

    Attributes:
      next_look: when to look next, by `time.monotonic()`.
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
        """Returns the environment of a process that is to be started, and forgets a former one."""
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
        """Returns what the running processes have said."""
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
        process_id = beat.process_id or process.session
        is_stopped = process_id > 0 and read_state(process_id) == "T"
        if not is_stopped:
            process.stopped_at = None
        elif process.stopped_at is None:
            process.stopped_at = self._clock
        stopped_at = process.stopped_at
        stopped_seconds = None if stopped_at is None else self._clock - stopped_at
        return Watched(rank, beat, self._clock - process.advanced_at, stopped_seconds)

    def find_status(self, verdict: Verdict) -> int:
        """The exit status of what is stuck: bad usage if the program never says that it advances.

        A restart would not change that.
        """
        is_silent = not self._has_advanced and verdict.reason != STOPPED
        return BAD_USAGE if is_silent else STALL_STATUS

    def report(self, processes: Collection[Watched], verdict: Verdict, consequence: str) -> str:
        """Takes the stacks, and returns a text: who is stuck, where, and where the others are."""
        stuck = {p.rank: p for p in processes if p.rank in verdict.ranks}
        others = {p.rank: p for p in processes if p.rank not in verdict.ranks}
        ranks = [*stuck, *others]
        sources = [
            Source(p.beat.process_id, p.session, p.path)
            for p in (self._processes[rank] for rank in ranks)
        ]
        stacks = dict(zip(ranks, take_stacks(sources), strict=True))
        names = ", ".join(f"rank {rank}" for rank in stuck)
        start = f"{names} stalled: {verdict.reason}" if stuck else f"stalled: {verdict.reason}"
        lines = [f"{start}, {consequence}"]
        if self.find_status(verdict) == BAD_USAGE:
            lines.append(
                f"    no process has advanced in {self.limits.slow_seconds:g} s (--stall-slow): "
                "the program must call gx.TrainStep or gossipjax.launch.advance() at every step; "
                "leave --stall out where it does not, give a longer --stall-slow where its start "
                "takes longer"
            )
        for rank, process in {**stuck, **others}.items():
            lines.append(f"    rank {rank}, {describe_progress(process)}:")
            shown = stacks[rank].show(only_main=bool(stuck) and rank in others)
            lines += [f"      {line}" for line in shown]
        return "\n".join(lines)


@contextlib.contextmanager
def watching(limits: StallLimits | None) -> Iterator[Watch | None]:
    """A watch with its folder, within the context; None without limits."""
    if limits is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="gossipjax-") as folder:
        yield Watch(limits, Path(folder))


def describe_progress(process: Watched) -> str:
    """For how long a process has not advanced, and since which step."""
    if not process.has_advanced:
        return f"no advance in the {process.quiet_seconds:.1f} s since its start"
    step = "" if process.beat.step is None else f", the last at step {process.beat.step}"
    slow = ", where something slow was expected" if process.beat.is_slow else ""
    return f"no advance for {process.quiet_seconds:.1f} s{step}{slow}"
