"""Kills of nodes at random moments, and when each was back."""

import bisect
import dataclasses
import itertools
import math
import os
import random
import signal
import time

from experiments.fault_injection.asynchronous.job import AsynchronousJob, find_next
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

    @property
    def since(self) -> float:
        """When the node could begin a step again."""
        return self.restarted

    def complete(self, steps: dict[int, list[float]]) -> None:
        """Adds when the node was back, and the longest pause of another one until then."""
        self.back = find_next(steps.get(self.place, []), self.restarted)
        end = self.back or math.inf
        for place, times in steps.items():
            if place != self.place:
                first = max(0, bisect.bisect(times, self.time) - 1)
                during = itertools.takewhile(lambda t: t < end, times[first:])
                self.pause = max(self.pause, *(b - a for a, b in itertools.pairwise(during)), 0.0)


def kill_node(
    job: AsynchronousJob, place: int, options: Options, rng: random.Random
) -> Kill | None:
    """Kills a node after some seconds, and waits until its process is started again.

    Returns:
      The kill; None if the job, or that node, ends first.
    """
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
