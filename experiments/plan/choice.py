"""The choice: every method is timed, and the one with the fewest priced seconds is taken."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from experiments.plan.candidates import Candidate
from experiments.results import Record
from gossipjax.cost_model import (
    Network,
    Prediction,
    Simulation,
    Slowness,
    Workload,
    predict_step,
    simulate,
)

LATE_PRICE = 0.05  # more examples, per doubling of one plus the lateness: an assumption
OLD_GRADIENT = 10  # late steps, for each step of a gradient's age: an assumption
MIN_GAIN = 0.1  # of priced time: the model's own error is of this size, so less is no gain
EQUAL = 1e-3  # relative: two priced times that are as good as equal
NUM_RUNNERS_UP = 2  # that are simulated, too
MIN_STEPS = 20
MAX_NODE_STEPS = 30_000  # of a simulation, so that a plan takes seconds

RUN_STEPS = 10_000  # of a node, if not given
MAX_AGE = 0.01  # of a run, in which a message must arrive
EVIDENCE = {
    "async-adpsgd": "SGP-19, Table 4, 16 nodes: AD-PSGD 75.5 %, AllReduce 76.3 %",
    "async-sgp": "language task here, 8 nodes, 5 Mbit/s, one 4 times slower, one seed: loss 4.72 "
    "after 5 minutes, AllReduce 5.94",
    "rand-psgd": "RAND-20, word errors (SWB, CH): 64 learners 7.8, 13.4 %, one 7.5, 13.0 %",
    "1-osgp": "SGP-19, Table 4, 16 nodes: 1-OSGP 75.7 %, SGP 75.9 %, AllReduce 76.3 %",
    "diloco": "DiLoCo, 8 workers, H = 500: perplexity 15.02, a batch 8 times as large 15.30",
    "local-sgd": "SlowMo, Table 1, 32 nodes: Local SGD 69.94 %, AllReduce 76.00 %",
    "dpsgd@bipartite_exponential": "SGP-19, Table 1: D-PSGD 75.9 % (16 nodes), 74.4 % (32), "
    "AllReduce 76.3, 76.2 %",
    "powersgd": "image and language tasks here, 8 nodes: 1.23 and 1.24 times the steps of "
    "AllReduce",
    "sgp": "SGP-19, Table 1: SGP 75.9 % (16 nodes), 75.0 % (32), AllReduce 76.3, 76.2 %",
}
"""Name -> the measured quality of just this method. That of D1D-PSGD (RAND-20) is left out: the
report finds it 12 points behind."""

MEASURED = {"powersgd": 1.24, "diloco of factors": 7.7}
"""Name -> steps to a loss over AllReduce's, in the worse of the tasks of
`experiments.steps_to_loss`, with outer steps every 16. docs/choose.md has the runs."""

FEW_NODES = 4
FEW = {"sgp": 1.3, "async-sgp": 1.7, "diloco": 2.0, "async-outer": 2.2}
"""Name -> steps to a loss over AllReduce's, of a language task over 2 to 4 nodes, with outer
steps every 50. docs/evidence/sites.md has the runs."""
FEW_AGE = 10  # steps that a message took at most in those runs
FEW_EVIDENCE = "language task here, few nodes: {:g} times the steps of AllReduce to a loss"

Cause = Literal[
    "one node",
    "exact averages are as fast",
    "the exchange is hidden",
    "slow nodes hold up nobody",
    "the exchange takes less time",
]


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a plan is for, with the p of `Row.price` and the steps of a node's run."""

    workload: Workload
    network: Network
    nodes: int
    slowness: Slowness
    late_price: float = LATE_PRICE
    steps: int = RUN_STEPS

    @property
    def is_even(self) -> bool:
        """Whether all nodes are equally fast."""
        return self.slowness.kind == "none"


@dataclasses.dataclass(frozen=True)
class Row:
    """A method in a situation; all figures are modelled."""

    candidate: Candidate  # the method
    situation: Situation  # where
    prediction: Prediction  # of equally fast nodes
    simulation: Simulation | None = None  # of the nodes as they are; None if none was needed

    @property
    def seconds(self) -> float:
        """Per iteration: simulated if nodes are slow, else predicted."""
        if self.simulation is None or self.situation.is_even:
            return self.prediction.seconds
        return self.simulation.seconds

    @property
    def kept(self) -> float:
        """The fraction of its exchanges that are left out because the link is busy."""
        return 0.0 if self.simulation is None else self.simulation.kept

    @property
    def staleness(self) -> float:
        """Steps by which what a node gets is older than its own model."""
        if self.simulation is None:
            return self.candidate.method.staleness
        return self.simulation.staleness

    @property
    def is_together(self) -> bool:
        """Whether a message takes a small part of the run; else each node trains for itself."""
        return self.staleness <= MAX_AGE * self.situation.steps

    @property
    def evidence(self) -> str | None:
        """The measured quality of this method, and of no other; "" of exact averages."""
        name = self.candidate.name.split(",")[0]
        if self.few_price:
            return FEW_EVIDENCE.format(self.few_price)
        method = self.candidate.method
        is_rare = any(exchange.every > 1 for exchange in method.exchanges)
        if self.situation.nodes <= FEW_NODES and (method.is_asynchronous or is_rare):
            return None  # what 16 nodes have lost by it says little of what 2 lose
        return "" if name in ("allreduce", "single") else EVIDENCE.get(name)

    @property
    def few_price(self) -> float:
        """What was measured over as few nodes and with messages as young; 0 if nothing was."""
        is_like = self.situation.nodes <= FEW_NODES and self.staleness <= FEW_AGE
        return FEW.get(self.candidate.name.split(",")[0], 0.0) if is_like else 0.0

    @property
    def lateness(self) -> float:
        """Steps until what a node has learned is at all others, but for a tenth.

        Those of averaging, more if exchanges are left out because the link is busy, one if the
        exchange runs during the next computation, and the staleness. A gradient that is a step
        older than the model that it changes counts as 10 of them: it errs for the whole update,
        which a message that comes late does not.
        """
        exchanges = self.candidate.method.exchanges
        is_beside = any(e.overlap > 0 and e.schedule is not None for e in exchanges)
        mixing = self.candidate.mixing / max(1 - self.kept, 1e-9)
        old = OLD_GRADIENT * self.candidate.gradient_age
        return mixing + is_beside + self.staleness + old

    @property
    def price(self) -> float:
        """Examples that it needs, over AllReduce's: `1 + p log2(1 + lateness)`, an assumption.

        No less than what was measured, of some methods over few nodes only.
        """
        assumed = 1 + self.situation.late_price * math.log2(1 + self.lateness)
        measured = MEASURED.get(self.candidate.name.split(",")[0], 1.0)
        return max(assumed, self.few_price, measured)

    @property
    def priced_seconds(self) -> float:
        """Seconds for what AllReduce learns in one iteration, by that assumption."""
        return self.seconds * self.price

    def make_record(self) -> Record:
        """The object in `runs` of `summary.json`; `efficiency` is over nodes that compute only."""
        workload = self.situation.workload
        return {
            "algorithm": self.candidate.name,
            "wire": self.candidate.wire,
            "nodes": self.situation.nodes,
            "is_here": self.candidate.is_here,
            "seconds_per_step": self.seconds,
            "predicted_seconds": self.prediction.seconds,
            "simulated_seconds": None if self.simulation is None else self.simulation.seconds,
            "exposed_seconds": self.prediction.exposed_seconds,
            "examples_per_second": self.situation.nodes * workload.examples / self.seconds,
            "efficiency": workload.compute_seconds / self.seconds,
            "sent_bytes": self.prediction.sent_bytes,
            "mixing_steps": self.candidate.mixing,
            "staleness": self.staleness,
            "is_together": self.is_together,
            "evidence": self.evidence,
            "lateness": self.lateness,
            "price": self.price,
            "priced_seconds": self.priced_seconds,
        }


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a row is the choice."""

    cause: Cause  # in a few words
    seconds: float  # per step, of the choice and of AllReduce in its fastest form
    allreduce_seconds: float
    # the fraction of priced time by which the choice is ahead of AllReduce. If AllReduce is the
    # choice, it is the gain of the best other method, which is too small.
    gain: float
    # of an all-reduce during the backward pass, if no method here is notably faster: `gx.allreduce`
    # does not do that, other libraries do.
    bucketed_seconds: float | None = None
    evidence: str | None = None  # the measured quality of the choice; None of exact averages
    untried: Row | None = None  # what would be cheaper, but nobody has measured its quality
    apart: Row | None = None  # what would be cheaper, but its messages take too long

    def make_record(self) -> Record:
        """The object in `reasons` of `summary.json`."""
        record = dataclasses.asdict(dataclasses.replace(self, untried=None, apart=None))
        others = {"untried": self.untried, "apart": self.apart}
        return record | {name: row and row.candidate.label for name, row in others.items()}


@dataclasses.dataclass(frozen=True)
class Plan:
    """All rows, the cheapest first, the one to take, and why."""

    rows: list[Row]
    chosen: Row
    reason: Reason


def make_plan(situation: Situation, candidates: Sequence[Candidate]) -> Plan:
    """Times all methods and chooses the one with the fewest priced seconds that gossipjax has.

    AllReduce, in the form that takes the least time, is taken unless another one has at most its
    priced seconds over 1.1. A method is not taken whose quality nobody has measured, or whose
    messages take more than a hundredth of the run, so that nodes do not train together. Of methods
    that are equal within a thousandth, the one whose updates are less late is taken, and then the
    one that sends less. The choice, the next two and AllReduce are simulated, too.
    """
    rows = [_time(situation, candidate) for candidate in candidates]
    rows.sort(key=lambda row: row.priced_seconds)
    available = [row for row in rows if row.candidate.is_here]
    exact = next((row for row in available if row.candidate.name == "allreduce"), None)
    fit = [row for row in available if row.is_together and row.evidence is not None]
    chosen = _choose(fit, exact)
    checked = [chosen, *[row for row in available if row is not chosen][:NUM_RUNNERS_UP]]
    names = {row.candidate.label for row in [*checked, exact or chosen]}
    rows = [_check(row) if row.candidate.label in names else row for row in rows]
    by_label = {row.candidate.label: row for row in rows}
    chosen = by_label[chosen.candidate.label]
    if exact is None:
        return Plan(rows, chosen, Reason("one node", chosen.seconds, chosen.seconds, 0.0))
    return Plan(rows, chosen, _find_reason(chosen, by_label[exact.candidate.label], rows))


def _choose(rows: Sequence[Row], exact: Row | None) -> Row:
    cheapest = rows[0].priced_seconds
    if exact is not None and exact.priced_seconds <= cheapest * (1 + MIN_GAIN):
        return exact
    equal = [row for row in rows if row.priced_seconds <= cheapest * (1 + EQUAL)]
    return min(equal, key=lambda row: (row.lateness, row.prediction.sent_bytes))


def _find_reason(chosen: Row, exact: Row, rows: Sequence[Row]) -> Reason:
    cause: Cause = "the exchange takes less time"
    best = chosen
    available = [row for row in rows if row.candidate.is_here]
    if chosen is exact:
        cause = "exact averages are as fast"
        best = next(
            row
            for row in available
            if row.candidate.name != "allreduce" and row.is_together and row.evidence is not None
        )
    elif not chosen.situation.is_even and chosen.candidate.method.is_asynchronous:
        cause = "slow nodes hold up nobody"
    elif not chosen.prediction.exposed_seconds:
        cause = "the exchange is hidden"
    bucketed = min(row.seconds for row in rows if row.candidate.name.endswith("buckets"))
    is_notable = bucketed <= chosen.priced_seconds * (1 + MIN_GAIN)
    cheaper = [
        row for row in available if row.priced_seconds * (1 + MIN_GAIN) < chosen.priced_seconds
    ]
    return Reason(
        cause,
        chosen.seconds,
        exact.seconds,
        exact.priced_seconds / best.priced_seconds - 1,
        bucketed if is_notable else None,
        chosen.evidence or None,
        next((row for row in cheaper if row.is_together and row.evidence is None), None),
        next((row for row in cheaper if not row.is_together), None),
    )


def _time(situation: Situation, candidate: Candidate) -> Row:
    arguments = (candidate.method, situation.workload, situation.network, situation.nodes)
    row = Row(candidate, situation, predict_step(*arguments))
    is_simulated = not situation.is_even or candidate.method.is_asynchronous
    return _check(row) if is_simulated else row


def _check(row: Row) -> Row:
    """The row with its simulation."""
    if row.simulation is not None:
        return row
    situation = row.situation
    method = row.candidate.method
    longest = max((exchange.cycle for exchange in method.exchanges), default=1)
    steps = max(MIN_STEPS, min(60, MAX_NODE_STEPS // situation.nodes))
    steps = math.ceil(steps / longest) * longest
    simulation = simulate(
        method,
        situation.workload,
        situation.network,
        situation.nodes,
        situation.slowness,
        steps=steps,
        # At first fast nodes run ahead, until they wait for the slow ones: those do not count.
        warm_up=None if situation.is_even else steps,
    )
    return dataclasses.replace(row, simulation=simulation)
