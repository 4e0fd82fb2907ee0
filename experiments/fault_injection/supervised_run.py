"""The image program under the launcher: where its training and its checkpoints are."""

import contextlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import orbax.checkpoint as ocp

from experiments.fault_injection.launched_job import LaunchedJob
from experiments.fault_injection.options import LOG_EVERY, Options

RESUME_DELAY = 0.5  # seconds after which a resumed run has removed the lines that it repeats

RESUMED = re.compile(r"\[0\] sgp resumes after step (\d+)")
RESTARTED = re.compile(r"\[launch\] restart (\d+) of")


class SupervisedRun(LaunchedJob):
    """The image program under the launcher, as a context that ends it.

    Attributes:
      resumed_steps: for each restart after which the program has resumed, the step that it resumed
        from.
      last_event: time of the last report that it has resumed.
    """

    def __init__(self, options: Options, out: Path, seeds: Sequence[int], max_restarts: int):
        program = ["experiments.image", "--algorithm", "sgp", "--nodes", f"{options.processes}"]
        program += ["--epochs", f"{options.epochs}", "--log-every", f"{LOG_EVERY}"]
        program += ["--checkpoint-every", f"{options.checkpoint_every}", "--out", f"{out}"]
        program += ["--seed", *map(str, seeds), *["--overwrite"] * options.overwrite]
        launcher = ["--grace", "2", "--max-restarts", f"{max_restarts}"]
        if options.fault == "stop":
            launcher += ["--stall", f"{options.stall}"]
        super().__init__(launcher, program, options.processes, out / "metrics.jsonl")
        self._checkpoints = out / "checkpoints"
        self.resumed_steps: dict[int, int] = {}
        self.last_event = 0.0

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

    def _handle_line(self, line: str) -> None:
        super()._handle_line(line)
        if match := RESTARTED.match(line):
            self.restarts = int(match[1])
        elif match := RESUMED.match(line):
            self.resumed_steps[self.restarts] = int(match[1])
            self.last_event = time.monotonic()

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

    def resumed_from(self, restart: int) -> int | None:
        """Returns the step that the run first resumed from after this restart or a later one."""
        steps = [step for number, step in self.resumed_steps.items() if number >= restart]
        return steps[0] if steps else None
