"""Stops of nodes, and what the others did meanwhile."""

import bisect
import dataclasses
import itertools
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable

from experiments.fault_injection.asynchronous.job import AsynchronousJob
from experiments.fault_injection.asynchronous.options import Options


@dataclasses.dataclass
class Stop:
    """One stop, in seconds since 1970.

    Attributes:
      place: of the node.
      time: when it was stopped.
      continued: when it went on.
      back: when it began its next step; None if it never did.
      step_before, step_during: seconds of a step of the other nodes, the median: in the time
        before the stop, as long as the stop, and in that of the stop.
    """

    place: int
    time: float
    continued: float
    back: float | None = None
    step_before: float = math.nan
    step_during: float = math.nan

    @property
    def change(self) -> float:
        """By which part of it the step time of the others changed."""
        return self.step_during / self.step_before - 1


def inject_stops(
    options: Options, job: AsynchronousJob, stops: list[Stop], report: Callable[[Stop], None]
) -> None:
    """Stops nodes one after another, lets each go on after a while, and waits for the job's end.

    Appends to `stops`. Where the job ends before a stop is due, that one and those after it are
    left out.
    """
    rng = random.Random(options.seed)
    places = range(options.processes)
    is_going_on = all(job.wait_for_steps(place, 0.0) for place in places)
    while is_going_on and len(stops) < options.stops:
        is_going_on = job.wait_for_seconds(options.stop_seconds)
        stop = stop_node(job, rng.choice(places), options.stop_seconds) if is_going_on else None
        if stop is None:
            break
        stops.append(stop)
        is_going_on = job.wait_for_steps(stop.place, stop.continued)
        complete(stop, job.read_steps())
        report(stop)
    job.wait_for_end()


def stop_node(job: AsynchronousJob, place: int, seconds: float) -> Stop | None:
    """Stops a node for these seconds; None if it has ended, or the job ends meanwhile."""
    pid = job.pids().get(place)
    if pid is None:
        return None
    begin = time.time()
    os.kill(pid, signal.SIGSTOP)
    try:
        is_going_on = job.wait_for_seconds(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return Stop(place, begin, time.time()) if is_going_on else None


def complete(stop: Stop, steps: dict[int, list[float]]) -> None:
    """Adds when the node was back, and the step times of the others."""
    own = steps.get(stop.place, [])
    first = bisect.bisect_right(own, stop.continued)
    stop.back = own[first] if first < len(own) else None
    others = [times for place, times in steps.items() if place != stop.place]
    seconds = stop.continued - stop.time
    stop.step_before = measure_step(others, stop.time - seconds, stop.time)
    stop.step_during = measure_step(others, stop.time, stop.continued)


def measure_step(nodes: list[list[float]], begin: float, end: float) -> float:
    """The median of the seconds between steps that nodes began in an interval; nan of none."""
    seconds = [
        after - before
        for times in nodes
        for before, after in itertools.pairwise(t for t in times if begin <= t < end)
    ]
    return statistics.median(seconds) if seconds else math.nan
