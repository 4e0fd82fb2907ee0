"""The outer optimizer of a run: its options, which are the keywords of `gx.outer`."""

import dataclasses
from typing import Annotated, Any, Literal

import optax
import tyro

import gossipjax as gx
from experiments.options import Fraction, PositiveFloat
from experiments.training.forms import FORMS, WireName
from experiments.training.topologies import make_schedule

OUTER_HELP = (
    "Updates from one outer step to the next: all nodes go on from their average, moved by an "
    "outer optimizer. Around local it is Local SGD, or DiLoCo; around gossip that keeps nothing "
    "but models, SlowMo."
)
GOSSIPS = {"sgp": gx.sgp, "gradient-tracking": gx.gradient_tracking}


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """SGD at every `outer_every`-th update, around the chain of a run; `gx.outer` checks them."""

    outer_every: Annotated[int | None, tyro.conf.arg(help=OUTER_HELP)] = None
    outer_rate: PositiveFloat = 1.0
    """Learning rate of the outer optimizer; 1 without momentum is the plain average."""
    outer_momentum: Fraction | None = None
    """Momentum of the outer optimizer; if not given, 0."""
    outer_nesterov: bool = False
    """Whether that momentum is Nesterov's, as DiLoCo's."""
    outer_average: str = "exact"
    """exact: over all nodes. none: every node takes outer steps by itself. sgp or
    gradient-tracking: by a round of push-sum, NAME or NAME@TOPOLOGY, on random_peer_exponential if
    not given; of one model or two, around local. neighbours: over them, as NoLoCo, on random_pairs
    or @TOPOLOGY."""
    outer_pull: float = 1.0
    """How strongly --outer-average neighbours draws them together; NoLoCo's is 1 / --outer-rate."""
    outer_fragments: int = 1
    """Parts of the model that are averaged at different times, as in Streaming DiLoCo."""
    outer_delay: int = 0
    """Updates between sending a fragment and using its average."""
    outer_mix: float = 0.0
    """The weight of the local model where an average is used."""
    outer_reset: bool = False
    """Set local momentum and moments to 0 at each outer step, as SlowMo does with those of SGD."""
    outer_wire: WireName = "float32"
    """Form of the messages of the averages, as --wire is of those of the algorithm."""
    outer_error_feedback: float | None = None
    """The factor of what these messages leave out, in the next ones, as in SparseLoCo; 1 loses
    nothing. If not given, it is lost."""
    outer_mean_over: Literal["nodes", "senders"] = "nodes"
    """nodes: sparse messages are averaged over all nodes. senders: each value over those that sent
    it."""

    @property
    def gossip(self) -> str | None:
        """The algorithm in the place of an average; None without one."""
        name = self.outer_average.partition("@")[0]
        return name if name in GOSSIPS else None

    def make_average(self, nodes: int, seed: int) -> Any:
        """Returns `average` of `gx.outer`: a name, the rounds of neighbours, or a gossip."""
        name, _, topology = self.outer_average.partition("@")
        if name == "neighbours":
            return make_schedule(topology or "random_pairs", nodes, seed=seed)
        if name in GOSSIPS:
            schedule = make_schedule(topology or "random_peer_exponential", nodes, seed=seed)
            return GOSSIPS[name](schedule, wire=FORMS[self.outer_wire].codec, damped=True)
        if self.outer_average not in ("exact", "none"):
            raise ValueError(
                "--outer-average must be exact, none, or neighbours, sgp or gradient-tracking, "
                f"with @TOPOLOGY or not, got {self.outer_average}."
            )
        return self.outer_average

    def wrap(self, chain: optax.GradientTransformation, average: Any) -> Any:
        """Returns the outer optimizer around a chain."""
        assert self.outer_every is not None
        momentum = self.outer_momentum or None
        return gx.outer(
            chain,
            optax.sgd(self.outer_rate, momentum, self.outer_nesterov),
            every=self.outer_every,
            average=average,
            fragments=self.outer_fragments,
            delay=self.outer_delay,
            mix=self.outer_mix,
            wire=None if self.gossip else FORMS[self.outer_wire].codec,
            pull=self.outer_pull,
            reset_inner=self.outer_reset,
            error_feedback=self.outer_error_feedback,
            mean_over=self.outer_mean_over,
        )
