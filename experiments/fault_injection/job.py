"""A job under the launcher: started, followed by its output and files, and ended.

`LockstepJob` and `AsynchronousJob` know in addition what the image program writes.
"""

import bisect
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Self

import orbax.checkpoint as ocp
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.fault_injection.options import LOG_EVERY, AsynchronousOptions, LockstepOptions
from experiments.program import ProgramError

ROOT = Path(__file__).resolve().parents[2]
ACCURACY = "test_accuracy_average_model"
STALL_TIMEOUT = 300.0  # seconds without output or a new step, after which a run counts as hanging
RESUME_DELAY = 0.5  # seconds after which a resumed run has removed the lines that it repeats
MIN_STEPS = 20  # of an asynchronous node, after which it is there
SLOW = "experiments.fault_injection.slow"
RESUMED = re.compile(r"\[0\] sgp resumes after step (\d+)")
RESTARTED = re.compile(r"\[launch\] restart (\d+) of")


class JobError(ProgramError):
    """A run ended too early, or hangs; the message has the last lines of its output."""


class LaunchedJob:
    """A program under the launcher, as a context that ends it.

    The results are in `out`, the first line of metrics came after `startup_seconds`, and
    `restarts` counts what the launcher has reported.
    """

    PLACE = "GOSSIPJAX_PROCESS_ID"  # the environment variable that numbers the processes

    def __init__(self, launcher: Sequence[str], program: Sequence[str], processes: int, out: Path):
        launch = [sys.executable, "-m", "gossipjax.launch", "--processes", f"{processes}"]
        command = [*program, "--out", f"{out}"]
        self._command = [*launch, *launcher, "--", sys.executable, "-m", *command]
        self._processes = processes
        self._last_lines = deque[str](maxlen=30)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._metrics_size = 0
        self.out = out
        self.metrics = out / "metrics.jsonl"
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
        self._start_time = self._last_progress = time.monotonic()
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
        """Waits until `condition` is true; False if the job ends before."""
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

    def wait_for_seconds(self, seconds: float) -> bool:
        """Waits; False if the job ends before."""
        due = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > due, "a fault")

    def wait_for_end(self) -> None:
        """Waits until the job has ended without an error."""
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
        """Returns the time since the start of the job."""
        return time.monotonic() - self._start_time

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


class LockstepJob(LaunchedJob):
    """The image program in lockstep: where its training and its checkpoints are."""

    def __init__(self, options: LockstepOptions, out: Path, seeds: Sequence[int], restarts: int):
        program = ["experiments.image", "--algorithm", "sgp", "--nodes", f"{options.processes}"]
        program += ["--epochs", f"{options.epochs}", "--log-every", f"{LOG_EVERY}"]
        program += ["--checkpoint-every", f"{options.checkpoint_every}"]
        program += ["--seed", *map(str, seeds), *["--overwrite"] * options.overwrite]
        launcher = ["--grace", "2", "--max-restarts", f"{restarts}"]
        if options.fault == "stop":
            launcher += ["--stall", f"{options.stall}"]
        super().__init__(launcher, program, options.processes, out)
        self._checkpoints = out / "checkpoints"
        self._resumed_steps: dict[int, int] = {}  # restart -> where the program resumed after it
        self._last_resumed = 0.0

    def wait_for_startup(self, seconds: float) -> bool:
        """Waits for all processes, and then for a time, or until they train."""
        if not self.wait_for(lambda: len(self.pids()) == self._processes, "its processes start"):
            return False
        end = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > end or self.is_training(), "a kill")

    def wait_for_step(self, step: int) -> bool:
        """Waits until the step is logged and the run will not repeat it."""

        def is_done() -> bool:
            has_resumed = time.monotonic() - self._last_resumed > RESUME_DELAY
            return self.is_training() and has_resumed and self.logged_step() >= step

        return self.wait_for(is_done, f"step {step}")

    def wait_for_restart(self, number: int) -> bool:
        """Waits for this restart."""
        return self.wait_for(lambda: self.restarts >= number, f"restart {number}")

    def _handle_line(self, line: str) -> None:
        super()._handle_line(line)
        if match := RESTARTED.match(line):
            self.restarts = int(match[1])
        elif match := RESUMED.match(line):
            self._resumed_steps[self.restarts] = int(match[1])
            self._last_resumed = time.monotonic()

    def is_training(self) -> bool:
        """Whether the run has started, or resumed after the last restart."""
        return self.restarts == 0 or self.restarts in self._resumed_steps

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self._checkpoints.glob(f"*/*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def logged_step(self) -> int:
        """Returns the last step in `metrics.jsonl`; 0 if there is none."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        for line in reversed(lines):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)["step"]
        return 0

    def newest_checkpoint(self) -> int:
        """Returns the step of the newest complete checkpoint; 0 if there is none."""
        names = [path.name for path in self._checkpoints.glob("*/*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def resumed_from(self, restart: int) -> int | None:
        """Returns the step that the run first resumed from after this restart or a later one."""
        steps = (step for number, step in self._resumed_steps.items() if number >= restart)
        return next(steps, None)


class AsynchronousJob(LaunchedJob):
    """The image program as asynchronous nodes: the steps that each has begun."""

    PLACE = "GOSSIPJAX_NODE"

    def __init__(
        self, options: AsynchronousOptions, out: Path, seeds: Sequence[int], restarts: int
    ):
        program = [SLOW, "image", "--algorithm", options.algorithm]
        program += ["--nodes", f"{options.processes}", "--epochs", f"{options.epochs}"]
        program += ["--step-seconds", f"{options.step_seconds}", "--seed", *map(str, seeds)]
        launcher = ["--asynchronous", "--max-restarts", f"{restarts}", "--restart-delay", "0"]
        super().__init__(launcher, program, options.processes, out)
        self._offsets: dict[Path, int] = {}  # of what was read
        self._steps: dict[int, list[float]] = {}

    def read_steps(self) -> dict[int, list[float]]:
        """Returns place -> the times at which it has begun steps, in all runs so far."""
        for path in self.list_journals():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().split(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + sum(len(x) + 1 for x in lines[:-1])
            found = map(json.loads, lines[:-1])
            times = [line["time"] for line in found if line["event"] == "begin"]
            self._steps.setdefault(int(path.stem), []).extend(times)
        return self._steps

    def wait_for_steps(self, place: int, since: float) -> bool:
        """Waits until a node has made some steps since a time; False if the job ends before."""

        def has_made_steps() -> bool:
            time.sleep(0.1)
            times = self.read_steps().get(place, [])
            return len(times) - bisect.bisect_right(times, since) >= MIN_STEPS

        return self.wait_for(has_made_steps, f"steps of node {place}")

    def wait_for_restart(self, place: int, old: int) -> bool:
        """Waits until the process of a node is another one than the old."""
        return self.wait_for(
            lambda: self.pids().get(place, old) != old, f"node {place} is started again"
        )

    def list_journals(self) -> list[Path]:
        """Returns the files of all nodes."""
        return sorted(self.out.glob("nodes/*/journals/*/*.jsonl"))


def make_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Makes a table whose rows are numbered from 1 on."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for header in ("", *headers):
        table.add_column(header, justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(f"{number}", *row)
    return table
