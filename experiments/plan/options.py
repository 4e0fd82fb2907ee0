"""The options of the planner: the model and the links, with their units."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from experiments.options import Check, NonNegativeFloat, OptionalPath, PositiveInt, check_fields
from experiments.plan.candidates import Kind, Wire
from experiments.plan.choice import LATE_PRICE, RUN_STEPS
from experiments.quantities import BANDWIDTH, THOUSANDS, Quantity, parse
from gossipjax.cost_model import Network, Workload, networks, parse_slowness

if TYPE_CHECKING:
    NetworkName = str
else:
    NetworkName = tyro.extras.literal_type_from_choices(tuple(networks.ALL))

MAX_NODES = 4096
MAX_OUTER_NODE_STEPS = 100 * MAX_NODES  # of all nodes between outer steps: a simulation of seconds


COUNT = Quantity(
    "a positive number, with k, M, B or T after it if you like, as in 25.6M",
    "((?i:[kmbgt]?))",
    THOUSANDS | {"b": 1e9},
    1.0,
    1e15,
)
SECONDS = Quantity(
    "a positive time in seconds, or with s, ms or us after it, as in 228ms",
    "((?i:s|ms|us|))",
    {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6},
    1e-9,
    1e6,
    " s",
)
LATENCY = SECONDS._replace(description=f"0 or {SECONDS.description}", low=0.0)
Nodes = Annotated[PositiveInt, Check(f"at most {MAX_NODES}", lambda value: value <= MAX_NODES)]


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Chooses an algorithm for a model, a network and a number of nodes."""

    nodes: Nodes = 32
    """Number of nodes."""
    steps: PositiveInt = RUN_STEPS
    """Steps of a node in the whole run: a message must arrive within a hundredth of them."""
    parameters: str = "25.6M"
    """Parameters of the model, as 25.6M or 1B; if not given, of ResNet-50."""
    compute: str = "0.228"
    """Computation of a node's step without exchange, in seconds or as 228ms; if not given, of
    ResNet-50 on SGP's servers of 8 V100."""
    examples: PositiveInt = 256
    """Examples of a node's step."""
    bandwidth: str | None = None
    """Of a node's link, each way, as 10gbit, 200mbit or 450GB/s."""
    latency: str | None = None
    """Of a message, in seconds or as 50us; 0 if not given."""
    network: NetworkName | None = None
    """A network that others measured, in place of --bandwidth and --latency."""
    allreduce: Kind = "ring"
    """The algorithm of all-reduces. Narrow ones take the time of a ring."""
    slowness: str = "none"
    """As in experiments.speed stragglers. none; a factor, as 2x: of one node; random: each step of
    each node takes 1, 2 or 4 times as long; lognormal: exp(0.5 g) times."""
    wire: tuple[Wire, ...] = ("float32",)
    """One or several forms of messages, of AllReduce, too. async-adpsgd, async-outer, d1d-psgd,
    easgd and gossip-pga have float32, streaming-diloco int4, sparse-loco block_top_k, powersgd and
    diloco of factors low_rank (rank 4)."""
    outer_every: PositiveInt = 100
    """Steps between the outer steps of DiLoCo, SparseLoCo and async-outer."""
    late_price: NonNegativeFloat = LATE_PRICE
    """Assumed: more examples, as a fraction, per doubling of the steps after which all nodes have
    what one has learned."""
    all: bool = False
    """A row for each method, and not for the best of each kind alone."""
    out: OptionalPath = None
    """Folder for summary.json; without it nothing is written."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.wire or len(set(self.wire)) < len(self.wire):
            raise ValueError(f"--wire must be one or several different forms, got {self.wire}.")
        if self.outer_every * self.nodes > MAX_OUTER_NODE_STEPS:
            raise ValueError(
                f"--outer-every must be at most {MAX_OUTER_NODE_STEPS // self.nodes} for "
                f"{self.nodes} nodes, got {self.outer_every}: give fewer steps."
            )
        if (self.bandwidth is None) == (self.network is None):
            raise ValueError(
                "--bandwidth, as 10gbit, or --network must be given, and not both, got "
                f"{self.bandwidth} and {self.network}."
            )
        if self.network is not None and self.latency is not None:
            raise ValueError(
                f"--latency must be left out with --network, got {self.latency} and "
                f"{self.network}, which has its own: drop it, or give --bandwidth."
            )
        limit = networks.MAX_NODES.get(self.network or "", MAX_NODES)
        if self.nodes > limit:
            raise ValueError(
                f"--nodes must be at most {limit} for --network {self.network}, got {self.nodes}: "
                "give fewer, or --bandwidth."
            )
        parse_slowness(self.slowness, "--slowness")
        make_workload(self)
        make_network(self)


def make_workload(options: PlanOptions) -> Workload:
    """The model and the computation of the options."""
    return Workload(
        parameters=parse(COUNT, options.parameters, "--parameters"),
        compute_seconds=parse(SECONDS, options.compute, "--compute"),
        examples=options.examples,
    )


def make_network(options: PlanOptions) -> Network:
    """The links of the options."""
    if options.bandwidth is not None:
        return Network(
            parse(BANDWIDTH, options.bandwidth, "--bandwidth"),
            parse(LATENCY, options.latency or "0", "--latency"),
        )
    assert options.network is not None
    return networks.ALL[options.network]
