"""Runs the cells of a grid, several side by side; those that are finished are not run again."""

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from experiments.compare.grid import Cell
from experiments.presets.preset import Program
from experiments.program import FatalError
from experiments.results import Record, read_summary

Status = Literal["finished", "diverged", "failed"]
STATE = "cell.json"
LOG = "output.log"
DIVERGED = "must be finite, got"  # what the programs say of a loss that is not
MAX_LOG_LINES = 8  # of a run that failed, in messages
MAX_CPU_JOBS = 8
PROBE = "import jax; print(jax.default_backend(), jax.local_device_count())"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      status: diverged is a loss that is not finite; failed is any other error.
      run: its entry in `summary.json`; None unless it has finished.
      error: the last lines of its output, if it has not.
      seconds: that it took.
    """

    status: Status
    run: Record | None = None
    error: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """What runs side by side can have.

    Attributes:
      jobs: how many runs at a time.
      environments: environment variables of each.
    """

    environments: tuple[dict[str, str], ...]

    @property
    def jobs(self) -> int:
        """How many runs at a time."""
        return len(self.environments)


def find_devices(jobs: int | None) -> Devices:
    """Returns what each of some runs has: a GPU; without GPUs, all share the cores.

    Args:
      jobs: how many; None is one for each GPU, or for each core, at most 8.

    Raises:
      ValueError: if there are fewer GPUs.
    """
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    platform, count = (probe.stdout.split() or ["cpu", "1"])[-2:]
    if platform == "cpu":
        return Devices(({},) * (jobs or min(MAX_CPU_JOBS, os.cpu_count() or 1)))
    devices = int(count) if platform in ("gpu", "cuda", "rocm") else 1
    if jobs is not None and jobs > devices:
        raise ValueError(
            f"--jobs must be at most {devices}, one for each device of {platform}, got {jobs}."
        )
    if devices == 1 or jobs == 1:
        return Devices(({},))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if len(visible) == devices else [f"{index}" for index in range(devices)]
    return Devices(tuple({"CUDA_VISIBLE_DEVICES": name} for name in names[:jobs]))


def run_cells(
    program: Program,
    cells: Sequence[Cell],
    folder: Path,
    devices: Devices,
    report: Callable[[Cell, Outcome], None],
) -> dict[Cell, Outcome]:
    """Runs all cells that have not ended before; returns how each ended.

    Args:
      program: `experiments.PROGRAM`.
      cells: in the order in which they are begun.
      folder: with a folder for each of them.
      devices: how many at a time.
      report: is told of each that has ended, now or before, as soon as it has; an error of it
        ends all runs.

    Raises:
      ValueError: if the folder has a run of the same name with other options.
      KeyboardInterrupt: after all runs have been ended.
    """
    outcomes: dict[Cell, Outcome] = {}

    def add(cell: Cell, outcome: Outcome) -> None:
        outcomes[cell] = outcome
        report(cell, outcome)

    for cell in cells:
        outcome = read_outcome(program, cell, folder / cell.name)
        if outcome is not None:
            add(cell, outcome)
    rest = [cell for cell in cells if cell not in outcomes]
    futures: dict[Future[Outcome], Cell] = {}
    environments = queue.SimpleQueue[dict[str, str]]()
    for environment in devices.environments:
        environments.put(environment)
    try:
        # The processes are ended first: the pool waits for its threads, and these for them.
        with ThreadPoolExecutor(devices.jobs) as pool, run_processes() as start:

            def run(cell: Cell) -> Outcome:
                environment = environments.get()
                try:
                    return run_cell(program, cell, folder / cell.name, environment, start)
                finally:
                    environments.put(environment)

            try:
                futures |= {pool.submit(run, cell): cell for cell in rest}
                for future in as_completed(futures):
                    add(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for future, cell in futures.items():  # what ended while the others were being stopped
            if cell not in outcomes and not future.cancelled() and future.exception() is None:
                outcome = future.result()
                if outcome.status != "failed":
                    add(cell, outcome)
    return {cell: outcomes[cell] for cell in cells}


Start = Callable[..., subprocess.Popen[bytes]]


@contextlib.contextmanager
def run_processes() -> Iterator[Start]:
    """Yields a function that starts processes; at the end of the context they are ended."""
    running: list[subprocess.Popen[bytes]] = []
    is_open = True
    lock = threading.Lock()  # nothing is started while all are ended

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        with lock:
            if not is_open:
                raise RuntimeError("the comparison has ended.")
            process = subprocess.Popen[bytes](command, **options)
            running.append(process)
        return process

    try:
        yield start
    finally:
        with lock:
            is_open = False
            for process in running:
                if process.poll() is None:
                    process.terminate()
        for process in running:
            process.wait()


def remove_cells(folder: Path) -> None:
    """Removes the runs of a comparison.

    Raises:
      ValueError: if there is anything else beside them; then nothing is removed.
    """
    if not folder.exists():
        return
    paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for path in paths:
        names = {inner.name for inner in path.iterdir()} if path.is_dir() else {path.name}
        if names and names.isdisjoint({STATE, LOG}):
            raise ValueError(
                f"--overwrite must find nothing but the runs of a comparison in {folder}, got "
                f"{path.name}: move it, or choose another --out."
            )
    shutil.rmtree(folder)


def read_outcome(program: Program, cell: Cell, folder: Path) -> Outcome | None:
    """Returns how a run ended in an earlier call; None if it did not, or failed."""
    path = folder / STATE
    if not path.exists():
        return None
    state = json.loads(path.read_text())
    if state["command"] != [program, *cell.arguments]:
        raise FatalError(
            f"--out must be the folder of this comparison, got {folder.parent.parent}, whose run "
            f"{cell.name} has the options {' '.join(state['command'][1:])}: choose another --out, "
            "or pass --overwrite to replace it."
        )
    if state["status"] == "failed":
        return None
    runs = read_summary(folder)["runs"] if state["status"] == "finished" else [None]
    return Outcome(state["status"], runs[0], state["error"], state["seconds"])


def run_cell(
    program: Program, cell: Cell, folder: Path, environment: dict[str, str], start: Start
) -> Outcome:
    """Runs a cell, and writes into its folder how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"experiments.{program}", *cell.arguments]
    command += ["--out", f"{folder}", "--overwrite"]
    began = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
        status = process.wait()
    outcome = judge(folder, status, time.monotonic() - began)
    state = {
        "command": [program, *cell.arguments],
        "status": outcome.status,
        "error": outcome.error,
        "seconds": outcome.seconds,
    }
    temporary = folder / "cell.new"
    temporary.write_text(json.dumps(state, indent=2))
    temporary.replace(folder / STATE)
    return outcome


def judge(folder: Path, status: int, seconds: float) -> Outcome:
    """Returns how a process ended, by its exit status and its output."""
    runs = read_summary(folder).get("runs", []) if status == 0 else []
    if runs:
        return Outcome("finished", runs[0], seconds=seconds)
    with (folder / LOG).open(errors="replace") as log:
        lines = [line.rstrip() for line in deque(log, MAX_LOG_LINES) if line.strip()]
    error = "\n".join(lines) or f"it ended with status {status}"
    has_diverged = bool(lines) and DIVERGED in " ".join(lines)
    return Outcome("diverged" if has_diverged else "failed", None, error, seconds)
