"""Kills of nodes at random moments, and when each was back."""

import bisect
import dataclasses
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Callable

from experiments.fault_injection.asynchronous.job import AsynchronousJob
from experiments.fault_injection.asynchronous.options import Options

MAX_DELAY = 3.0  # seconds after the last one is back, until the next kill


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


def inject_kills(
    options: Options, job: AsynchronousJob, kills: list[Kill], report: Callable[[Kill], None]
) -> None:
    """Kills nodes, each when the one before is back, and waits for the end of the job.

    Appends to `kills`. Where the job ends before a kill is due, that one and those after it are
    left out.
    """
    rng = random.Random(options.seed)
    places = range(options.processes)
    is_going_on = all(job.wait_for_steps(place, 0.0) for place in places)
    while is_going_on and len(kills) < options.kills:
        kill = kill_node(job, rng.choice(places), rng.uniform(0, MAX_DELAY))
        if kill is None:
            break
        kills.append(kill)
        is_going_on = job.wait_for_steps(kill.place, kill.restarted)
        complete(kill, job.read_steps())
        report(kill)
    job.wait_for_end()


def kill_node(job: AsynchronousJob, place: int, delay: float) -> Kill | None:
    """Kills a node after `delay` seconds, and waits until its process is started again.

    Returns:
      The kill; None if the job, or that node, ends first.
    """
    if not job.wait_for_seconds(delay):
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
            first = max(0, bisect.bisect(times, kill.time) - 1)
            during = itertools.takewhile(lambda t: t < end, times[first:])
            kill.pause = max(kill.pause, *(b - a for a, b in itertools.pairwise(during)), 0.0)
