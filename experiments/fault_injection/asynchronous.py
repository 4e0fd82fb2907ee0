"""Asynchronous jobs whose nodes are killed and stopped, beside an undisturbed one.

Trains `async-sgp` or `async-adpsgd` with `experiments.image` under `python -m gossipjax.launch
--asynchronous`; its computation is a sleep in each step, as of devices that do not share these
cores. One job has its processes killed: SIGKILL to a random one, some seconds after the one before
was back; the launcher starts it again, and it joins anew. In another job a process is stopped for
`--stop-seconds` (SIGSTOP), and goes on (SIGCONT). A third job is undisturbed, with other seeds.

Required: the others never stop, and their median step takes as long as before, within 5 %; a node
is back within 10 s of its restart, or its going on; the account of the weight (living, on its way,
dead) closes to 1e-6; the accuracy is that of the undisturbed runs, within their spread.
"""

import bisect
import dataclasses
import itertools
import math
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from rich.progress import Progress

import gossipjax as gx
from experiments import results
from experiments.fault_injection.job import ACCURACY, AsynchronousJob, make_table
from experiments.fault_injection.options import AsynchronousOptions
from experiments.results import Record

MAX_DELAY = 3.0  # seconds after the last one is back, until the next kill
MAX_BACK_SECONDS = 10.0  # from the restart of a process, or its going on, to the node's first step
MAX_PAUSE_SECONDS = 5.0  # of another node: the patience within which it would be declared dead
MAX_CHANGE = 0.05  # of the step time of the other nodes
MAX_DIFFERENCE = 1e-6  # of the account, relative to what founders brought
UNDISTURBED = "undisturbed"
HEADERS = ("seconds", "node", "gone s", "back s", "others'\npause s")
HEADERS += ("others' step\nbefore ms", "during ms", "change %")


@dataclasses.dataclass
class Fault:
    """One kill or stop; all times are seconds since 1970."""

    name: str  # kills or stops
    place: int  # of the node
    time: float  # when it was killed or stopped
    since: float  # when its process was started again, or went on
    back: float | None = None  # when it began its next step; None if it never did
    pause: float = 0.0  # the longest of another node between two steps, until this one was back
    step_before: float | None = None  # of the others, the median, as long before a stop
    step_during: float | None = None  # while it was stopped

    @property
    def change(self) -> float:
        """By which part of it the step time of the others changed."""
        return (self.step_during or math.nan) / (self.step_before or math.nan) - 1

    def complete(self, steps: dict[int, list[float]]) -> None:
        """Adds what the times tell at which each place began its steps."""
        own = steps.get(self.place, [])
        self.back = next(iter(own[bisect.bisect_right(own, self.since) :]), None)
        others = [times for place, times in steps.items() if place != self.place]
        for times in others:
            first = max(0, bisect.bisect(times, self.time) - 1)
            during = itertools.takewhile(lambda t: t < (self.back or math.inf), times[first:])
            self.pause = max(self.pause, *(b - a for a, b in itertools.pairwise(during)), 0.0)
        if self.name == "stops":
            self.step_before = measure_step(others, 2 * self.time - self.since, self.time)
            self.step_during = measure_step(others, self.time, self.since)

    def make_row(self, start: float) -> list[str]:
        """Returns the cells of the table after its number; `start` is that of the job."""
        back = "never" if self.back is None else f"{self.back - self.since:.1f}"
        row = [f"{self.time - start:.1f}", f"{self.place}", f"{self.since - self.time:.1f}", back]
        steps = [self.step_before, self.step_during]
        row += [f"{self.pause:.2f}", *("-" if s is None else f"{1000 * s:.2f}" for s in steps)]
        return [*row, "-" if None in steps else f"{100 * self.change:+.1f}"]


def measure_step(nodes: list[list[float]], begin: float, end: float) -> float | None:
    """The median of the seconds between steps that nodes began in an interval; None of none."""
    seconds = [
        after - before
        for times in nodes
        for before, after in itertools.pairwise(t for t in times if begin <= t < end)
    ]
    return statistics.median(seconds) if seconds else None


def measure(options: AsynchronousOptions, out: Path, bar: Progress) -> list[str]:
    """Runs the jobs, writes `summary.json`, prints the tables, and returns the violations."""
    counts = {"kills": options.kills, "stops": options.stops}
    for name in (*counts, UNDISTURBED):  # of an earlier run, which --overwrite replaces
        shutil.rmtree(out / name, ignore_errors=True)
    task = bar.add_task(UNDISTURBED, total=None, status=f"{options.runs} runs")
    seeds = range(options.seed + 1, options.seed + 1 + options.runs)
    with AsynchronousJob(options, out / UNDISTURBED, seeds, 0) as job:
        job.wait_for_end()
    bar.update(task, total=1, completed=1)
    undisturbed = results.read_summary(job.out)["runs"]
    accuracies = [100 * run[ACCURACY] for run in undisturbed]
    record = {UNDISTURBED: undisturbed}
    violations = []
    for name, count in counts.items():
        if not count:
            continue
        record[name] = one = run_disturbed(name, count, options, out, undisturbed, bar)
        violations += one["violations"]
        account = one["account"]
        bar.console.print(
            f"{len(one['faults'])} {name} in {one['run']['steps']:,} steps of each of "
            f"{options.processes} nodes, on average. Accuracy of the average model "
            f"{100 * one['run'][ACCURACY]:.2f} %; undisturbed, with other seeds, "
            f"{min(accuracies):.2f} to {max(accuracies):.2f} %. Weight: "
            f"{sum(account['living'].values()):.6f} living, {account['in_flight']:.6f} on its way, "
            f"{account['dead']:.6f} of the dead, of {account['founded']:g}; the difference is "
            f"{account['difference']:.1e}.",
            soft_wrap=True,
        )
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    return violations


def run_disturbed(
    name: str,
    count: int,
    options: AsynchronousOptions,
    out: Path,
    undisturbed: list[Record],
    bar: Progress,
) -> Record:
    """Runs the job with kills or stops; returns what happened, and what was violated."""
    task = bar.add_task(name, total=count, status="")
    faults: list[Fault] = []
    start = time.time()
    restarts = count if name == "kills" else 0
    try:
        with AsynchronousJob(options, out / name, [options.seed], restarts) as job:
            for fault in inject_faults(name, count, options, job):
                faults.append(fault)
                bar.update(task, advance=1, status=f"node {fault.place}")
    finally:
        bar.console.print(name, make_table(HEADERS, (fault.make_row(start) for fault in faults)))
    (run,) = results.read_summary(job.out)["runs"]
    account = gx.asynchronous.account(job.list_journals())
    return {
        "name": name,
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "run": run,
        "account": jax.tree.map(float, account._asdict()) | {"difference": account.difference},
        "violations": [
            *check_faults(name, faults, count),
            *check_result(name, run, undisturbed, account),
        ],
    }


def inject_faults(
    name: str, count: int, options: AsynchronousOptions, job: AsynchronousJob
) -> Iterator[Fault]:
    """Makes faults of random nodes, each when the one before is over; waits for the job's end.

    Where the job ends before a fault is due, that one and those after it are left out.
    """
    rng = random.Random(options.seed)
    is_going_on = all(job.wait_for_steps(place, 0.0) for place in range(options.processes))
    for _ in range(count * is_going_on):
        place = rng.randrange(options.processes)
        is_kill = name == "kills"
        # Before a stop the steps of the others are measured for as long as it takes.
        is_going_on = job.wait_for_seconds(
            rng.uniform(0, MAX_DELAY) if is_kill else options.stop_seconds
        )
        pid = job.pids().get(place)
        if pid is None or not is_going_on:
            break
        begin = time.time()
        if is_kill:
            os.kill(pid, signal.SIGKILL)
            is_going_on = job.wait_for_restart(place, pid)
        else:
            os.kill(pid, signal.SIGSTOP)
            try:
                is_going_on = job.wait_for_seconds(options.stop_seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
        if not is_going_on:
            break
        fault = Fault(name, place, begin, time.time())
        is_going_on = job.wait_for_steps(place, fault.since)
        fault.complete(job.read_steps())
        yield fault
        if not is_going_on:
            break
    job.wait_for_end()


def check_faults(name: str, faults: Sequence[Fault], count: int) -> Iterator[str]:
    """Says which kills or stops had another end than was required."""
    if len(faults) < count:
        yield f"{count} {name}, got {len(faults)} before the end: give more --epochs"
    for number, fault in enumerate(faults, 1):
        which = f"{name.removesuffix('s')} {number}"
        seconds = math.inf if fault.back is None else fault.back - fault.since
        if seconds > MAX_BACK_SECONDS:
            yield f"{which}: back within {MAX_BACK_SECONDS:g} s, got {seconds:.1f}"
        if name == "kills" and fault.pause > MAX_PAUSE_SECONDS:
            yield f"{which}: no other node pauses, got {fault.pause:.1f} s"
        if name == "stops" and not abs(fault.change) <= MAX_CHANGE:
            yield (
                f"{which}: the others' steps take as long, within {100 * MAX_CHANGE:g} %, got "
                f"{100 * fault.change:+.1f} %"
            )


def check_result(
    name: str, run: Record, undisturbed: list[Record], account: gx.asynchronous.Account
) -> Iterator[str]:
    """Says whether a disturbed run ended with another accuracy, or has lost weight.

    The accuracy may be below the lowest undisturbed one by as much as those differ.
    """
    accuracies = [other[ACCURACY] for other in undisturbed]
    lowest = 2 * min(accuracies) - max(accuracies)
    if run[ACCURACY] < lowest:
        yield f"{name}: an accuracy of at least {lowest:.4f}, got {run[ACCURACY]:.4f}"
    if abs(account.difference) > MAX_DIFFERENCE * account.founded:
        yield f"{name}: the account closes to {MAX_DIFFERENCE:g}, got {account}"
    reported = sum(run["weight_nodes"])
    expected = float(sum(account.living[place] for place in run["places_nodes"]))
    if abs(reported - expected) > MAX_DIFFERENCE * account.founded:
        yield f"{name}: nodes hold what the account says, got {reported} of {account}"
