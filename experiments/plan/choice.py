"""The choice: every method is timed, and the one with the fewest priced seconds is taken."""

import dataclasses
import math
from collections.abc import Sequence

from experiments.plan.candidates import Candidate
from experiments.plan.reasons import MIN_GAIN, NUM_RUNNERS_UP, find_all_reduce, list_reasons
from experiments.plan.rows import Row, Situation
from gossipjax.cost_model import Method, predict_step, simulate

EQUAL = 1e-3  # relative: two priced times that are as good as equal
MIN_STEPS = 20
MAX_NODE_STEPS = 30_000  # of a simulation, so that a plan takes seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows, the cheapest first, and the choice.

    Attributes:
      rows: all methods.
      chosen: the row to take.
      reasons: sentences.
    """

    rows: list[Row]
    chosen: Row
    reasons: list[str]


def make_plan(situation: Situation, candidates: Sequence[Candidate]) -> Plan:
    """Times all methods and chooses the one with the fewest priced seconds that gossipjax has.

    AllReduce, in the form that takes the least time, is taken unless another one has at most its
    priced seconds over 1.1. Of methods that are equal within a thousandth, the one whose updates
    are less late is taken, and then the one that sends less. The choice, the next two and AllReduce
    are simulated, too.
    """
    rows = [_time(situation, candidate) for candidate in candidates]
    rows.sort(key=lambda row: row.priced_seconds)
    available = [row for row in rows if row.candidate.is_here]
    chosen = _choose(available)
    checked = [chosen, *[row for row in available if row is not chosen][:NUM_RUNNERS_UP]]
    checked += filter(None, [find_all_reduce(available)])
    names = {row.candidate.label for row in checked}
    rows = [_check(row) if row.candidate.label in names else row for row in rows]
    chosen = next(row for row in rows if row.candidate.label == chosen.candidate.label)
    checked = [row for row in rows if row.candidate.label in names]
    return Plan(rows, chosen, list_reasons(chosen, rows, checked))


def _choose(rows: Sequence[Row]) -> Row:
    cheapest = rows[0].priced_seconds
    exact = find_all_reduce(rows)
    if exact is not None and exact.priced_seconds <= cheapest * (1 + MIN_GAIN):
        return exact
    equal = [row for row in rows if row.priced_seconds <= cheapest * (1 + EQUAL)]
    return min(equal, key=lambda row: (row.lateness, row.prediction.sent_bytes))


def _time(situation: Situation, candidate: Candidate) -> Row:
    prediction = predict_step(
        candidate.method, situation.workload, situation.network, situation.nodes
    )
    row = Row(candidate, situation, prediction, None)
    is_simulated = not situation.is_even or candidate.method.is_asynchronous
    return _check(row) if is_simulated else row


def _check(row: Row) -> Row:
    """The row with its simulation."""
    if row.simulation is not None:
        return row
    situation = row.situation
    candidate = row.candidate
    longest = _find_longest_cycle(candidate.method)
    steps = max(MIN_STEPS, min(60, MAX_NODE_STEPS // situation.nodes))
    cycles = math.ceil(steps / longest) * longest
    # At first fast nodes run ahead, until they wait for the slow ones: those steps do not count.
    warm_up = None if situation.is_even else cycles
    simulation = simulate(
        candidate.method,
        situation.workload,
        situation.network,
        situation.nodes,
        situation.slowness,
        steps=cycles,
        warm_up=warm_up,
    )
    return dataclasses.replace(row, simulation=simulation)


def _find_longest_cycle(method: Method) -> int:
    """Steps after which each exchange has come, with all rounds of its schedule."""
    cycles = [
        e.every * (1 if e.schedule is None else len(e.schedule.segments[-1].cycle))
        for e in method.exchanges
    ]
    return max(cycles, default=1)
