"""Kills of a run's processes at random moments, and what the run must do after each."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Literal

from experiments.fault_injection.options import Options
from experiments.fault_injection.supervised_run import SupervisedRun
from experiments.results import Record

MAX_DELAY = 0.2  # seconds, from the step at which a kill is due to the kill
MAX_SAVING_DELAY = 0.02  # seconds, from the start of a checkpoint to the kill
CLOCK_FIELDS = {"seconds_per_step", "examples_per_second", "fraction_outside_step"}

Phase = Literal["training", "saving", "starting"]


@dataclasses.dataclass
class Kill:
    """One kill, and how the run resumed.

    Attributes:
      seconds: since the run's start.
      process_id: the number of the process in the job.
      phase: the phase of the run that was aimed at.
      saving: whether a checkpoint was being written right after the kill.
      logged_step: the last step in `metrics.jsonl`; if the run had not resumed yet, that of the
        newest complete checkpoint.
      saved_step: the newest complete checkpoint when all processes had ended; 0 if none.
      resumed_from: the step after which the run resumed.
    """

    seconds: float
    process_id: int
    phase: Phase
    saving: bool
    logged_step: int
    saved_step: int = 0
    resumed_from: int | None = None


def plan_kills(options: Options, rng: random.Random) -> list[tuple[int, Phase]]:
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


def inject_kills(
    options: Options,
    run: SupervisedRun,
    rng: random.Random,
    kills: list[Kill],
    report_progress: Callable[[Kill], None],
) -> None:
    """Kills processes as planned, and waits for the end of the run; appends to `kills`."""
    startup_seconds = 0.0
    try:
        for number, (step, phase) in enumerate(plan_kills(options, rng), start=1):
            if phase == "starting":
                run.wait_for_processes(options.processes)
                run.wait_seconds(rng.uniform(0, startup_seconds))
            else:
                run.wait_for_step(step)
                startup_seconds = startup_seconds or run.seconds()
                if phase == "saving":
                    run.wait_for(run.is_saving, "a checkpoint")
                time.sleep(rng.uniform(0, MAX_SAVING_DELAY if phase == "saving" else MAX_DELAY))
            kill = kill_process(run, rng, phase)
            kills.append(kill)
            run.wait_for_restart(number)
            kill.saved_step = run.newest_checkpoint()
            report_progress(kill)
        run.wait_for_end()
    finally:
        for number, kill in enumerate(kills, start=1):
            kill.resumed_from = run.resumed_from(number)


def kill_process(run: SupervisedRun, rng: random.Random, phase: Phase) -> Kill:
    """Sends SIGKILL to a random process of the run."""
    process_id, pid = rng.choice(sorted(run.pids().items()))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    saving = run.is_saving()
    logged_step = run.logged_step() if run.is_training() else run.newest_checkpoint()
    return Kill(run.seconds(), process_id, phase, saving, logged_step)


def find_violations(
    options: Options, kills: list[Kill], killed: Record, uninterrupted: list[Record]
) -> list[str]:
    """Returns a description of each requirement that was violated."""
    violations = []
    for number, kill in enumerate(kills, start=1):
        if kill.resumed_from != kill.saved_step:
            violations.append(
                f"kill {number}: the newest complete checkpoint was that of step "
                f"{kill.saved_step}, and the run resumed after step {kill.resumed_from}"
            )
        # A checkpoint is complete before the next one is started.
        lost = kill.logged_step - kill.saved_step
        if lost > 2 * options.checkpoint_every:
            violations.append(f"kill {number}: lost {lost} steps")
    violations += [
        f"{name}: {killed[name]}, and {value} without kills"
        for name, value in uninterrupted[0].items()
        if name not in CLOCK_FIELDS and killed[name] != value
    ]
    accuracies = [run["test_accuracy_average_model"] for run in uninterrupted]
    if not min(accuracies) <= killed["test_accuracy_average_model"] <= max(accuracies):
        violations.append("the final accuracy is outside the range of the uninterrupted runs")
    return violations
