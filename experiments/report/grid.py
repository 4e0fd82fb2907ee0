"""The runs of all sections: each once, with what runs and what is left on the screen."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.compilation_cache import compilation_cache
from experiments.report.origin import format_seconds
from experiments.runner import Devices, Result, Run, run_all

MAX_SECONDS = 3600.0  # of a run
MAX_QUICK_SECONDS = 300.0


class GridProgress:
    """What runs, what has ended, and how long the rest may take.

    Attributes:
      results: of the runs that have ended, by name.
    """

    def __init__(self, runs: Sequence[Run], bar: Progress, jobs: int):
        self.results: dict[str, Result] = {}
        self._runs = runs
        self._bar = bar
        self._jobs = jobs
        self._running: list[str] = []
        self._seconds: list[float] = []  # of the runs of this call
        self._began: dict[str, float] = {}
        self._task = bar.add_task("runs", total=len(runs), status="")

    def begin(self, run: Run) -> None:
        """Shows a run that begins."""
        self._running.append(run.name)
        self._began[run.name] = time.monotonic()
        self._show()

    def end(self, run: Run, result: Result) -> None:
        """Counts a run that has ended, now or before."""
        self.results[run.name] = result
        if run.name in self._running:
            self._running.remove(run.name)
            self._seconds.append(result.seconds)
            is_normal = result.status == "finished"
            self._bar.console.print(
                f"{len(self.results)} of {len(self._runs)}: {run.name} {result.status}, "
                f"{format_seconds(result.seconds)}",
                style="dim" if is_normal else "yellow",
                highlight=False,
                soft_wrap=True,
            )
        self._bar.update(self._task, completed=len(self.results))
        self._show()

    def estimate_seconds(self) -> float | None:
        """Returns how long the rest takes if its runs are like those of this call; None before one.

        What runs already has a part of its time behind it; runs that are alone have no other beside
        them.
        """
        if not self._seconds:
            return None
        mean = sum(self._seconds) / len(self._seconds)
        left = 0.0
        for run in self._runs:
            if run.name not in self.results:
                behind = time.monotonic() - self._began.get(run.name, time.monotonic())
                left += max(0.0, mean - behind) / (1 if run.is_alone else self._jobs)
        return left

    def _show(self) -> None:
        left = len(self._runs) - len(self.results) - len(self._running)
        seconds = self.estimate_seconds()
        about = f", about {format_seconds(seconds)}" if seconds is not None and left else ""
        status = f"{', '.join(self._running) or 'none'}; {left} left{about}"
        self._bar.update(self._task, status=status)


def list_once(runs: Iterable[Sequence[Run]]) -> list[Run]:
    """Returns the runs of all sections, each once.

    >>> len(list_once([[Run("a", "image", ())], [Run("a", "image", ())]]))
    1
    """
    return list({run.name: run for part in runs for run in part}.values())


def run_grid(
    runs: Sequence[Run], folder: Path, devices: Devices, console: Console, is_quick: bool
) -> tuple[dict[str, Result], bool]:
    """Runs what has not ended before.

    Returns:
      How each ended, by name; and whether all were run: Ctrl-C ends those that run, and keeps what
      has ended.
    """
    bar = Progress(
        TextColumn("{task.completed} of {task.total}"),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )
    with bar, compilation_cache():
        progress = GridProgress(runs, bar, devices.jobs)
        limit = MAX_QUICK_SECONDS if is_quick else MAX_SECONDS
        try:
            run_all(runs, folder, devices, progress, replaces=True, max_seconds=limit)
        except KeyboardInterrupt:
            return progress.results, False
    return progress.results, True
