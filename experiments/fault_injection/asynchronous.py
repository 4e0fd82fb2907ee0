"""Kills nodes that wait for nobody, and looks at the others, at the result and at the weight.

    python -m experiments.fault_injection.asynchronous --kills 20 --processes 4

Trains `async-sgp` or `async-adpsgd` with `experiments.image` under `python -m gossipjax.launch
--asynchronous`, and sends SIGKILL to random processes, each some seconds after the one before it
was back. The launcher starts that process again, which joins anew. Required: the others never stop;
each is back within 10 s of its restart; the account of the weight (living, on its way, dead) closes
to 1e-6; the accuracy is within the spread of undisturbed runs with other seeds, or above it. The
program writes `summary.json` into `--out`, prints a table with a row per kill, and exits with
status 1 if a requirement was violated. Linux only: it finds the processes in /proc.
"""

import bisect
import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.fault_injection.launched_job import LaunchedJob, compilation_cache
from experiments.fault_injection.options import Processes
from experiments.options.checks import PositiveInt, Seed, check_fields
from experiments.options.paths import OptionalPath
from experiments.program import exit_on_error
from experiments.results import Record

MAX_BACK_SECONDS = 10.0  # from the restart of a process to the node's first step
MAX_PAUSE_SECONDS = 5.0  # of another node: that patience within which it would be declared dead
MAX_DIFFERENCE = 1e-6  # of the account, relative to what founders brought
MAX_DELAY = 3.0  # seconds after the last one is back, until the next kill
MIN_STEPS = 20  # of the node that was killed last, until the next kill
POLL_SECONDS = 0.1
JOBS = ("killed", "undisturbed")  # folders of their results
ACCURACY = "test_accuracy_average_model"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    kills: PositiveInt = 20
    """Number of kills."""
    processes: Processes = 4
    """Number of nodes, a process each."""
    algorithm: Literal["async-sgp", "async-adpsgd"] = "async-sgp"
    """The algorithm."""
    epochs: PositiveInt = 150
    """Passes over the training set: 4,000 digits, 32 per node and step."""
    runs: PositiveInt = 3
    """Undisturbed runs with other seeds."""
    seed: Seed = 0
    """Seed of the random moments and processes, and of the run itself."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.processes < 3:
            raise ValueError(f"--processes must be at least 3, got {self.processes}.")


@dataclasses.dataclass
class Kill:
    """One kill, in seconds since 1970.

    Attributes:
      place: of the node.
      time: when it was killed.
      restarted: when its process was started again.
      back: when its new life began its first step; None if it never did.
      pause: seconds between two steps of another node from the kill until it was back, the longest.
    """

    place: int
    time: float
    restarted: float = math.nan
    back: float | None = None
    pause: float = 0.0


class AsynchronousJob(LaunchedJob):
    """The image program as nodes that wait for nobody."""

    PLACE = "GOSSIPJAX_NODE"

    def __init__(self, options: Options, out: Path, seeds: Sequence[int], max_restarts: int):
        program = ["experiments.image", "--algorithm", options.algorithm]
        program += ["--nodes", f"{options.processes}", "--epochs", f"{options.epochs}"]
        program += ["--out", f"{out}", "--seed", *map(str, seeds)]
        launcher = ["--asynchronous", "--max-restarts", f"{max_restarts}", "--restart-delay", "0"]
        super().__init__(launcher, program, options.processes, out / "metrics.jsonl")
        self._out = out
        self._offsets: dict[Path, int] = {}  # of what was read
        self._steps: dict[int, list[float]] = {}

    def read_steps(self) -> dict[int, list[float]]:
        """Returns place -> the times at which it has begun steps, in all runs so far."""
        for path in sorted(self._out.glob("nodes/*/journals/*/*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().split(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + sum(len(x) + 1 for x in lines[:-1])
            times = self._steps.setdefault(int(path.stem), [])
            for line in map(json.loads, lines[:-1]):
                if line["event"] == "begin":
                    times.append(line["time"])
        return self._steps

    def count_steps(self, place: int, since: float) -> int:
        """Returns how many steps a node has begun since a time."""
        times = self.read_steps().get(place, [])
        return len(times) - bisect.bisect_right(times, since)


def inject_kills(
    options: Options, job: AsynchronousJob, kills: list[Kill], report: Callable[[Kill], None]
) -> None:
    """Kills nodes, each when the one before is back, and waits for the end of the job.

    Appends to `kills`. Where the job ends before a kill is due, that one and those after it are
    left out.
    """
    rng = random.Random(options.seed)
    places = range(options.processes)
    is_going_on = all(wait_for_steps(job, place, 0.0) for place in places)
    while is_going_on and len(kills) < options.kills:
        kill = kill_node(job, rng.choice(places), rng.uniform(0, MAX_DELAY))
        if kill is None:
            break
        kills.append(kill)
        is_going_on = wait_for_steps(job, kill.place, kill.restarted)
        complete(kill, job.read_steps())
        report(kill)
    job.wait_for_end()


def wait_for_steps(job: AsynchronousJob, place: int, since: float) -> bool:
    """Waits until a node has made some steps since a time; False if the job ends first."""

    def has_made_steps() -> bool:
        time.sleep(POLL_SECONDS)
        return job.count_steps(place, since) >= MIN_STEPS

    return job.wait_for(has_made_steps, f"steps of node {place}")


def kill_node(job: AsynchronousJob, place: int, delay: float) -> Kill | None:
    """Kills a node after `delay` seconds, and waits until its process is started again.

    Returns:
      The kill; None if the job, or that node, ends first.
    """
    due = time.monotonic() + delay
    if not job.wait_for(lambda: time.monotonic() > due, "a kill"):
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


def complete(kill: Kill, steps: dict[int, list[float]]) -> None:
    """Adds when the node was back, and the longest pause of another one until then."""
    own = steps.get(kill.place, [])
    first = bisect.bisect_right(own, kill.restarted)
    kill.back = own[first] if first < len(own) else None
    end = kill.back or math.inf
    for place, times in steps.items():
        if place != kill.place:
            during = [t for t in times if kill.time - MAX_PAUSE_SECONDS < t < end]
            pauses = (b - a for a, b in itertools.pairwise(during) if b > kill.time)
            kill.pause = max(kill.pause, *pauses, 0.0)


def find_violations(
    options: Options,
    kills: list[Kill],
    killed: Record,
    undisturbed: list[Record],
    account: gx.asynchronous.Account,
) -> list[str]:
    """Returns what was required and did not hold."""
    violations = []
    if len(kills) < options.kills:
        violations.append(
            f"{options.kills} kills, got {len(kills)} before the end: give more --epochs"
        )
    for number, kill in enumerate(kills, 1):
        seconds = math.inf if kill.back is None else kill.back - kill.restarted
        if seconds > MAX_BACK_SECONDS:
            violations.append(
                f"kill {number}: back within {MAX_BACK_SECONDS:g} s, got {seconds:.1f}"
            )
        if kill.pause > MAX_PAUSE_SECONDS:
            violations.append(f"kill {number}: no other node pauses, got {kill.pause:.1f} s")
    accuracies = [run[ACCURACY] for run in undisturbed]
    lowest = min(accuracies) - (max(accuracies) - min(accuracies))
    if killed[ACCURACY] < lowest:
        violations.append(f"accuracy of at least {lowest:.4f}, got {killed[ACCURACY]:.4f}")
    if abs(account.difference) > MAX_DIFFERENCE * account.founded:
        violations.append(f"the account closes to {MAX_DIFFERENCE:g}, got {account}")
    reported = sum(killed["weight_nodes"])
    expected = sum(account.living[place] for place in killed["places_nodes"])
    if abs(reported - expected) > MAX_DIFFERENCE * account.founded:
        violations.append(f"nodes hold what the account says, got {reported} of {account}")
    return violations


def make_table(kills: list[Kill], start: float) -> Table:
    """Makes a table with a row per kill."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for header in ("kill", "seconds", "node", "started\nagain s", "back s", "others'\npause s"):
        table.add_column(header, justify="right")
    for number, kill in enumerate(kills, 1):
        back = "never" if kill.back is None else f"{kill.back - kill.restarted:.1f}"
        row = [f"{number}", f"{kill.time - start:.1f}", f"{kill.place}"]
        table.add_row(*row, f"{kill.restarted - kill.time:.1f}", back, f"{kill.pause:.2f}")
    return table


def measure(options: Options, out: Path, console: Console) -> list[str]:
    """Runs both jobs, writes `summary.json`, prints the table, and returns the violations.

    Raises:
      JobError: if a job fails or hangs.
    """
    kills: list[Kill] = []
    start = time.time()
    with results.make_progress_bar(console) as bar, compilation_cache():
        task = bar.add_task("kills", total=options.kills, status="")

        def report(kill: Kill) -> None:
            bar.update(task, advance=1, status=f"node {kill.place}")

        try:
            seeds = [options.seed]
            with AsynchronousJob(options, out / "killed", seeds, options.kills) as job:
                inject_kills(options, job, kills, report)
        finally:
            console.print(make_table(kills, start))
        task = bar.add_task("undisturbed", total=None, status=f"{options.runs} runs")
        seeds = range(options.seed + 1, options.seed + 1 + options.runs)
        with AsynchronousJob(options, out / "undisturbed", seeds, 0) as job:
            job.wait_for_end()
        bar.update(task, total=1, completed=1)
    undisturbed = results.read_summary(out / "undisturbed")["runs"]
    (killed,) = results.read_summary(out / "killed")["runs"]
    account = gx.asynchronous.account(sorted(out.glob("killed/nodes/*/journals/*/*.jsonl")))
    violations = find_violations(options, kills, killed, undisturbed, account)
    record = {
        "kills": [dataclasses.asdict(kill) for kill in kills],
        "killed": killed,
        "undisturbed": undisturbed,
        "account": account._asdict() | {"difference": account.difference},
        "violations": violations,
    }
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * run[ACCURACY] for run in undisturbed]
    console.print(
        f"{len(kills)} kills of {options.processes} nodes; {killed['steps']:,} steps each on "
        f"average. Accuracy of the average model {100 * killed[ACCURACY]:.2f} %; undisturbed, "
        f"with other seeds, {min(accuracies):.2f} to {max(accuracies):.2f} %. Weight: "
        f"{sum(account.living.values()):.6f} living, {account.in_flight:.6f} on its way, "
        f"{account.dead:.6f} of the dead, of {account.founded:g}.",
        soft_wrap=True,
    )
    return violations


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the kills, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.fault_injection.asynchronous",
            description="Kills nodes that wait for nobody at random moments.",
            args=arguments,
        )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        for name in JOBS:
            shutil.rmtree(out / name, ignore_errors=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        violations = measure(options, out, Console())
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
