"""What must hold after kills and stops."""

import math
from collections.abc import Iterator

import gossipjax as gx
from experiments.fault_injection.asynchronous.faults import Fault
from experiments.fault_injection.asynchronous.kills import Kill
from experiments.fault_injection.asynchronous.stops import Stop
from experiments.results import Record

MAX_BACK_SECONDS = 10.0  # from the restart of a process, or its going on, to the node's first step
MAX_PAUSE_SECONDS = 5.0  # of another node: that patience within which it would be declared dead
MAX_CHANGE = 0.05  # of the step time of the other nodes
MAX_DIFFERENCE = 1e-6  # of the account, relative to what founders brought
ACCURACY = "test_accuracy_average_model"


def check_kills(kills: list[Kill], count: int) -> Iterator[str]:
    """Says which kills had another end than was required."""
    if len(kills) < count:
        yield f"{count} kills, got {len(kills)} before the end: give more --epochs"
    for number, kill in enumerate(kills, 1):
        yield from check_back(f"kill {number}", kill)
        if kill.pause > MAX_PAUSE_SECONDS:
            yield f"kill {number}: no other node pauses, got {kill.pause:.1f} s"


def check_stops(stops: list[Stop], count: int) -> Iterator[str]:
    """Says which stops had another end than was required."""
    if len(stops) < count:
        yield f"{count} stops, got {len(stops)} before the end: give more --epochs"
    for number, stop in enumerate(stops, 1):
        yield from check_back(f"stop {number}", stop)
        if not abs(stop.change) <= MAX_CHANGE:
            yield (
                f"stop {number}: the others' steps take as long, within {100 * MAX_CHANGE:g} %, "
                f"got {100 * stop.change:+.1f} %"
            )


def check_back(name: str, fault: Fault) -> Iterator[str]:
    """Says that a node was not back in time."""
    seconds = math.inf if fault.back is None else fault.back - fault.since
    if seconds > MAX_BACK_SECONDS:
        yield f"{name}: back within {MAX_BACK_SECONDS:g} s, got {seconds:.1f}"


def check_result(
    name: str, run: Record, undisturbed: list[Record], account: gx.asynchronous.Account
) -> Iterator[str]:
    """Says whether a disturbed run ended with another accuracy, or has lost weight.

    The accuracy may be below the lowest undisturbed one by as much as those differ.

    Args:
      name: what disturbed it.
      run: its entry in `summary.json`.
      undisturbed: those of runs with other seeds.
      account: of its weight.
    """
    accuracies = [other[ACCURACY] for other in undisturbed]
    lowest = 2 * min(accuracies) - max(accuracies)
    if run[ACCURACY] < lowest:
        yield f"{name}: an accuracy of at least {lowest:.4f}, got {run[ACCURACY]:.4f}"
    if abs(account.difference) > MAX_DIFFERENCE * account.founded:
        yield f"{name}: the account closes to {MAX_DIFFERENCE:g}, got {account}"
    reported = sum(run["weight_nodes"])
    expected = sum(account.living[place] for place in run["places_nodes"])
    if abs(reported - expected) > MAX_DIFFERENCE * account.founded:
        yield f"{name}: nodes hold what the account says, got {reported} of {account}"
