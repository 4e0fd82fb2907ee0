"""Faults at random nodes, one after another: each when the one before is over."""

import random
from collections.abc import Callable
from typing import Protocol, TypeVar

from experiments.fault_injection.asynchronous.job import AsynchronousJob
from experiments.fault_injection.asynchronous.options import Options


class Fault(Protocol):
    """What happened to a node.

    Attributes:
      place: of the node.
      back: when it began its next step, in seconds since 1970; None if it never did.
    """

    place: int
    back: float | None

    @property
    def since(self) -> float:
        """When the node could begin a step again."""
        ...

    def complete(self, steps: dict[int, list[float]]) -> None:
        """Adds what the steps of all nodes say of it."""
        ...


FaultType = TypeVar("FaultType", bound=Fault)


def inject_faults(
    options: Options,
    job: AsynchronousJob,
    faults: list[FaultType],
    count: int,
    make: Callable[[AsynchronousJob, int, Options, random.Random], FaultType | None],
    report: Callable[[FaultType], None],
) -> None:
    """Makes faults of random nodes, and waits for the end of the job.

    Where the job ends before a fault is due, that one and those after it are left out.

    Args:
      options: of the program.
      job: the job.
      faults: those so far; new ones are appended.
      count: how many there are to be.
      make: `(job, place, options, rng)` makes one; None if the job, or that node, ends first.
      report: is told of each.
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
