"""A job in lockstep whose processes are killed, beside the same job without kills.

Trains SGP with `experiments.image` under `python -m gossipjax.launch`, a node per process, and
sends SIGKILL to random processes at random moments: during training, while a checkpoint is being
written, and while the processes start. After each kill the launcher restarts the job. The job must
end, must resume each time from the newest complete checkpoint, and must have the same result as the
same job without kills, bit for bit, while runs with other seeds must have another one. With
`--fault stop` the processes get SIGSTOP instead, and the launcher, with `--stall`, must notice. A
kill whose moment comes after the end of the job is left out.
"""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rich.progress import Progress

from experiments import results
from experiments.fault_injection.job import ACCURACY, LockstepJob, make_table
from experiments.fault_injection.options import LockstepOptions
from experiments.results import Record

MAX_DELAY = 0.2  # seconds, from the step at which a kill is due to the kill
MAX_SAVING_DELAY = 0.02  # seconds, from the start of a checkpoint to the kill
CLOCK_FIELDS = {"seconds_per_step", "examples_per_second", "input_wait"}
IDENTITY_FIELDS = {"run", "seed"}

Phase = Literal["training", "saving", "starting"]
HEADERS = ("seconds", "process", "phase", "while\nsaving", "step\nlogged", "newest\nsaved")
HEADERS += ("resumed\nfrom", "steps\nlost", "restart\nafter (s)")


@dataclasses.dataclass
class Kill:
    """One kill, and how the run resumed."""

    seconds: float  # since the run's start
    process_id: int  # in the job
    phase: Phase  # of the run, at which the kill was aimed
    saving: bool  # a checkpoint was being written right after the kill
    logged_step: int  # the last in `metrics.jsonl`; before it resumed, the last that was saved
    saved_step: int = 0  # the newest complete checkpoint when all processes had ended; 0 if none
    resumed_from: int | None = None  # the step after which the run resumed
    restart_seconds: float = 0.0  # from the kill until the launcher restarts


def measure(options: LockstepOptions, out: Path, bar: Progress) -> list[str]:
    """Runs both jobs, writes `summary.json`, prints the table, and returns the violations."""
    kills: list[Kill] = []
    task = bar.add_task("uninterrupted", total=None, status=f"{1 + options.runs} runs")
    with LockstepJob(options, out / "uninterrupted", range(1 + options.runs), 0) as job:
        job.wait_for_end()
    bar.update(task, total=1, completed=1)
    task = bar.add_task("kills", total=options.kills, status="")
    try:
        with LockstepJob(options, out / "killed", [0], options.kills) as job:
            inject_kills(options, job, kills, lambda: bar.update(task, advance=1))
    finally:
        bar.console.print(make_table(HEADERS, map(make_row, kills)))
    uninterrupted = results.read_summary(out / "uninterrupted")["runs"]
    (killed,) = results.read_summary(out / "killed")["runs"]
    violations = find_violations(options, kills, killed, uninterrupted)
    record = {
        "kills": [dataclasses.asdict(kill) for kill in kills],
        "killed": killed,
        "uninterrupted": uninterrupted,
        "violations": violations,
    }
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * run[ACCURACY] for run in uninterrupted]
    bar.console.print(
        f"{len(kills)} of {options.kills} {options.fault}s of {options.processes} processes, "
        f"{sum(kill.saving for kill in kills)} while a checkpoint was written; {options.steps} "
        f"steps, a checkpoint every {options.checkpoint_every}. Final accuracy "
        f"{100 * killed[ACCURACY]:.2f} %; without {accuracies[0]:.2f} %, with other seeds "
        f"{min(accuracies[1:]):.2f} to {max(accuracies[1:]):.2f} %.",
        soft_wrap=True,
    )
    return violations


def make_row(kill: Kill) -> list[str]:
    """Returns the cells of a kill, without its number."""
    start = kill.resumed_from
    resumed = ["-", "-"] if start is None else [f"{start}", f"{kill.logged_step - start}"]
    row = [f"{kill.seconds:.1f}", f"{kill.process_id}", kill.phase, "yes" if kill.saving else ""]
    row += [f"{kill.logged_step}", f"{kill.saved_step}", *resumed]
    return [*row, f"{kill.restart_seconds:.1f}"]


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


def inject_kills(
    options: LockstepOptions, job: LockstepJob, kills: list[Kill], report: Callable[[], None]
) -> None:
    """Kills processes as planned, and waits for the end of the run; appends to `kills`.

    Where steps are quick, the run may be complete before the moment of a kill: then that kill and
    those after it are left out.
    """
    rng = random.Random(options.seed)
    number = signal.SIGKILL if options.fault == "kill" else signal.SIGSTOP
    try:
        for restart, (step, phase) in enumerate(plan_kills(options, rng), start=1):
            if not wait_for_moment(job, rng, step, phase):
                break
            kill = kill_process(job, rng, phase, number)
            if kill is None:
                break
            if not job.wait_for_restart(restart):  # it has hit a process that was done
                break
            kill.restart_seconds = job.seconds() - kill.seconds
            kill.saved_step = job.newest_checkpoint()
            kills.append(kill)
            report()
        job.wait_for_end()
    finally:
        for restart, kill in enumerate(kills, start=1):
            kill.resumed_from = job.resumed_from(restart)


def wait_for_moment(job: LockstepJob, rng: random.Random, step: int, phase: Phase) -> bool:
    """Waits for the moment of a kill; returns False if the run was complete before."""
    if phase == "starting":
        return job.wait_for_startup(rng.uniform(0, job.startup_seconds))
    if not job.wait_for_step(step):
        return False
    if phase == "saving" and not job.wait_for(job.is_saving, "a checkpoint"):
        return False
    time.sleep(rng.uniform(0, MAX_SAVING_DELAY if phase == "saving" else MAX_DELAY))
    return True


def kill_process(
    job: LockstepJob, rng: random.Random, phase: Phase, number: signal.Signals
) -> Kill | None:
    """Sends a signal to a random process of the run; returns None if none runs any more."""
    pids = sorted(job.pids().items())
    if not pids:
        return None
    process_id, pid = rng.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    saving = job.is_saving()
    logged_step = job.logged_step() if job.is_training() else job.newest_checkpoint()
    return Kill(job.seconds(), process_id, phase, saving, logged_step)


def find_violations(
    options: LockstepOptions, kills: list[Kill], killed: Record, uninterrupted: list[Record]
) -> list[str]:
    """Returns a description of each requirement that was violated."""
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
