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
CLOCK_FIELDS = {"seconds_per_step", "examples_per_second", "input_wait"}
IDENTITY_FIELDS = {"run", "seed"}

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

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
      restart_seconds: from the kill until all processes have ended and the launcher restarts.
    """

    seconds: float
    process_id: int
    phase: Phase
    saving: bool
    logged_step: int
    saved_step: int = 0
    resumed_from: int | None = None
    restart_seconds: float = 0.0


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
    """Kills processes as planned, and waits for the end of the run; appends to `kills`.

    Where steps are quick, the run may be complete before the moment of a kill: then that kill and
    those after it are left out.
    """
    try:
        for number, (step, phase) in enumerate(plan_kills(options, rng), start=1):
            if not wait_for_moment(run, rng, step, phase):
                break
            kill = kill_process(run, rng, phase, FAULTS[options.fault])
            if kill is None:
                break
            kills.append(kill)
            if not run.wait_for_restart(number):
                kills.pop()  # it has hit a process that was done
                break
            kill.restart_seconds = run.seconds() - kill.seconds
            kill.saved_step = run.newest_checkpoint()
            report_progress(kill)
        run.wait_for_end()
    finally:
        for number, kill in enumerate(kills, start=1):
            kill.resumed_from = run.resumed_from(number)


def wait_for_moment(run: SupervisedRun, rng: random.Random, step: int, phase: Phase) -> bool:
    """Waits for the moment of a kill; returns False if the run was complete before."""
    if phase == "starting":
        return run.wait_for_startup(rng.uniform(0, run.startup_seconds))
    if not run.wait_for_step(step):
        return False
    if phase == "saving" and not run.wait_for(run.is_saving, "a checkpoint"):
        return False
    time.sleep(rng.uniform(0, MAX_SAVING_DELAY if phase == "saving" else MAX_DELAY))
    return True


def kill_process(
    run: SupervisedRun, rng: random.Random, phase: Phase, number: signal.Signals
) -> Kill | None:
    """Sends a signal to a random process of the run; returns None if none runs any more."""
    pids = sorted(run.pids().items())
    if not pids:
        return None
    process_id, pid = rng.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    saving = run.is_saving()
    logged_step = run.logged_step() if run.is_training() else run.newest_checkpoint()
    return Kill(run.seconds(), process_id, phase, saving, logged_step)


def find_violations(
    options: Options, kills: list[Kill], killed: Record, uninterrupted: list[Record]
) -> list[str]:
    """Returns a description of each requirement that was violated.

    Args:
      options: of the program.
      kills: those that were sent.
      killed: the result of the run that was killed.
      uninterrupted: the results of the run with the same seed, and of those with other seeds.
    """
    violations = [] if kills else ["no process was killed: the run was complete before"]
    for number, kill in enumerate(kills, start=1):
        # A run whose last step is saved may be complete, with nothing to resume.
        is_complete = kill.saved_step == options.steps and kill.resumed_from is None
        if kill.resumed_from != kill.saved_step and not is_complete:
            violations.append(
                f"kill {number}: the newest complete checkpoint was that of step "
                f"{kill.saved_step}, and the run resumed after step {kill.resumed_from}"
            )
        # A checkpoint is complete before the next one is started.
        lost = kill.logged_step - kill.saved_step
        if lost > 2 * options.checkpoint_every:
            violations.append(f"kill {number}: lost {lost} steps")
    same_seed, *other_seeds = uninterrupted
    violations += [
        f"{name}: {killed[name]}, and {value} without kills"
        for name, value in same_seed.items()
        if name not in CLOCK_FIELDS and killed[name] != value
    ]
    # Equal results prove something only if those of another run are different.
    outcomes = same_seed.keys() - CLOCK_FIELDS - IDENTITY_FIELDS
    violations += [
        f"seed {other['seed']}: the same results as with seed {same_seed['seed']}"
        for other in other_seeds
        if all(other[name] == same_seed[name] for name in outcomes)
    ]
    return violations
