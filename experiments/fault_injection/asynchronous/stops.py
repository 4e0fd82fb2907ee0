"""Stops of nodes, and what the others did meanwhile."""

import dataclasses
import itertools
import math
import os
import random
import signal
import statistics
import time

from experiments.fault_injection.asynchronous.job import AsynchronousJob, find_next
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
    def since(self) -> float:
        """When the node could begin a step again."""
        return self.continued

    @property
    def change(self) -> float:
        """By which part of it the step time of the others changed."""
        return self.step_during / self.step_before - 1

    def complete(self, steps: dict[int, list[float]]) -> None:
        """Adds when the node was back, and the step times of the others."""
        self.back = find_next(steps.get(self.place, []), self.continued)
        others = [times for place, times in steps.items() if place != self.place]
        seconds = self.continued - self.time
        self.step_before = measure_step(others, self.time - seconds, self.time)
        self.step_during = measure_step(others, self.time, self.continued)


def stop_node(
    job: AsynchronousJob, place: int, options: Options, rng: random.Random
) -> Stop | None:
    """Stops a node after as many seconds as it stays so, and lets it go on.

    Returns:
      The stop; None if the job, or that node, ends first.
    """
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
