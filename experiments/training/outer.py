"""The options of a run's outer optimizer, which are the keywords of `gx.outer`."""

import dataclasses
from typing import Any, Literal

import optax

import gossipjax as gx
from experiments.options import Fraction, PositiveFloat
from experiments.training.forms import FORMS, WireName
from experiments.training.topologies import make_schedule

GOSSIPS = {"sgp": gx.sgp, "gradient-tracking": gx.gradient_tracking}


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """Options of SGD around the chain of a run, at every `outer_every`-th update."""

    outer_every: int | None = None
    """Updates from one outer step to the next: all nodes go on from their average, moved by an
    outer optimizer. Around local it is Local SGD, or DiLoCo; around gossip that keeps nothing but
    models, SlowMo. A run ends with an outer step."""
    outer_rate: PositiveFloat = 1.0
    """Learning rate of the outer optimizer. With 1 and no momentum, it is the plain average."""
    outer_momentum: Fraction | None = None
    """Momentum of the outer optimizer, by default 0."""
    outer_nesterov: bool = False
    """Use Nesterov's momentum, as DiLoCo does."""
    outer_average: str = "exact"
    """With exact, nodes average over all nodes. With none, every node takes outer steps by itself.
    With sgp or gradient-tracking (or NAME@TOPOLOGY; by default on random_peer_exponential), around
    local, nodes mix one model or two by a round of push-sum. With neighbours, nodes average with
    neighbours as NoLoCo does, on random_pairs or @TOPOLOGY."""
    outer_pull: float = 1.0
    """How strongly --outer-average neighbours draws neighbours together. NoLoCo uses 1 /
    --outer-rate."""
    outer_fragments: int = 1
    """Number of parts of the model that are averaged at different times, as in Streaming DiLoCo."""
    outer_delay: int = 0
    """Number of updates from sending a fragment to using its average."""
    outer_mix: float = 0.0
    """Weight of the local model when an average is used."""
    outer_reset: bool = False
    """Set local momentum and moments to 0 at each outer step, as SlowMo resets SGD's."""
    outer_wire: WireName = "float32"
    """Form of the outer optimizer's messages. --wire is the form of the algorithm's messages.
    low_rank averages factors of rank 4, and needs --outer-error-feedback."""
    outer_error_feedback: float | None = None
    """Factor by which values that a message leaves out are multiplied and added to the next
    message, as in SparseLoCo. With 1 nothing is lost. By default the values are lost."""
    outer_mean_over: Literal["nodes", "senders"] = "nodes"
    """With nodes, sparse messages are averaged over all nodes. With senders, each value is averaged
    over the nodes that sent it."""

    @property
    def gossip(self) -> str | None:
        """The algorithm that replaces the average; None if there is none."""
        name = self.outer_average.partition("@")[0]
        return name if name in GOSSIPS else None

    def make_average(self, nodes: int, seed: int) -> Any:
        """Makes the `average` of `gx.outer`: a name, a schedule of neighbours, or a gossip."""
        name, _, topology = self.outer_average.partition("@")
        if name == "neighbours":
            return make_schedule(topology or "random_pairs", nodes, seed=seed)
        if name in GOSSIPS:
            schedule = make_schedule(topology or "random_peer_exponential", nodes, seed=seed)
            return GOSSIPS[name](schedule, wire=FORMS[self.outer_wire].wire, damped=True)
        if self.outer_average not in ("exact", "none"):
            raise ValueError(
                "--outer-average must be exact, none, or neighbours, sgp or gradient-tracking, "
                f"with @TOPOLOGY or not, got {self.outer_average}."
            )
        return self.outer_average

    def wrap(self, chain: optax.GradientTransformation, average: Any) -> Any:
        """Wraps a chain in the outer optimizer."""
        assert self.outer_every is not None
        momentum = self.outer_momentum or None
        return gx.outer(
            chain,
            optax.sgd(self.outer_rate, momentum, self.outer_nesterov),
            every=self.outer_every,
            average=average,
            fragments=self.outer_fragments,
            delay=self.outer_delay,
            strength=1 - self.outer_mix,
            wire=None if self.gossip else FORMS[self.outer_wire].wire,
            anchor_strength=self.outer_pull,
            reset_inner=self.outer_reset,
            error_feedback=self.outer_error_feedback,
            mean_over=self.outer_mean_over,
        )
