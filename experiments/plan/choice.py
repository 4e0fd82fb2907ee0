"""The time of every method, what its inexact average is worth, and the choice with its reasons."""

import dataclasses
import math
from collections.abc import Sequence

from experiments.plan.candidates import BUCKETS, Candidate
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
EQUAL = 1e-3  # relative: two priced times that are as good as equal
MIN_GAIN = 0.1  # of priced time: the model's own error is of this size, so less is no gain
NUM_RUNNERS_UP = 2
MIN_STEPS = 20
MAX_NODE_STEPS = 30_000  # of a simulation, so that a plan takes seconds
MIN_NOTABLE = 0.01  # relative difference that a reason mentions

EVIDENCE = {
    "async": "SGP-19, Table 4, 16 nodes: AD-PSGD, which waits for nobody either, has 75.5 %, "
    "AllReduce 76.3 %.",
    "d1d": "RAND-20, speech, batch 8192: D1D-PSGD has a word error rate of 7.5 % (SWB) and 13.3 % "
    "(CH) with 64 learners, one learner 7.5 % and 13.0 %.",
    "osgp": "SGP-19, Table 4, 16 nodes: 1-OSGP has 75.7 %, SGP 75.9 %, AllReduce 76.3 %.",
    "slowmo": "SlowMo, Table 1, 32 nodes: SGP with SlowMo has 75.73 %, AllReduce 76.00 %.",
    "diloco": "DiLoCo, 8 workers, every 500 steps, pre-trained: perplexity 15.02, 15.30 with a "
    "batch 8 times as large.",
    "local": "SlowMo, Table 1, 32 nodes: Local SGD has 69.94 %, with SlowMo 73.24 %, AllReduce "
    "76.00 %.",
    "dpsgd": "SGP-19, Table 1: D-PSGD has 75.9 % at 16 nodes and 74.4 % at 32, AllReduce 76.3 % "
    "and 76.2 %.",
    "sgp": "SGP-19, Table 1, ResNet-50 on ImageNet, 90 epochs: SGP has 75.9 % at 16 nodes and "
    "75.0 % at 32, AllReduce 76.3 % and 76.2 %; after 270 epochs (Table 5) SGP has 77.1 % at 32.",
}
"""Part of a name -> what others measured of the quality; the first that fits counts."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a plan is for.

    Attributes:
      workload, network, nodes: of `cost_model`.
      slowness: of the nodes.
      late_price: see `Row.price`.
    """

    workload: Workload
    network: Network
    nodes: int
    slowness: Slowness
    late_price: float = LATE_PRICE

    @property
    def is_even(self) -> bool:
        """Whether all nodes are equally fast."""
        return self.slowness.kind == "none"


@dataclasses.dataclass(frozen=True)
class Row:
    """A method in a situation; all figures are modelled.

    Attributes:
      candidate: the method.
      situation: where.
      prediction: of equally fast nodes.
      simulation: of the nodes as they are; None if none was needed.
    """

    candidate: Candidate
    situation: Situation
    prediction: Prediction
    simulation: Simulation | None

    @property
    def seconds(self) -> float:
        """Per iteration: simulated if nodes are slow, else predicted."""
        if self.simulation is None or self.situation.is_even:
            return self.prediction.seconds
        return self.simulation.seconds

    @property
    def examples_per_second(self) -> float:
        """Of all nodes."""
        return self.situation.nodes * self.situation.workload.examples / self.seconds

    @property
    def efficiency(self) -> float:
        """Of the examples per second of as many nodes that compute only, none of them slow."""
        return self.situation.workload.compute_seconds / self.seconds

    @property
    def staleness(self) -> float:
        """Steps by which what a node gets is older than its own model."""
        if self.simulation is None:
            return self.candidate.method.staleness
        return self.simulation.staleness

    @property
    def lateness(self) -> float:
        """Steps until what a node has learned is at all others, but for a tenth.

        Those of averaging, more if exchanges are left out because the link is busy, one if the
        exchange runs beside the next computation, and the staleness. A gradient that is a step
        older than the model that it changes counts as 10 of them: it errs for the whole update,
        which a message that comes late does not.
        """
        exchanges = self.candidate.method.exchanges
        kept = self.simulation.kept if self.simulation is not None else 0.0
        is_beside = any(e.overlap > 0 and e.schedule is not None for e in exchanges)
        mixing = self.candidate.mixing / max(1 - kept, 1e-9)
        old = OLD_GRADIENT * self.candidate.gradient_age
        return mixing + is_beside + self.staleness + old

    @property
    def price(self) -> float:
        """Examples that it needs, over those of AllReduce: `1 + p log2(1 + lateness)`.

        An assumption, not a measurement: p is `late_price`.
        """
        return 1 + self.situation.late_price * math.log2(1 + self.lateness)

    @property
    def priced_seconds(self) -> float:
        """Seconds for what AllReduce learns in one iteration, by that assumption."""
        return self.seconds * self.price

    @property
    def kept_bytes(self) -> float:
        """Memory of a node for what the method keeps."""
        return self.candidate.kept_models * self.situation.workload.model_bytes

    def make_record(self) -> Record:
        """The object in `runs` of `summary.json`."""
        simulated = None if self.simulation is None else self.simulation.seconds
        return {
            "algorithm": self.candidate.name,
            "wire": self.candidate.wire,
            "nodes": self.situation.nodes,
            "is_here": self.candidate.is_here,
            "seconds_per_step": self.seconds,
            "predicted_seconds": self.prediction.seconds,
            "simulated_seconds": simulated,
            "exposed_seconds": self.prediction.exposed_seconds,
            "examples_per_second": self.examples_per_second,
            "efficiency": self.efficiency,
            "sent_bytes": self.prediction.sent_bytes,
            "kept_bytes": self.kept_bytes,
            "sigma": self.candidate.sigma,
            "mixing_steps": self.candidate.mixing,
            "staleness": self.staleness,
            "lateness": self.lateness,
            "price": self.price,
            "priced_seconds": self.priced_seconds,
        }


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

    AllReduce is taken unless another one has at most its priced seconds over 1.1. Of methods that
    are equal within a thousandth, the one whose updates are less late is taken, and then the one
    that sends less. The choice, the next two and AllReduce are simulated, too.
    """
    rows = [_time(situation, candidate) for candidate in candidates]
    rows.sort(key=lambda row: row.priced_seconds)
    available = [row for row in rows if row.candidate.is_here]
    chosen = _choose(available)
    checked = [chosen, *[row for row in available if row is not chosen][:NUM_RUNNERS_UP]]
    checked += [row for row in available if row.candidate.name == "allreduce"]
    names = {row.candidate.label for row in checked}
    rows = [_check(row) if row.candidate.label in names else row for row in rows]
    chosen = next(row for row in rows if row.candidate.label == chosen.candidate.label)
    checked = [row for row in rows if row.candidate.label in names]
    return Plan(rows, chosen, list_reasons(chosen, rows, checked))


def _choose(rows: Sequence[Row]) -> Row:
    cheapest = rows[0].priced_seconds
    for row in rows:
        if row.candidate.name == "allreduce" and row.seconds <= cheapest * (1 + MIN_GAIN):
            return row
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
    longest = max((exchange.every for exchange in candidate.method.exchanges), default=1)
    steps = max(MIN_STEPS, min(60, MAX_NODE_STEPS // situation.nodes))
    cycles = math.ceil(steps / longest) * longest
    simulation = simulate(
        candidate.method,
        situation.workload,
        situation.network,
        situation.nodes,
        situation.slowness,
        steps=cycles,
    )
    return dataclasses.replace(row, simulation=simulation)


def list_reasons(chosen: Row, rows: Sequence[Row], checked: Sequence[Row]) -> list[str]:
    """Why this row, in sentences.

    Args:
      chosen: the choice.
      rows: all, the cheapest first.
      checked: those that were simulated to check the choice.
    """
    if chosen.candidate.name == "single":
        return ["One node has nobody to exchange with: train without any of this."]
    exact = next(row for row in rows if row.candidate.name == "allreduce")
    reasons = [_describe_time(chosen)]
    if chosen is exact:
        reasons.append(_compare_with_gossip(exact, rows))
    else:
        reasons += [_compare_with_exact(chosen, exact), _describe_price(chosen)]
    if not chosen.situation.is_even:
        reasons.append(_describe_slowness(chosen, exact))
    reasons += _mention_buckets(chosen, rows)
    others = [row for row in rows if row is not chosen and row.candidate.is_here]
    reasons.append(_describe_runners_up(others[:NUM_RUNNERS_UP]))
    reasons += [_find_evidence(chosen)]
    reasons.append(_describe_check(checked))
    return list(filter(None, reasons))


def _describe_time(row: Row) -> str:
    prediction = row.prediction
    busy = prediction.exchange_seconds
    hidden = max(0.0, busy - prediction.exposed_seconds)
    sentence = (
        f"{row.candidate.label} takes {row.seconds:.3f} s per iteration. The computation takes "
        f"{prediction.compute_seconds:.3f} s; the exchange keeps a link busy for {busy:.3f} s, of "
        f"which {hidden:.3f} s are hidden behind the computation"
    )
    is_waiting = any(exchange.awaits != "nobody" for exchange in row.candidate.method.exchanges)
    if is_waiting and busy and not prediction.exposed_seconds:
        margin = prediction.compute_seconds / busy
        sentence += f", and would be on links up to {margin:.2g} times as slow"
    return f"{sentence}."


def _compare_with_exact(chosen: Row, exact: Row) -> str:
    ratio = exact.seconds / chosen.seconds
    return f"AllReduce takes {exact.seconds:.3f} s, {ratio:.2f} times as long."


def _describe_price(row: Row) -> str:
    unit = "step" if row.lateness == 1 else "steps"
    old = OLD_GRADIENT * row.candidate.gradient_age
    age = f", of which {old:g} stand for gradients of an older model" if old else ""
    return (
        f"What a node has learned needs {row.lateness:.3g} {unit} to reach the others{age}. The "
        f"plan counts this as {row.price - 1:.0%} more examples (assumed, not measured: "
        f"{row.situation.late_price:g} per doubling), so {row.priced_seconds:.3f} s for what "
        "AllReduce learns in an iteration."
    )


def _compare_with_gossip(exact: Row, rows: Sequence[Row]) -> str:
    others = [row for row in rows if row.candidate.is_here and row is not exact]
    best = others[0]  # by priced seconds
    if exact.seconds < best.seconds * (1 + MIN_NOTABLE):
        return "AllReduce is better here: its average is exact, and nothing is notably faster."
    gain = exact.seconds / best.priced_seconds - 1
    return (
        f"AllReduce is better here: its average is exact. {best.candidate.label} takes "
        f"{best.seconds:.3f} s, but with the {best.price - 1:.0%} more examples at which the plan "
        f"counts its inexact or late average it gains {gain:+.0%}, and less than {MIN_GAIN:.0%} is "
        "within the error of the model."
    )


def _describe_slowness(chosen: Row, exact: Row) -> str:
    slowness = chosen.situation.slowness
    kind = f"{slowness.factor:g}x" if slowness.kind == "constant" else slowness.kind
    without = chosen.prediction.seconds
    return (
        f"Slow nodes ({kind}) raise its time from {without:.3f} to {chosen.seconds:.3f} s; that of "
        f"AllReduce, which waits for the slowest in every step, from "
        f"{exact.prediction.seconds:.3f} to {exact.seconds:.3f} s."
    )


def _mention_buckets(chosen: Row, rows: Sequence[Row]) -> list[str]:
    buckets = next(row for row in rows if row.candidate.name.endswith("buckets"))
    if buckets.seconds > chosen.priced_seconds * (1 + MIN_GAIN):
        return []
    return [
        f"Compare before you decide: an all-reduce in {BUCKETS} buckets beside the backward pass, "
        f"which gx.allreduce does not do and other libraries do, would take "
        f"{buckets.seconds:.3f} s if the overlap is perfect."
    ]


def _describe_runners_up(rows: Sequence[Row]) -> str:
    listed = [
        f"{row.candidate.label} ({row.seconds:.3f} s, counted as {row.priced_seconds:.3f})"
        for row in rows
    ]
    return f"Next: {', '.join(listed)}." if listed else ""


def _find_evidence(row: Row) -> str:
    found = [text for part, text in EVIDENCE.items() if part in row.candidate.name]
    return f"Measured by others: {found[0]}" if found else ""


def _describe_check(rows: Sequence[Row]) -> str:
    listed = []
    for row in rows:
        assert row.simulation is not None
        difference = row.simulation.seconds / row.prediction.seconds - 1
        formula = f"{round(difference, 3) + 0.0:+.1%} to the formula"  # + 0.0: no -0.0
        if not row.situation.is_even:
            formula = f"{row.prediction.seconds:.3f} s if no node were slow"
        listed.append(f"{row.candidate.label} {row.simulation.seconds:.3f} s ({formula})")
    return f"Simulated, event by event: {', '.join(listed)}."
