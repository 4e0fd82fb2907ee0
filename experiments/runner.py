"""Runs calls of programs, several side by side, and does not repeat finished calls."""

import contextlib
import dataclasses
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import gossipjax as gx
from experiments.program import FatalError
from experiments.results import Record, create_run_dir, read_object, replace_text

Status = Literal["finished", "diverged", "failed", "missing"]
Devices = Sequence[dict[str, str]]
"""Environment variables, one dict for each run that can run at the same time."""

STATE = "run.json"
KEPT_FIELDS = ("status", "error", "seconds", "code", "machine")  # fields of a result in that file
LOG = "output.log"
DIVERGED = "must be finite, got"  # how programs begin the error about a loss that is not finite
MAX_LOG_LINES = 8  # lines of a failed run's log in messages
ROOT = Path(__file__).parents[1]
MAX_CPU_JOBS = 8
PROBE = "import jax; print(jax.default_backend(), jax.local_device_count())"
GRACE_SECONDS = 20.0  # time for a process to end its children and remove its files
MAX_SECONDS = 4 * 3600.0


class Run(NamedTuple):
    """A call of a program."""

    # Letters, digits, dots and dashes: the name of its folder. Sections that need the same call
    # give it the same name.
    name: str
    program: str  # `python -m experiments.PROGRAM`; or `gossipjax.launch`, with its whole name
    arguments: tuple[str, ...]  # without `--out`, which is added
    is_alone: bool = False  # whether it measures time, so that nothing else may run
    version: str = ""  # version of other software that it runs; "" if there is none

    def list_arguments(self, out: Path) -> list[str]:
        """Returns the arguments with `--out`, before those that `compare` gives to its own runs."""
        given = self.arguments
        is_divided = self.program == "compare" and "--" in given
        end = given.index("--") if is_divided else len(given)
        return [*given[:end], "--out", f"{out}", *given[end:]]

    @property
    def module(self) -> str:
        """The module that `python -m` runs."""
        is_whole = self.program.startswith("gossipjax.")
        return self.program if is_whole else f"experiments.{self.program}"

    @property
    def call(self) -> list[str]:
        """What identifies the run: program, arguments and version."""
        return [self.program, *self.arguments, *([self.version] if self.version else [])]

    @property
    def command(self) -> str:
        """The command line.

        >>> Run("a", "averaging", ("--nodes", "8")).command
        'python -m experiments.averaging --nodes 8'
        >>> Run("b", "gossipjax.launch", ("--processes", "2")).command
        'python -m gossipjax.launch --processes 2'
        """
        return " ".join(["python -m", self.module, *self.arguments])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    # A loss that is not finite has diverged, any other error failed; missing is a run that was not
    # begun or was interrupted.
    status: Status
    folder: Path | None = None  # the results of the program; None if the run is missing
    summary: Record = dataclasses.field(default_factory=dict)  # {} unless the run has finished
    error: str = ""  # the last lines of its output, if it has not finished
    seconds: float = 0.0
    code: str = ""  # the commit; "" if it is not known
    machine: str = ""  # the processor that it ran on; "" if it is not known

    @property
    def runs(self) -> list[Record]:
        """The entries of `summary.json`, or none before the run has finished."""
        return self.summary.get("runs", [])


def make_folder(program: str, out: Path | None, overwrite: bool, name: str) -> Path:
    """Makes the folder of a program that runs other programs, with `OUT/NAME` for their runs.

    A later call finds `OUT/NAME`, and goes on. Raises `ValueError` if the folder contains another
    run, or `OUT/NAME` contains other files.
    """
    if out is not None:
        require_runs(out / name, overwrite)
        if overwrite:
            shutil.rmtree(out / name, ignore_errors=True)
    is_new = out is None or not (out / name).exists()
    out = create_run_dir(program, out, overwrite, resume=not is_new)
    (out / name).mkdir(exist_ok=not is_new)
    metrics = out / "metrics.jsonl"  # made for a run; its lines are in the runs' folders
    if not metrics.read_text():
        metrics.unlink()
    return out


def require_runs(folder: Path, is_removed: bool) -> None:
    """Raises `ValueError` if a folder of runs contains other folders.

    If the folder `is_removed`, it may not contain other files either.
    """
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        is_harmless = path.is_file() and path != folder and not is_removed
        if not is_run(path) and not is_harmless:
            raise ValueError(
                f"--out must be a folder with nothing but its own runs in {folder.name}/, got "
                f"{path}: move it, or choose another --out."
            )


def is_run(path: Path) -> bool:
    """Whether a folder is empty or contains a run."""
    if not path.is_dir():
        return False
    names = {inner.name for inner in path.iterdir()}
    return not names or not names.isdisjoint({STATE, LOG})


def empty_folder(folder: Path) -> None:
    """Empties or makes the folder of a run; raises `ValueError` if it contains no run."""
    if folder.exists() and not is_run(folder):
        raise ValueError(f"{folder} must be the folder of a run, got another: move it away.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def read_state(folder: Path) -> Record | None:
    """Returns how the run in a folder ended; None if it has not, or the file is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_object(folder / STATE)
    return None


def read_result(state: Record, folder: Path) -> Result | None:
    """Returns how a run ended in an earlier call; None if it failed or its summary is gone."""
    summary = read_summary(folder) if state["status"] == "finished" else {}
    if not summary and state["status"] != "diverged":
        return None
    ended = {name: state[name] for name in KEPT_FIELDS if name in state}
    return Result(folder=folder, summary=summary, **ended)


def read_summary(folder: Path) -> Record:
    """Returns `summary.json` of a run; `{}` if there is none, or it has no results."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        summary = read_object(folder / "summary.json")
        # A report may consist of sections that need no runs.
        return summary if summary.get("runs", True) or summary.get("sections") else {}
    return {}


def judge(folder: Path, status: int, seconds: float) -> Result:
    """Says how a process ended, from its exit status and its output."""
    summary = read_summary(folder) if status == 0 else {}
    if summary:
        return Result(status="finished", folder=folder, summary=summary, seconds=seconds)
    lines = read_tail(folder / LOG, MAX_LOG_LINES)
    error = "\n".join(lines) or f"it ended with status {status}"
    has_diverged = bool(lines) and DIVERGED in " ".join(lines)
    status_name = "diverged" if has_diverged else "failed"
    return Result(status=status_name, folder=folder, error=error, seconds=seconds)


def find_commit() -> str:
    """Returns the commit of this checkout, with `-dirty` if files differ; "" outside of one."""
    command = ["git", "-C", f"{ROOT}", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # there is no git
        return ""


def find_machine() -> str:
    """Returns processor (or its architecture, if no more is known), cores and system."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    processor = match[1] if match else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}"


def find_devices(jobs: int | None) -> Devices:
    """Gives a GPU to each of several runs. Without GPUs, all runs share the cores.

    If `jobs` is None, there is a run for each GPU, or for each core, at most 8.
    """
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    platform, count = (probe.stdout.split() or ["cpu", "1"])[-2:]
    if platform == "cpu":
        return [{}] * (jobs or min(MAX_CPU_JOBS, os.cpu_count() or 1))
    devices = int(count) if platform in ("gpu", "cuda", "rocm") else 1
    if jobs is not None and jobs > devices:
        raise ValueError(
            f"--jobs must be at most {devices}, one for each device of {platform}, got {jobs}."
        )
    if devices == 1 or jobs == 1:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = visible if len(visible) == devices else [f"{index}" for index in range(devices)]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:jobs]]


class Processes:
    """Starts commands from several threads, and ends all of them at the end of its context.

    Each process has its own process group: Ctrl-C reaches this program only, which also ends
    children that a process leaves behind. A process has `grace` seconds to end by itself.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self._grace = grace
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_open = True
        self._lock = threading.Lock()  # no run starts while all runs are ended

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_open = False
            running = list(self._running)  # threads remove from it what ends
        with ignore_stop_signals():
            self._end(running)

    def start(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Starts a command whose output goes to `log`, and which finds this checkout's modules."""
        python_path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), f"{ROOT}"]))
        with log.open("wb") as output, self._lock:
            if not self._is_open:
                raise RuntimeError("the runs have been ended.")
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "PYTHONPATH": python_path},
                start_new_session=True,
            )
            self._running.append(process)
        return process

    def run(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], max_seconds: float
    ) -> int:
        """Runs a command; returns its exit status (of SIGKILL, if it took too long)."""
        process = self.start(command, log, environment)
        try:
            return process.wait(max_seconds)
        except subprocess.TimeoutExpired:
            self._end([process])
            with log.open("a") as output:
                output.write(f"\nit must end within {max_seconds:g} s, got no end: it was stopped")
            return -signal.SIGKILL
        finally:
            _kill_group(process)
            with self._lock:
                self._running.remove(process)

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        if self._grace:
            for process in processes:
                process.terminate()
        end = time.monotonic() + self._grace
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            _kill_group(process)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def read_tail(log: Path, count: int) -> list[str]:
    """Returns the last lines of an output that are not empty."""
    with log.open(errors="replace") as lines:
        return list(deque((line.rstrip() for line in lines if line.strip()), count))


def ignore_stop_signals() -> contextlib.AbstractContextManager[None]:
    """Ignores Ctrl-C and SIGTERM, on the main thread, while processes are ended."""
    if threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return gx.launch.signal_handlers((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class ProgressBar:
    """A bar that shows which runs go on, which have ended, and how long the rest may take.

    Attributes:
      results: the results of the runs that have ended, by name.
    """

    def __init__(self, runs: Sequence[Run], bar: Progress, jobs: int):
        self.results: dict[str, Result] = {}
        self._runs = runs
        self._bar = bar
        self._jobs = jobs
        self._began: dict[str, float] = {}  # running runs -> when they began
        self._seconds: list[float] = []  # seconds of the runs of this call
        self._task = bar.add_task("runs", total=len(runs), status="")

    def begin(self, run: Run) -> None:
        """Shows a run that begins. The thread that waits for the run calls this."""
        self._began[run.name] = time.monotonic()
        self._show()

    def end(self, run: Run, result: Result) -> None:
        """Counts a run that has ended, now or in an earlier call. An error here ends all runs."""
        self.results[run.name] = result
        if self._began.pop(run.name, None) is not None:
            self._seconds.append(result.seconds)
            self._bar.console.print(
                f"{len(self.results)} of {len(self._runs)}: {run.name} {result.status}, "
                f"{format_seconds(result.seconds)}",
                style="dim" if result.status == "finished" else "yellow",
                highlight=False,
                soft_wrap=True,
            )
        self._show()

    def _show(self) -> None:
        left = [run for run in self._runs if run.name not in self.results]
        status = f"{', '.join(self._began) or 'none'}; {len(left) - len(self._began)} left"
        if self._seconds and len(left) > len(self._began):
            # Assume the mean of this call; running runs have used a part of it.
            mean = sum(self._seconds) / len(self._seconds)
            behind = sum(min(mean, time.monotonic() - began) for began in self._began.values())
            alone = sum(run.is_alone for run in left)
            rest = (mean * (len(left) - alone) - behind) / self._jobs + mean * alone
            status += f", about {format_seconds(max(0.0, rest))}"
        self._bar.update(self._task, completed=len(self.results), status=status)


def make_run_bar(console: Console) -> Progress:
    """Makes the bar for a `ProgressBar`."""
    return Progress(
        TextColumn("{task.completed} of {task.total}"),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )


def format_seconds(seconds: float) -> str:
    """Formats a time for people.

    >>> format_seconds(7.3), format_seconds(191), format_seconds(7262)
    ('7 s', '3 min 11 s', '2 h 1 min')
    """
    minutes = round(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {round(seconds) % 60} s" if minutes else f"{seconds:.0f} s"


def run_all(
    runs: Sequence[Run],
    folder: Path,
    devices: Devices,
    reporter: ProgressBar,
    replaces: bool = False,
    max_seconds: float = MAX_SECONDS,
) -> dict[str, Result]:
    """Runs all calls that did not end in an earlier call; returns how each ended, by name.

    Runs with `is_alone` come last, one at a time. An earlier run of the same name with other
    arguments is run anew if `replaces`, else it is a `FatalError`.
    """
    results: dict[str, Result] = {}
    for run in runs:
        result = find_result(run, folder / run.name, replaces)
        if result is not None:
            results[run.name] = result
            reporter.end(run, result)
    rest = [run for run in runs if run.name not in results]
    for is_alone, share in ((False, devices), (True, devices[:1])):
        part = [run for run in rest if run.is_alone == is_alone]
        results |= Batch(folder, share, reporter, max_seconds).run(part)
    return {run.name: results[run.name] for run in runs}


def find_result(run: Run, folder: Path, replaces: bool = True) -> Result | None:
    """Returns how a run ended in an earlier call; None if it must be run."""
    state = read_state(folder)
    if state is None:
        return None
    if state["command"] == run.call:
        return read_result(state, folder)
    if not replaces:
        raise FatalError(
            f"--out must be the folder of the same runs, got {folder.parent.parent}, whose run "
            f"{run.name} has the options {' '.join(state['command'][1:])}: choose another --out, "
            "or pass --overwrite to replace it."
        )
    return None


class Batch:
    """Runs that may all run at the same time."""

    def __init__(self, folder: Path, devices: Devices, reporter: ProgressBar, max_seconds: float):
        self._folder = folder
        self._reporter = reporter
        self._max_seconds = max_seconds
        self._environments = queue.SimpleQueue[dict[str, str]]()
        for environment in devices:
            self._environments.put(environment)
        self._jobs = len(devices)
        self._processes = Processes()
        self._results: dict[str, Result] = {}

    def run(self, runs: Sequence[Run]) -> dict[str, Result]:
        """Runs all runs; returns how each ended."""
        futures: dict[Future[Result], Run] = {}
        try:
            # The processes are ended first: the pool waits for its threads, and these for them.
            with ThreadPoolExecutor(self._jobs) as pool, self._processes:
                try:
                    futures |= {pool.submit(self._run, run): run for run in runs}
                    for future in as_completed(futures):
                        self._add(futures[future], future.result())
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            for future, run in futures.items():  # runs that ended while others were stopped
                is_new = run.name not in self._results and not future.cancelled()
                if is_new and future.exception() is None and future.result().status != "failed":
                    self._add(run, future.result())
        return self._results

    def _add(self, run: Run, result: Result) -> None:
        self._results[run.name] = result
        self._reporter.end(run, result)

    def _run(self, run: Run) -> Result:
        """Runs a call on the next free devices, and writes into its folder how it ended."""
        environment = self._environments.get()
        try:
            self._reporter.begin(run)
            folder = self._folder / run.name
            empty_folder(folder)
            path = Path(sys.executable).parent, os.environ.get("PATH", os.defpath)
            began = time.monotonic()
            status = self._processes.run(
                [sys.executable, "-m", run.module, *run.list_arguments(folder)],
                folder / LOG,
                # A command `python` is the Python that runs this program.
                os.environ | environment | {"PATH": os.pathsep.join(map(str, path))},
                self._max_seconds,
            )
            result = dataclasses.replace(
                judge(folder, status, time.monotonic() - began),
                code=find_commit(),
                machine=find_machine(),
            )
            state = {"command": run.call} | {name: getattr(result, name) for name in KEPT_FIELDS}
            replace_text(folder / STATE, json.dumps(state, indent=2))
            return result
        finally:
            self._environments.put(environment)
