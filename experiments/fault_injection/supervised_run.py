"""The image program under the launcher: started, followed by its output and files, and ended."""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orbax.checkpoint as ocp

from experiments.fault_injection.options import LOG_EVERY, Options
from experiments.program import ProgramError

ROOT = Path(__file__).resolve().parents[2]
MAX_LAST_LINES = 30  # of a failed run's output
STALL_TIMEOUT = 300.0  # seconds without output or a new step, after which a run counts as hanging
RESUME_DELAY = 0.5  # seconds after which a resumed run has removed the lines that it repeats

RESUMED = re.compile(r"\[0\] sgp resumes after step (\d+)")
RESTARTED = re.compile(r"\[launch\] restart (\d+) of")


class JobError(ProgramError):
    """A run ended too early, or hangs; the message has the last lines of its output."""


class SupervisedRun:
    """The image program under the launcher, as a context that ends it.

    Attributes:
      metrics: the file `metrics.jsonl` of the program.
      restarts: number of restarts that the launcher has reported.
      resumed_steps: for each restart after which the program has resumed, the step that it resumed
        from.
      last_event: time of the last report that it has resumed.
      startup_seconds: from the start of the run to its first line of metrics; 0 until then.
    """

    def __init__(self, options: Options, out: Path, seeds: Sequence[int], max_restarts: int):
        program = ["experiments.image", "--algorithm", "sgp", "--nodes", f"{options.processes}"]
        program += ["--epochs", f"{options.epochs}", "--log-every", f"{LOG_EVERY}"]
        program += ["--checkpoint-every", f"{options.checkpoint_every}", "--out", f"{out}"]
        program += ["--seed", *map(str, seeds), *["--overwrite"] * options.overwrite]
        launcher = ["gossipjax.launch", "--processes", f"{options.processes}", "--grace", "2"]
        launcher += ["--max-restarts", f"{max_restarts}", "--", sys.executable, "-m"]
        self._command = [sys.executable, "-m", *launcher, *program]
        self._processes = options.processes
        self._checkpoints = out / "checkpoints"
        self._last_lines = deque[str](maxlen=MAX_LAST_LINES)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._metrics_size = 0
        self.metrics = out / "metrics.jsonl"
        self.restarts = 0
        self.resumed_steps: dict[int, int] = {}
        self.last_event = 0.0
        self.startup_seconds = 0.0

    def __enter__(self) -> "SupervisedRun":
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

    def wait_for_startup(self, seconds: float) -> bool:
        """Waits as `wait_for` does: for all processes, and then for a time, or until they train."""
        if not self.wait_for(lambda: len(self.pids()) == self._processes, "its processes start"):
            return False
        end = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() > end or self.is_training(), "a kill")

    def wait_for_step(self, step: int) -> bool:
        """Waits as `wait_for` does, until the step is logged and the run will not repeat it."""

        def is_done() -> bool:
            has_resumed = time.monotonic() - self.last_event > RESUME_DELAY
            return self.is_training() and has_resumed and self.logged_step() >= step

        return self.wait_for(is_done, f"step {step}")

    def wait_for_restart(self, number: int) -> bool:
        """Waits as `wait_for` does, for this restart."""
        return self.wait_for(lambda: self.restarts >= number, f"restart {number}")

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
        if match := RESTARTED.match(line):
            self.restarts = int(match[1])
        elif match := RESUMED.match(line):
            self.resumed_steps[self.restarts] = int(match[1])
            self.last_event = time.monotonic()

    def seconds(self) -> float:
        """Returns the time since the start of the run."""
        return time.monotonic() - self._start_time

    def is_training(self) -> bool:
        """Whether the run has started, or resumed after the last restart."""
        return self.restarts == 0 or self.restarts in self.resumed_steps

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

    def pids(self) -> dict[int, int]:
        """Returns `find_pids` of the launcher."""
        return find_pids(self._launcher.pid)

    def resumed_from(self, restart: int) -> int | None:
        """Returns the step that the run first resumed from after this restart or a later one."""
        steps = [step for number, step in self.resumed_steps.items() if number >= restart]
        return steps[0] if steps else None


def find_pids(launcher_pid: int) -> dict[int, int]:
    """Returns `{process_id: pid}` of the running processes that a launcher has started."""
    pids = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == launcher_pid and state != "Z":
                for variable in (folder / "environ").read_bytes().split(b"\0"):
                    name, _, value = variable.partition(b"=")
                    if name == b"GOSSIPJAX_PROCESS_ID":
                        pids[int(value)] = int(folder.name)
    return pids


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Lets all processes, after each restart too, read the programs that one has compiled."""
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(
        prefix="gossipjax-cache-", ignore_cleanup_errors=True
    ) as folder:
        os.environ.update(zip(names, (folder, "0"), strict=True))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
