"""A job in lockstep whose processes are killed, and the same job without kills.

Trains SGP with `experiments.image` under `python -m gossipjax.launch`, a node per process, and
kills random processes during training, while a checkpoint is being written, and while the processes
start. After each kill the launcher restarts the job. The job must end, must resume each time from
the newest complete checkpoint, and must have the same result as the same job without kills, bit for
bit, while runs with other seeds must have another one. With `--fault stop` the processes get
SIGSTOP instead, and the launcher, with `--stall`, must notice.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import orbax.checkpoint as ocp

from experiments.fault_injection.job import LaunchedJob
from experiments.fault_injection.options import LOG_EVERY, LockstepOptions
from experiments.results import Record

MAX_DELAY = 0.2  # seconds, from the step at which a kill is due to the kill
MAX_START_SECONDS = 5.0  # from the start of the processes to a kill, unless they train before
MAX_SAVING_DELAY = 0.02  # seconds, from the start of a checkpoint to the kill
RESUME_DELAY = 0.5  # seconds after which a resumed run has removed the lines that it repeats
RESUMED = re.compile(r"\[0\] sgp resumes after step (\d+)")
RESTARTED = re.compile(r"\[launch\] restart (\d+) of")
CLOCK_FIELDS = {"seconds_per_step", "examples_per_second", "input_wait"}
IDENTITY_FIELDS = {"run", "seed"}

Phase = Literal["training", "saving", "starting"]


@dataclasses.dataclass
class Kill:
    """One kill, and how the run resumed."""

    process_id: int  # in the job
    phase: Phase  # of the run, at which the kill was aimed
    saving: bool  # a checkpoint was being written right after the kill
    logged_step: int  # the last in `metrics.jsonl`; before it resumed, the last that was saved
    saved_step: int = 0  # the newest complete checkpoint when all processes had ended; 0 if none
    resumed_from: int | None = None  # the step after which the run resumed

    def make_row(self) -> dict[str, str]:
        """Returns its row of the table."""
        fields = dataclasses.asdict(self)
        return {name.replace("_", "\n"): f"{value}" for name, value in fields.items()}


class LockstepJob(LaunchedJob):
    """The image program in lockstep: where its training and its checkpoints are.

    `restarts` counts what the launcher has reported.
    """

    def __init__(self, options: LockstepOptions, out: Path, seeds: Sequence[int], restarts: int):
        program = ["experiments.image", "--algorithm", "sgp", "--nodes", f"{options.processes}"]
        program += ["--epochs", f"{options.epochs}", "--log-every", f"{LOG_EVERY}"]
        program += ["--checkpoint-every", f"{options.checkpoint_every}"]
        program += ["--seed", *map(str, seeds)]
        launcher = ["--grace", "2", "--max-restarts", f"{restarts}"]
        if options.fault == "stop":
            launcher += ["--stall", f"{options.stall}"]
        super().__init__(launcher, program, options.processes, out)
        self.options = options
        self.restarts = 0
        self._checkpoints = out / "checkpoints"
        self._resumed_steps: dict[int, int] = {}  # restart -> where the program resumed after it
        self._last_resumed = 0.0

    def _handle_line(self, line: str) -> None:
        if match := RESTARTED.match(line):
            self.restarts = int(match[1])
        elif match := RESUMED.match(line):
            self._resumed_steps[self.restarts] = int(match[1])
            self._last_resumed = time.monotonic()

    def is_training(self) -> bool:
        """Whether the run has started, or resumed after the last restart."""
        return self.restarts == 0 or self.restarts in self._resumed_steps

    def has_logged(self, step: int) -> bool:
        """Whether the step is logged and the run will not repeat it."""
        has_resumed = time.monotonic() - self._last_resumed > RESUME_DELAY
        return self.is_training() and has_resumed and self.logged_step() >= step

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self._checkpoints.glob(f"*/*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def logged_step(self) -> int:
        """Returns the last step in `metrics.jsonl`; 0 if there is none."""
        metrics = self.out / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
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

    def inject_faults(self) -> Iterator[Kill]:
        """Kills processes as planned, and waits for the end of the run; yields the kills.

        If the run is complete before the moment of a kill, that kill and all later ones are left
        out.
        """
        rng = random.Random(self.options.seed)
        number = signal.SIGKILL if self.options.fault == "kill" else signal.SIGSTOP
        kills: list[Kill] = []
        try:
            for step, phase in plan_kills(self.options, rng):
                if not self.wait_for_moment(rng, step, phase):
                    break
                pids = sorted(self.pids().items())
                if not pids:
                    break
                process_id, pid = rng.choice(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                saving = self.is_saving()
                logged_step = self.logged_step() if self.is_training() else self.newest_checkpoint()
                kill = Kill(process_id, phase, saving, logged_step)
                has_restarted = self.wait_for(lambda: self.restarts > len(kills), "a restart")
                if not has_restarted:  # it has hit a process that was done
                    break
                kill.saved_step = self.newest_checkpoint()
                kills.append(kill)
                yield kill
            self.wait_for_end()
        finally:
            # Only now: after a kill at the start, the run resumes after a later restart.
            for restart, kill in enumerate(kills, start=1):
                kill.resumed_from = self.resumed_from(restart)

    def wait_for_moment(self, rng: random.Random, step: int, phase: Phase) -> bool:
        """Waits for the moment of a kill; returns False if the run was complete before."""
        if phase == "starting":
            count = self.options.processes
            if not self.wait_for(lambda: len(self.pids()) == count, "its processes start"):
                return False
            end = time.monotonic() + rng.uniform(0, MAX_START_SECONDS)
            return self.wait_for(lambda: time.monotonic() > end or self.is_training(), "a kill")
        if not self.wait_for(lambda: self.has_logged(step), f"step {step}"):
            return False
        if phase == "saving" and not self.wait_for(self.is_saving, "a checkpoint"):
            return False
        time.sleep(rng.uniform(0, MAX_SAVING_DELAY if phase == "saving" else MAX_DELAY))
        return True

    def find_violations(
        self, kills: list[Kill], killed: Record, uninterrupted: list[Record]
    ) -> Iterator[str]:
        """Yields a description of each requirement that was violated."""
        if not kills:
            yield "no process was killed: the run was complete before"
        for number, kill in enumerate(kills, start=1):
            # A run whose last step is saved may be complete, with nothing to resume.
            is_complete = kill.saved_step == self.options.steps and kill.resumed_from is None
            if kill.resumed_from != kill.saved_step and not is_complete:
                yield (
                    f"kill {number}: the newest complete checkpoint was that of step "
                    f"{kill.saved_step}, and the run resumed after step {kill.resumed_from}"
                )
            # A checkpoint is complete before the next one is started.
            lost = kill.logged_step - kill.saved_step
            if lost > 2 * self.options.checkpoint_every:
                yield f"kill {number}: lost {lost} steps"
        same_seed, *other_seeds = uninterrupted
        for name, value in same_seed.items():
            if name not in CLOCK_FIELDS and killed[name] != value:
                yield f"{name}: {killed[name]}, and {value} without kills"
        # Equal results prove something only if another run has different ones.
        outcomes = same_seed.keys() - CLOCK_FIELDS - IDENTITY_FIELDS
        for other in other_seeds:
            if all(other[name] == same_seed[name] for name in outcomes):
                yield f"seed {other['seed']}: the same results as with seed {same_seed['seed']}"


def plan_kills(options: LockstepOptions, rng: random.Random) -> list[tuple[int, Phase]]:
    """Returns the step at which each kill is due, one in each part of the run, and its phase."""
    cycle: list[Phase] = ["saving", "training", "training", "saving", "starting", "training"]
    phases: list[Phase] = [cycle[i % len(cycle)] for i in range(options.kills)]
    later_phases = phases[1:]  # the first kill is not while the processes start
    rng.shuffle(later_phases)
    first = 2 * options.checkpoint_every
    last = options.steps - 3 * options.checkpoint_every
    part = (last - first) / options.kills
    steps = [first + round((i + rng.random()) * part) for i in range(options.kills)]
    return list(zip(steps, [phases[0], *later_phases], strict=True))
