"""A job under the launcher: started, followed by its output and files, and ended."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.program import ProgramError

ROOT = Path(__file__).resolve().parents[2]
ACCURACY = "test_accuracy_average_model"
POLL_SECONDS = 0.002  # a kill while a checkpoint is written must find it


class JobError(ProgramError):
    """A run ended too early; the message has the last lines of its output."""


class LaunchedJob:
    """A program under the launcher, as a context that ends it; its results are in `out`."""

    PLACE = "GOSSIPJAX_PROCESS_ID"  # the environment variable that numbers the processes

    def __init__(self, launcher: Sequence[str], program: Sequence[str], processes: int, out: Path):
        launch = [sys.executable, "-m", "gossipjax.launch", "--processes", f"{processes}"]
        command = [*program, "--out", f"{out}"]
        self._command = [*launch, *launcher, "--", sys.executable, "-m", *command]
        self._last_lines = deque[str](maxlen=30)
        self.out = out

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
                self._last_lines.append(line.rstrip())
                self._handle_line(line)

    def _handle_line(self, line: str) -> None:
        """Called for each line of the output, on another thread."""

    def wait_for(self, condition: Callable[[], bool], description: str) -> bool:
        """Waits until `condition` is true; False if the job ends before."""
        while not condition():
            has_ended = not self._reader.is_alive()  # the launcher writes until it ends
            if has_ended and not condition():
                if status := self._launcher.wait():
                    lines = "\n".join(f"    {line}" for line in self._last_lines)
                    raise JobError(
                        f"the run ended with status {status} before {description}; last lines:\n"
                        f"{lines}"
                    )
                return False
            time.sleep(POLL_SECONDS)
        return True

    def wait_for_seconds(self, seconds: float) -> bool:
        """Waits; False if the job ends before."""
        due = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > due, "a fault")

    def wait_for_end(self) -> None:
        """Waits until the job has ended without an error."""
        self.wait_for(lambda: False, "its end")

    def describe(self) -> dict[str, Any]:
        """Returns what `summary.json` says of the job beside its run."""
        return {}

    def pids(self) -> dict[int, int]:
        """Returns `find_pids` of the launcher."""
        return find_pids(self._launcher.pid, self.PLACE)


def find_pids(launcher_pid: int, variable: str) -> dict[int, int]:
    """Returns `{number: pid}` of the running processes that a launcher has started."""
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


def make_table(rows: Sequence[dict[str, str]]) -> Table:
    """Makes a table whose rows, `{header: cell}`, are numbered from 1 on."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for header in ("", *(rows[0] if rows else ())):
        table.add_column(header, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(f"{number}", *row.values())
    return table
