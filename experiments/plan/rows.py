"""The time of a method in a situation, and what its inexact average is worth."""

import dataclasses
import math

from experiments.plan.candidates import Candidate
from experiments.results import Record
from gossipjax.cost_model import Network, Prediction, Simulation, Slowness, Workload

LATE_PRICE = 0.05  # more examples, per doubling of one plus the lateness: an assumption
OLD_GRADIENT = 10  # late steps, for each step of a gradient's age: an assumption


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
    def kept(self) -> float:
        """The fraction of its exchanges that are left out because the link is busy."""
        return 0.0 if self.simulation is None else self.simulation.kept

    @property
    def sigma(self) -> float | None:
        """That of the candidate; None if exchanges are left out, and it is that of others."""
        return None if self.kept else self.candidate.sigma

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
        is_beside = any(e.overlap > 0 and e.schedule is not None for e in exchanges)
        mixing = self.candidate.mixing / max(1 - self.kept, 1e-9)
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
            "sigma": self.sigma,
            "mixing_steps": self.candidate.mixing,
            "staleness": self.staleness,
            "lateness": self.lateness,
            "price": self.price,
            "priced_seconds": self.priced_seconds,
        }
