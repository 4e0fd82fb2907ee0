"""The options of the planner: the model and the links, with their units."""

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import tyro

from experiments.options import (
    Check,
    NonNegativeFloat,
    OptionalPath,
    PositiveInt,
    check_fields,
    option_name,
)
from experiments.plan.candidates import Kind, Wire
from experiments.plan.choice import LATE_PRICE, RUN_STEPS
from experiments.plan.measure import ModelName
from gossipjax.cost_model import Islands, Network, Star, Torus, Workload, networks, parse_slowness

if TYPE_CHECKING:
    NetworkName = str
else:
    NetworkName = tyro.extras.literal_type_from_choices(tuple(networks.ALL))

MAX_NODES = 4096
MAX_EXAMPLES = 10**9
MAX_LATE_PRICE = 10.0
MAX_OUTER_NODE_STEPS = 100 * MAX_NODES  # of all nodes between outer steps: a simulation of seconds
DEFAULT_PARAMETERS = "25.6M"
DEFAULT_COMPUTE = "0.228"
DEFAULT_MODEL: ModelName = "small_cnn"


class Quantity(NamedTuple):
    """A number with a unit, as an option gives it."""

    description: str  # for the error of a text that is none
    unit: str  # a regular expression
    factors: dict[str, float]  # unit, in lower case -> what the number is multiplied by
    low: float  # the range of the product
    high: float
    base: str = ""  # the unit of the product, for the error of one out of range


NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*"
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BYTES = {"bit": 1 / 8, "byte": 1.0, "b": 1.0}
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
# `b` alone, and `bps`, mean bits to some and bytes to others: bytes need their capital B.
BANDWIDTH = Quantity(
    "a positive bandwidth in bits or bytes per second, as in 10gbit, 200mbit or 450GB/s",
    "((?i:[kmgt]?(?:bit|byte))|[kKmMgGtT]?B)(?:/?[sS])?",
    {prefix + name: n * m for prefix, n in THOUSANDS.items() for name, m in BYTES.items()},
    1.0,
    1e15,
    " bytes per second",
)

Nodes = Annotated[PositiveInt, Check(f"at most {MAX_NODES}", lambda value: value <= MAX_NODES)]
Examples = Annotated[
    PositiveInt, Check(f"at most {MAX_EXAMPLES}", lambda value: value <= MAX_EXAMPLES)
]
LatePrice = Annotated[
    NonNegativeFloat, Check(f"at most {MAX_LATE_PRICE:g}", lambda value: value <= MAX_LATE_PRICE)
]


@dataclasses.dataclass(frozen=True)
class Options:
    """Chooses an algorithm for a model, a network and a number of nodes."""

    nodes: Nodes = 32
    """Number of nodes."""
    steps: PositiveInt = RUN_STEPS
    """Steps of a node in the whole run: a message must arrive within a hundredth of them."""
    parameters: str | None = None
    """Parameters of the model, as 25.6M or 1B; with --compute."""
    compute: str | None = None
    """Computation of a node's step without exchange, in seconds or as 228ms; with --parameters.
    Without both: 25.6M and 0.228 s, of ResNet-50 on SGP's servers of 8 V100."""
    examples: Examples = 256
    """Examples of a node's step."""
    bandwidth: str | None = None
    """Of a node's link, each way, as 10gbit, 200mbit or 450GB/s."""
    latency: str | None = None
    """Of a message, in seconds or as 50us; 0 if not given."""
    network: NetworkName | None = None
    """A network that others measured, in place of --bandwidth, --latency and --fabric."""
    fabric: Literal["star", "torus", "islands"] | None = None
    """star: a switch, without congestion, if not given. torus: links to neighbours only. islands:
    servers with faster links inside."""
    torus: str | None = None
    """Nodes along each dimension, as 16x16."""
    island_size: PositiveInt | None = None
    """Nodes of an island."""
    island_bandwidth: str | None = None
    """Of a node's link inside its island, as 450GB/s; it has no latency."""
    allreduce: Kind = "ring"
    """The algorithm of all-reduces; two-level needs islands. Narrow ones take the time of a
    ring."""
    slowness: str = "none"
    """As in experiments.speed stragglers. none; a factor, as 2x: of one node; random: each step of
    each node takes 1, 2 or 4 times as long; lognormal: exp(0.5 g) times."""
    wire: tuple[Wire, ...] = ("float32",)
    """One or several forms of messages, of AllReduce, too. Asynchronous SGP has the first two;
    d1d-psgd, easgd, relay, gossip-pga, desloc and sparta have float32, streaming-diloco int4,
    sparse-loco block_top_k."""
    outer_every: PositiveInt = 100
    """Steps between the outer steps of DiLoCo and SparseLoCo, and the averages of DES-LOC."""
    late_price: LatePrice = LATE_PRICE
    """Assumed: more examples, as a fraction, per doubling of the steps after which all nodes have
    what one has learned."""
    measure: bool = False
    """Take parameters and computation from a model on this machine, and the bandwidth from a TCP
    stream over its loopback, unless they are given."""
    model: ModelName | None = None
    """The model of --measure; small_cnn if not given."""
    out: OptionalPath = None
    """Folder for summary.json and plots; without it nothing is written."""
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
        self._require_network()
        self._require_fabric()
        parse_slowness(self.slowness, "--slowness")
        make_workload(self)
        if (self.parameters is None) != (self.compute is None) and not self.measure:
            missing = "parameters" if self.parameters is None else "compute"
            raise ValueError(
                f"--{missing} must be given beside the other one of a model, got none: give both "
                "--parameters and --compute, or --measure, or neither for a ResNet-50."
            )
        if self.bandwidth is not None or self.network is not None:
            make_network(self)

    @property
    def needs_step(self) -> bool:
        """Whether parameters or computation are not given."""
        return self.parameters is None or self.compute is None

    @property
    def needs_stream(self) -> bool:
        """Whether no links are given."""
        return self.bandwidth is None and self.network is None

    def _require_network(self) -> None:
        if self.needs_stream and not self.measure:
            raise ValueError(
                "--bandwidth must be given, as 10gbit, got none: give it, or --network, or "
                "--measure, which takes it from this machine."
            )
        if self.network is None:
            return
        for name in ("bandwidth", "latency", "fabric", "torus", "island_size", "island_bandwidth"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{option_name(name)} must be left out beside --network, got "
                    f"{getattr(self, name)} and {self.network}, which has its own: drop it, or "
                    "give --bandwidth in place of --network."
                )
        limit = networks.MAX_NODES.get(self.network, MAX_NODES)
        if self.nodes > limit:
            raise ValueError(
                f"--nodes must be at most {limit} for --network {self.network}, got {self.nodes}: "
                "give fewer, or --bandwidth with --fabric islands."
            )

    def _require_fabric(self) -> None:
        fabric = self.fabric or "star"
        needed = {"torus": ("torus",), "islands": ("island_size", "island_bandwidth")}
        for wanted, names in needed.items():
            for name in names:
                if (getattr(self, name) is None) == (fabric == wanted):
                    raise ValueError(
                        f"{option_name(name)} must be given with --fabric {wanted}, and with no "
                        f"other, got {getattr(self, name)} with {fabric}: give both or none."
                    )
        if self.allreduce == "two-level" and fabric != "islands":
            raise ValueError(
                f"--fabric must be islands for --allreduce two-level, got {fabric}: give "
                "--fabric islands --island-size 8 --island-bandwidth 450GB/s, or another one."
            )


def require_effects(options: Options) -> None:
    """Refuses options of a command line that would do nothing beside the others."""
    if options.overwrite and options.out is None:
        raise ValueError(
            "--out must be given with --overwrite, got none: name the folder, or leave it out."
        )
    if options.model is not None and not (options.measure and options.needs_step):
        raise ValueError(
            "--model must be left out unless --measure takes --parameters or --compute from it, "
            f"got {options.model}: give --measure, and not both of the others."
        )
    if options.measure and not (options.needs_step or options.needs_stream):
        raise ValueError(
            "--measure must have something to measure, got --parameters, --compute and the links: "
            "leave out one of them, or --measure."
        )


def make_workload(options: Options) -> Workload:
    """The model and the computation of the options."""
    parameters = DEFAULT_PARAMETERS if options.parameters is None else options.parameters
    compute = DEFAULT_COMPUTE if options.compute is None else options.compute
    return Workload(
        parameters=parse(COUNT, parameters, "--parameters"),
        compute_seconds=parse(SECONDS, compute, "--compute"),
        examples=options.examples,
    )


def make_network(options: Options) -> Network:
    """The links of the options; their fabric must fit the number of nodes."""
    if options.network is not None:
        network = networks.ALL[options.network]
    else:
        assert options.bandwidth is not None
        network = Network(
            parse(BANDWIDTH, options.bandwidth, "--bandwidth"),
            parse(LATENCY, options.latency or "0", "--latency"),
            make_fabric(options),
        )
    try:
        network.message_seconds([(i + 1) % options.nodes for i in range(options.nodes)], 1.0)
    except ValueError as error:
        raise ValueError(f"--nodes must fit the links: {error}") from None
    return network


def make_fabric(options: Options) -> Star | Torus | Islands:
    """How the links are joined."""
    if options.fabric == "torus":
        assert options.torus is not None
        extents = options.torus.lower().split("x")
        if not all(re.fullmatch("0*[1-9][0-9]{0,5}", extent) for extent in extents):
            raise ValueError(
                f"--torus must be nodes along each dimension, as 16x16, got {options.torus!r}."
            )
        return Torus(tuple(map(int, extents)))
    if options.fabric == "islands":
        assert options.island_size is not None
        assert options.island_bandwidth is not None
        bandwidth = parse(BANDWIDTH, options.island_bandwidth, "--island-bandwidth")
        return Islands(options.island_size, bandwidth)
    return Star()


def parse(quantity: Quantity, text: str, option: str) -> float:
    """The value of a text, in the base unit: a number, seconds, or bytes per second.

    >>> parse(COUNT, "25.6M", "--parameters"), parse(SECONDS, "228ms", "--compute")
    (25600000.0, 0.228)
    >>> parse(BANDWIDTH, "10gbit", "--bandwidth"), parse(BANDWIDTH, "450GB/s", "--bandwidth")
    (1250000000.0, 450000000000.0)
    """
    message = f"{option} must be {quantity.description}, got {text!r}"
    match = re.fullmatch(NUMBER + quantity.unit, text.strip())
    if match is None:
        raise ValueError(f"{message}: write a number and its unit.")
    value = float(match[1]) * quantity.factors[match[2].lower()]
    if not quantity.low <= value <= quantity.high:
        bounds = f"{quantity.low:g} to {quantity.high:g}{quantity.base}"
        raise ValueError(f"{message}: give one from {bounds}.")
    return value
