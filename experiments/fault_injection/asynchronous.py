"""An asynchronous job whose nodes are killed or stopped, and an undisturbed one.

Trains `async-sgp` or `async-adpsgd` with `experiments.image` under `python -m gossipjax.launch
--asynchronous`; the computation of a step is a sleep. Random processes get SIGKILL, each some
seconds after the one before was back; the launcher starts them again, and they join anew. With
`--fault stop` they are stopped for `--stop-seconds` (SIGSTOP), and go on (SIGCONT).

Required: the others never pause; a node is back within 10 s of its restart, or its going on; the
account of the weight (living, on its way, dead) closes to 1e-6; the accuracy is as in the
undisturbed runs, within their spread.
"""

import bisect
import dataclasses
import itertools
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax

import gossipjax as gx
from experiments.fault_injection.job import ACCURACY, LaunchedJob
from experiments.fault_injection.options import AsynchronousOptions
from experiments.results import Record

SLOW = "experiments.fault_injection.slow"
MIN_STEPS = 20  # of a node, after which it is there
READ_SECONDS = 0.1  # between two looks at the journals
MAX_DELAY = 3.0  # seconds after the last one is back, until the next kill
MAX_BACK_SECONDS = 10.0  # from the restart of a process, or its going on, to the node's first step
MAX_PAUSE_SECONDS = 5.0  # of another node: the patience within which it would be declared dead
MAX_DIFFERENCE = 1e-6  # of the account, relative to what founders brought


@dataclasses.dataclass
class Fault:
    """One kill or stop; all times are seconds since 1970."""

    kind: str  # kill or stop
    place: int  # of the node
    time: float  # when it was killed or stopped
    since: float  # when its process was started again, or went on
    back: float | None = None  # when it began its next step; None if it never did
    pause: float = 0.0  # the longest of another node between two steps, until this one was back

    def complete(self, steps: dict[int, list[float]]) -> None:
        """Adds what the times tell at which each place began its steps."""
        own = steps.get(self.place, [])
        self.back = next(iter(own[bisect.bisect_right(own, self.since) :]), None)
        others = [times for place, times in steps.items() if place != self.place]
        for times in others:
            first = max(0, bisect.bisect(times, self.time) - 1)
            during = itertools.takewhile(lambda t: t < (self.back or math.inf), times[first:])
            self.pause = max(self.pause, *(b - a for a, b in itertools.pairwise(during)), 0.0)

    def make_row(self) -> dict[str, str]:
        """Returns its row of the table."""
        return {
            "time": time.strftime("%X", time.localtime(self.time)),
            "node": f"{self.place}",
            "gone s": f"{self.since - self.time:.1f}",
            "back s": "never" if self.back is None else f"{self.back - self.since:.1f}",
            "others'\npause s": f"{self.pause:.2f}",
        }


class AsynchronousJob(LaunchedJob):
    """The image program as asynchronous nodes: the steps that each has begun."""

    PLACE = "GOSSIPJAX_NODE"

    def __init__(
        self, options: AsynchronousOptions, out: Path, seeds: Sequence[int], restarts: int
    ):
        program = [SLOW, "image", "--algorithm", options.algorithm]
        program += ["--nodes", f"{options.processes}", "--epochs", f"{options.epochs}"]
        program += ["--step-seconds", f"{options.step_seconds}", "--seed", *map(str, seeds)]
        launcher = ["--asynchronous", "--restart-delay", "0"]
        if options.fault == "kill":  # what is only stopped must not need a restart
            launcher += ["--max-restarts", f"{restarts}"]
        super().__init__(launcher, program, options.processes, out)
        self.options = options
        self._offsets: dict[Path, int] = {}  # of what was read
        self._steps: dict[int, list[float]] = {}

    def list_journals(self) -> list[Path]:
        """Returns the files of all nodes."""
        return sorted(self.out.glob("nodes/*/journals/*/*.jsonl"))

    def describe(self) -> dict[str, Record]:
        """Returns the account of the weight of a job of one run."""
        account = gx.asynchronous.account(self.list_journals())
        numbers = jax.tree.map(float, account._asdict())
        return {"account": numbers | {"difference": account.difference}}

    def read_steps(self) -> dict[int, list[float]]:
        """Returns place -> the times at which it has begun steps, in all runs so far."""
        for path in self.list_journals():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().split(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + sum(len(x) + 1 for x in lines[:-1])
            found = map(json.loads, lines[:-1])
            times = [line["time"] for line in found if line["event"] == "begin"]
            self._steps.setdefault(int(path.stem), []).extend(times)
        return self._steps

    def wait_for_steps(self, place: int, since: float) -> bool:
        """Waits until a node has made some steps since a time; False if the job ends before."""

        def has_made_steps() -> bool:
            time.sleep(READ_SECONDS)
            times = self.read_steps().get(place, [])
            return len(times) - bisect.bisect_right(times, since) >= MIN_STEPS

        return self.wait_for(has_made_steps, f"steps of node {place}")

    def has_restarted(self, place: int, old: int) -> bool:
        """Whether the process of a node is another one than the old."""
        return self.pids().get(place, old) != old

    def inject_faults(self) -> Iterator[Fault]:
        """Makes faults of random nodes, each when the one before is over; waits for the job's end.

        If the job ends before a fault is due, that fault and all later ones are left out.
        """
        rng = random.Random(self.options.seed)
        is_kill = self.options.fault == "kill"
        places = range(self.options.processes)
        is_going_on = all(self.wait_for_steps(place, 0.0) for place in places)
        for _ in range(self.options.kills):
            place = rng.choice(places)
            is_going_on = is_going_on and self.wait_for_seconds(rng.uniform(0, MAX_DELAY))
            pid = self.pids().get(place)
            if pid is None or not is_going_on:
                break
            begin = time.time()
            if is_kill:
                os.kill(pid, signal.SIGKILL)
                has_restarted = partial(self.has_restarted, place, pid)
                is_going_on = self.wait_for(has_restarted, f"node {place} is started again")
            else:
                os.kill(pid, signal.SIGSTOP)
                try:
                    is_going_on = self.wait_for_seconds(self.options.stop_seconds)
                finally:
                    os.kill(pid, signal.SIGCONT)
            if not is_going_on:
                break
            fault = Fault(self.options.fault, place, begin, time.time())
            is_going_on = self.wait_for_steps(place, fault.since)
            fault.complete(self.read_steps())
            yield fault
        self.wait_for_end()

    def find_violations(
        self,
        faults: Sequence[Fault],
        run: Record,
        undisturbed: list[Record],
        account: Record,
    ) -> Iterator[str]:
        """Yields a description of each requirement that was violated.

        The accuracy may be below the lowest undisturbed one by as much as those differ.
        """
        count = self.options.kills
        if len(faults) < count:
            yield f"{count} faults, got {len(faults)} before the end: give more --epochs"
        for number, fault in enumerate(faults, 1):
            which = f"{fault.kind} {number}"
            seconds = math.inf if fault.back is None else fault.back - fault.since
            if seconds > MAX_BACK_SECONDS:
                yield f"{which}: back within {MAX_BACK_SECONDS:g} s, got {seconds:.1f}"
            if fault.pause > MAX_PAUSE_SECONDS:
                yield f"{which}: no other node pauses, got {fault.pause:.1f} s"
        accuracies = [other[ACCURACY] for other in undisturbed]
        lowest = 2 * min(accuracies) - max(accuracies)
        if run[ACCURACY] < lowest:
            yield f"an accuracy of at least {lowest:.4f}, got {run[ACCURACY]:.4f}"
        if abs(account["difference"]) > MAX_DIFFERENCE * account["founded"]:
            yield f"the account closes to {MAX_DIFFERENCE:g}, got {account}"
        reported = sum(run["weight_nodes"])
        expected = sum(account["living"][place] for place in run["places_nodes"])
        if abs(reported - expected) > MAX_DIFFERENCE * account["founded"]:
            yield f"nodes hold what the account says, got {reported} of {account}"
