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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.progress import Progress
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.fault_injection.job import AsynchronousJob, make_table
from experiments.fault_injection.options import AsynchronousOptions
from experiments.results import Record

MAX_DELAY = 3.0  # seconds after the last one is back, until the next kill
MAX_BACK_SECONDS = 10.0  # from the restart of a process, or its going on, to the node's first step
MAX_PAUSE_SECONDS = 5.0  # of another node: the patience within which it would be declared dead
MAX_CHANGE = 0.05  # of the step time of the other nodes
MAX_DIFFERENCE = 1e-6  # of the account, relative to what founders brought
ACCURACY = "test_accuracy_average_model"
UNDISTURBED = "undisturbed"
KILL_HEADERS = ("kill", "seconds", "node", "started\nagain s", "back s", "others'\npause s")
STOP_HEADERS = ("stop", "seconds", "node", "stopped s", "back s")
STOP_HEADERS += ("others' step\nbefore ms", "during ms", "change %")

Steps = dict[int, list[float]]
"""Place -> the times at which it began its steps, in seconds since 1970, as all times here."""


def measure(options: AsynchronousOptions, out: Path, bar: Progress) -> list[str]:
    """Runs the jobs, writes `summary.json`, prints the tables, and returns the violations."""
    counts = {"kills": options.kills, "stops": options.stops}
    for name in (*counts, UNDISTURBED):  # of an earlier run, which --overwrite replaces
        shutil.rmtree(out / name, ignore_errors=True)
    undisturbed = run_undisturbed(options, out, bar)
    records = [
        run_disturbed(name, count, options, out, undisturbed, bar)
        for name, count in counts.items()
        if count
    ]
    record = {UNDISTURBED: undisturbed} | {record["name"]: record for record in records}
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * run[ACCURACY] for run in undisturbed]
    for record in records:
        account = record["account"]
        bar.console.print(
            f"{len(record['faults'])} {record['name']} in {record['run']['steps']:,} steps of each "
            f"of {options.processes} nodes, on average. Accuracy of the average model "
            f"{100 * record['run'][ACCURACY]:.2f} %; undisturbed, with other seeds, "
            f"{min(accuracies):.2f} to {max(accuracies):.2f} %. Weight: "
            f"{sum(account['living'].values()):.6f} living, {account['in_flight']:.6f} on its way, "
            f"{account['dead']:.6f} of the dead, of {account['founded']:g}; the difference is "
            f"{account['difference']:.1e}.",
            soft_wrap=True,
        )
    return [violation for record in records for violation in record["violations"]]


def run_undisturbed(options: AsynchronousOptions, out: Path, bar: Progress) -> list[Record]:
    """Runs the job without faults; returns the entries of its runs."""
    task = bar.add_task(UNDISTURBED, total=None, status=f"{options.runs} runs")
    seeds = range(options.seed + 1, options.seed + 1 + options.runs)
    with AsynchronousJob(options, out / UNDISTURBED, seeds, 0) as job:
        job.wait_for_end()
    bar.update(task, total=1, completed=1)
    return job.read_runs()


def run_disturbed(
    name: str,
    count: int,
    options: AsynchronousOptions,
    out: Path,
    undisturbed: list[Record],
    bar: Progress,
) -> Record:
    """Runs the job with kills or stops; returns what happened, and what was violated."""
    make_fault = kill_node if name == "kills" else stop_node
    task = bar.add_task(name, total=count, status="")
    faults: list[Any] = []
    start = time.time()

    def report(fault: Any) -> None:
        bar.update(task, advance=1, status=f"node {fault.place}")

    max_restarts = count if name == "kills" else 0
    try:
        with AsynchronousJob(options, out / name, [options.seed], max_restarts) as job:
            inject_faults(options, job, faults, count, make_fault, report)
    finally:
        bar.console.print(make_fault_table(name, faults, start))
    (run,) = job.read_runs()
    account = job.add_up()
    return {
        "name": name,
        "faults": [make_record(fault) for fault in faults],
        "run": run,
        "account": jax.tree.map(float, account._asdict()) | {"difference": account.difference},
        "violations": [
            *check_faults(name, faults, count),
            *check_result(name, run, undisturbed, account),
        ],
    }


def inject_faults(
    options: AsynchronousOptions,
    job: AsynchronousJob,
    faults: list[Any],
    count: int,
    make: Callable[..., Any],
    report: Callable[[Any], None],
) -> None:
    """Makes faults of random nodes, each when the one before is over; waits for the job's end.

    Where the job ends before a fault is due, that one and those after it are left out.
    """
    rng = random.Random(options.seed)
    places = range(options.processes)
    is_going_on = all(job.wait_for_steps(place, 0.0) for place in places)
    while is_going_on and len(faults) < count:
        fault = make(job, rng.choice(places), options, rng)
        if fault is None:
            break
        faults.append(fault)
        is_going_on = job.wait_for_steps(fault.place, fault.since)
        fault.complete(job.read_steps())
        report(fault)
    job.wait_for_end()


@dataclasses.dataclass
class Kill:
    """One kill."""

    place: int  # of the node
    time: float  # when it was killed
    restarted: float = math.nan  # when its process was started again
    back: float | None = None  # when its new life began its first step; None if it never did
    pause: float = 0.0  # the longest of another node between two steps, until this one was back

    @property
    def since(self) -> float:
        """When the node could begin a step again."""
        return self.restarted

    def complete(self, steps: Steps) -> None:
        """Adds when the node was back, and the longest pause of another one until then."""
        self.back = find_next(steps.get(self.place, []), self.restarted)
        end = self.back or math.inf
        for place, times in steps.items():
            if place != self.place:
                first = max(0, bisect.bisect(times, self.time) - 1)
                during = itertools.takewhile(lambda t: t < end, times[first:])
                self.pause = max(self.pause, *(b - a for a, b in itertools.pairwise(during)), 0.0)

    def make_row(self, start: float) -> list[str]:
        """Returns the cells of the table after its number; `start` is that of the job."""
        seconds = [f"{self.time - start:.1f}", f"{self.place}", f"{self.restarted - self.time:.1f}"]
        return [*seconds, show_back(self), f"{self.pause:.2f}"]


@dataclasses.dataclass
class Stop:
    """One stop; the seconds are those of a step of the other nodes, the median."""

    place: int  # of the node
    time: float  # when it was stopped
    continued: float  # when it went on
    back: float | None = None  # when it began its next step; None if it never did
    step_before: float = math.nan  # in a time before the stop that is as long
    step_during: float = math.nan  # while it was stopped

    @property
    def since(self) -> float:
        """When the node could begin a step again."""
        return self.continued

    @property
    def change(self) -> float:
        """By which part of it the step time of the others changed."""
        return self.step_during / self.step_before - 1

    def complete(self, steps: Steps) -> None:
        """Adds when the node was back, and the step times of the others."""
        self.back = find_next(steps.get(self.place, []), self.continued)
        others = [times for place, times in steps.items() if place != self.place]
        seconds = self.continued - self.time
        self.step_before = measure_step(others, self.time - seconds, self.time)
        self.step_during = measure_step(others, self.time, self.continued)

    def make_row(self, start: float) -> list[str]:
        """Returns the cells of the table after its number; `start` is that of the job."""
        seconds = [f"{self.time - start:.1f}", f"{self.place}", f"{self.continued - self.time:.1f}"]
        steps = [f"{1000 * self.step_before:.2f}", f"{1000 * self.step_during:.2f}"]
        return [*seconds, show_back(self), *steps, f"{100 * self.change:+.1f}"]


def make_fault_table(name: str, faults: Sequence[Kill | Stop], start: float) -> Table:
    """Makes a table with a row per kill or stop."""
    headers = KILL_HEADERS if name == "kills" else STOP_HEADERS
    return make_table(headers, (fault.make_row(start) for fault in faults))


def make_record(fault: Kill | Stop) -> Record:
    """Returns the entry of a fault; what was not measured before the job's end is None."""
    fields = dataclasses.asdict(fault)
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in fields.items()
    }


def show_back(fault: Kill | Stop) -> str:
    """After how many seconds a node was back."""
    return "never" if fault.back is None else f"{fault.back - fault.since:.1f}"


def kill_node(
    job: AsynchronousJob, place: int, options: AsynchronousOptions, rng: random.Random
) -> Kill | None:
    """Kills a node after some seconds, and waits until its process is started again."""
    del options
    if not job.wait_for_seconds(rng.uniform(0, MAX_DELAY)):
        return None
    pid = job.pids().get(place)
    if pid is None:
        return None
    kill = Kill(place, time.time())
    os.kill(pid, signal.SIGKILL)
    is_restarted = job.wait_for(
        lambda: job.pids().get(place, pid) != pid, f"node {place} is started again"
    )
    kill.restarted = time.time()
    return kill if is_restarted else None


def stop_node(
    job: AsynchronousJob, place: int, options: AsynchronousOptions, rng: random.Random
) -> Stop | None:
    """Stops a node after as many seconds as it stays so, and lets it go on."""
    del rng
    is_going_on = job.wait_for_seconds(options.stop_seconds)
    pid = job.pids().get(place)
    if pid is None or not is_going_on:
        return None
    begin = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        is_going_on = job.wait_for_seconds(options.stop_seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return Stop(place, begin, time.time()) if is_going_on else None


def measure_step(nodes: list[list[float]], begin: float, end: float) -> float:
    """The median of the seconds between steps that nodes began in an interval; nan of none."""
    seconds = [
        after - before
        for times in nodes
        for before, after in itertools.pairwise(t for t in times if begin <= t < end)
    ]
    return statistics.median(seconds) if seconds else math.nan


def find_next(times: list[float], since: float) -> float | None:
    """Returns the first of some rising times after one; None if there is none."""
    first = bisect.bisect_right(times, since)
    return times[first] if first < len(times) else None


def check_faults(name: str, faults: Sequence[Any], count: int) -> Iterator[str]:
    """Says which kills or stops had another end than was required."""
    if len(faults) < count:
        yield f"{count} {name}, got {len(faults)} before the end: give more --epochs"
    for number, fault in enumerate(faults, 1):
        which = f"{name.removesuffix('s')} {number}"
        seconds = math.inf if fault.back is None else fault.back - fault.since
        if seconds > MAX_BACK_SECONDS:
            yield f"{which}: back within {MAX_BACK_SECONDS:g} s, got {seconds:.1f}"
        if isinstance(fault, Kill) and fault.pause > MAX_PAUSE_SECONDS:
            yield f"{which}: no other node pauses, got {fault.pause:.1f} s"
        if isinstance(fault, Stop) and not abs(fault.change) <= MAX_CHANGE:
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
