"""A job under the launcher: started, followed by its output and files, and ended."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from experiments.program import ProgramError
from experiments.runner import Processes, read_tail

ACCURACY = "test_accuracy_average_model"
TAIL_LINES = 30
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
        self._log = Path(f"{out}.log")
        self._begun_line = ""  # the end of what was read, before the rest of it is written
        self._processes = Processes()
        self.out = out

    def __enter__(self) -> Self:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._processes.__enter__()
        self._launcher = self._processes.start(self._command, self._log, environment)
        self._output = self._log.open(errors="replace")
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__(*error)
        self._output.close()

    def _handle_line(self, line: str) -> None:
        """Called for each line of the output."""

    def wait_for(self, condition: Callable[[], bool], description: str) -> bool:
        """Waits until `condition` is true; False if the job ends before."""
        while True:
            status = self._launcher.poll()
            *lines, self._begun_line = (self._begun_line + self._output.read()).split("\n")
            for line in lines:
                self._handle_line(line)
            if condition():
                return True
            if status:
                last = "\n".join(f"    {line}" for line in read_tail(self._log, TAIL_LINES))
                raise JobError(
                    f"the run ended with status {status} before {description}; last lines:\n{last}"
                )
            if status is not None:
                return False
            time.sleep(POLL_SECONDS)

    def wait_for_seconds(self, seconds: float) -> bool:
        """Waits; False if the job ends before."""
        due = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > due, "a fault")

    def wait_for_end(self) -> None:
        """Waits until the job has ended without an error."""
        self.wait_for(lambda: False, "its end")

    def describe(self) -> dict[str, Any]:
        """Returns what else `summary.json` says of the job."""
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
