"""A job under the launcher: started, followed by its output and files, and ended."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from experiments.program import ProgramError

ROOT = Path(__file__).resolve().parents[2]
MAX_LAST_LINES = 30  # of a failed run's output
STALL_TIMEOUT = 300.0  # seconds without output or a new step, after which a run counts as hanging


class JobError(ProgramError):
    """A run ended too early, or hangs; the message has the last lines of its output."""


class LaunchedJob:
    """A program under the launcher, as a context that ends it.

    Args:
      launcher: options of `python -m gossipjax.launch`.
      program: the module, and its options.
      processes: number of processes.
      metrics: the file `metrics.jsonl` that the program writes.

    Attributes:
      metrics: that file.
      restarts: number of restarts that the launcher has reported.
      startup_seconds: from the start of the job to its first line of metrics; 0 until then.
    """

    PLACE = "GOSSIPJAX_PROCESS_ID"  # the environment variable that numbers the processes

    def __init__(
        self, launcher: Sequence[str], program: Sequence[str], processes: int, metrics: Path
    ):
        launch = [sys.executable, "-m", "gossipjax.launch", "--processes", f"{processes}"]
        self._command = [*launch, *launcher, "--", sys.executable, "-m", *program]
        self._processes = processes
        self._last_lines = deque[str](maxlen=MAX_LAST_LINES)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._metrics_size = 0
        self.metrics = metrics
        self.restarts = 0
        self.startup_seconds = 0.0

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._launcher = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # so that Ctrl-C only reaches this program
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._start_time = time.monotonic()
        self._last_progress = self._start_time
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.terminate()
        try:
            self._launcher.wait(10)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        with self._launcher.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, condition: Callable[[], bool], description: str) -> bool:
        """Waits until `condition` is true, and handles the output of the run meanwhile.

        Returns:
          Whether it became true; False if the run was complete first.

        Raises:
          JobError: if the run fails first, or hangs.
        """
        while not condition():
            has_ended = not self._handle_output()
            if condition():
                break
            if has_ended:
                if status := self._launcher.wait():
                    self._fail(f"ended with status {status} before {description}")
                return False
            if time.monotonic() - self._last_progress > STALL_TIMEOUT:
                self._fail(f"hangs before {description}")
            time.sleep(0.002)
        return True

    def wait_for_end(self) -> None:
        """Waits as `wait_for` does, for the end of the run.

        Raises:
          JobError: if the run fails, or hangs.
        """
        self.wait_for(lambda: self._launcher.poll() is not None, "its end")
        while self._handle_output():
            time.sleep(0.002)
        if self._launcher.returncode:
            self._fail(f"ended with status {self._launcher.returncode}")

    def _fail(self, reason: str) -> None:
        lines = "\n".join(f"    {line}" for line in self._last_lines)
        raise JobError(f"after {self.restarts} restarts the run {reason}; last lines:\n{lines}")

    def _handle_output(self) -> bool:
        """Handles the lines that are there; returns whether more may come."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size != self._metrics_size:
            self._metrics_size = size
            self._last_progress = time.monotonic()
            self.startup_seconds = self.startup_seconds or self.seconds()
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self._handle_line(line)
            self._lines.put(None)
            return False
        return True

    def _handle_line(self, line: str) -> None:
        self._last_progress = time.monotonic()
        self._last_lines.append(line.rstrip())

    def seconds(self) -> float:
        """Returns the time since the start of the run."""
        return time.monotonic() - self._start_time

    def pids(self) -> dict[int, int]:
        """Returns `find_pids` of the launcher."""
        return find_pids(self._launcher.pid, self.PLACE)


def find_pids(launcher_pid: int, variable: str) -> dict[int, int]:
    """Returns `{number: pid}` of the running processes that a launcher has started.

    Args:
      launcher_pid: of the launcher.
      variable: the environment variable that numbers them.
    """
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == launcher_pid and state != "Z":
                for entry in (folder / "environ").read_bytes().split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if name == variable.encode():
                        pids[int(value)] = int(folder.name)
    return pids
