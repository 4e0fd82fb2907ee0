"""The options of the planner: the model and the links, with their units."""

import dataclasses
import re
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from experiments.options.checks import (
    Check,
    NonNegativeFloat,
    PositiveInt,
    check_fields,
    option_name,
)
from experiments.options.paths import OptionalPath
from experiments.plan.candidates import Kind, Wire
from experiments.plan.choice import LATE_PRICE
from experiments.plan.measure import ModelName
from gossipjax.cost_model import Islands, Network, Star, Torus, Workload, networks, parse_slowness

if TYPE_CHECKING:
    NetworkName = str
else:
    NetworkName = tyro.extras.literal_type_from_choices(tuple(networks.ALL))

BITS_PER_BYTE = 8
MAX_NODES = 4096
MAX_EXAMPLES = 10**9
MAX_LATE_PRICE = 10.0
MAX_OUTER_NODE_STEPS = 100 * MAX_NODES  # of all nodes between outer steps: a simulation of seconds
DEFAULT_PARAMETERS = "25.6M"
DEFAULT_COMPUTE = "0.228"
DEFAULT_MODEL: ModelName = "small_cnn"

NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
COUNT = re.compile(rf"{NUMBER}\s*([kmbgt]?)", re.IGNORECASE)
SECONDS = re.compile(rf"{NUMBER}\s*(s|ms|us|)", re.IGNORECASE)
RATE = re.compile(rf"{NUMBER}\s*([kmgt]?)(bit|byte|b)(?:/?(s))?", re.IGNORECASE)
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
SECONDS_OF = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
MIN_COUNT = 1.0
MAX_COUNT = 1e15
MIN_SECONDS = 1e-9
MAX_SECONDS = 1e6
MIN_RATE = 1.0  # bytes per second
MAX_RATE = 1e15

Nodes = Annotated[PositiveInt, Check(f"at most {MAX_NODES}", lambda value: value <= MAX_NODES)]
Examples = Annotated[
    PositiveInt, Check(f"at most {MAX_EXAMPLES}", lambda value: value <= MAX_EXAMPLES)
]
LatePrice = Annotated[
    NonNegativeFloat, Check(f"at most {MAX_LATE_PRICE:g}", lambda value: value <= MAX_LATE_PRICE)
]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the plan."""

    nodes: Nodes = 32
    """Number of nodes."""
    parameters: str | None = None
    """Parameters of the model, as 25.6M or 1B; 25.6M, a ResNet-50, if not given."""
    compute: str | None = None
    """Computation of a node's step without exchange, in seconds or as 228ms; 0.228, of SGP's
    servers of 8 V100, if not given."""
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
    d1d-psgd, easgd, relay and gossip-pga have float32, streaming-diloco int4."""
    outer_every: PositiveInt = 100
    """Steps between the outer steps of DiLoCo."""
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
    """Refuses options of a command line that would do nothing beside the others.

    Raises:
      ValueError: names the option, and the one that it needs or that takes its place.
    """
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
        parameters=parse_count(parameters, "--parameters"),
        compute_seconds=parse_seconds(compute, "--compute"),
        examples=options.examples,
    )


def make_network(options: Options) -> Network:
    """The links of the options; their fabric must fit the number of nodes."""
    if options.network is not None:
        network = networks.ALL[options.network]
    else:
        assert options.bandwidth is not None
        latency = "0" if options.latency is None else options.latency
        network = Network(
            parse_bandwidth(options.bandwidth, "--bandwidth"),
            parse_seconds(latency, "--latency", is_zero_allowed=True),
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
        bandwidth = parse_bandwidth(options.island_bandwidth, "--island-bandwidth")
        return Islands(options.island_size, bandwidth)
    return Star()


def parse_count(text: str, option: str) -> float:
    """A number from 1 to 1e15 with an optional k, M, B (or G) or T, in powers of 1000.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_count("25.6M", "--parameters"), parse_count("1B", "--parameters")
    (25600000.0, 1000000000.0)
    """
    way_out = "a positive number, with k, M, B or T after it if you like, as in 25.6M"
    number, unit = _match(COUNT, text, option, way_out)
    value = number * THOUSANDS[unit.lower()]
    _require_between(MIN_COUNT, value, MAX_COUNT, "", f"{option} must be {way_out}, got {text!r}")
    return value


def parse_seconds(text: str, option: str, is_zero_allowed: bool = False) -> float:
    """Seconds from 1e-9 to 1e6, or 0 where allowed, of a number with an optional s, ms or us.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_seconds("228ms", "--compute"), parse_seconds("0.228", "--compute")
    (0.228, 0.228)
    """
    zero = "0 or " if is_zero_allowed else ""
    way_out = f"{zero}a positive time in seconds, or with s, ms or us after it, as in 228ms"
    number, unit = _match(SECONDS, text, option, way_out)
    if number == 0 and is_zero_allowed:
        return 0.0
    seconds = number * SECONDS_OF[unit.lower()]
    message = f"{option} must be {way_out}, got {text!r}"
    _require_between(MIN_SECONDS, seconds, MAX_SECONDS, " s", message)
    return seconds


def parse_bandwidth(text: str, option: str) -> float:
    """Bytes per second of a bandwidth in bits (`10gbit`, `10Gbit/s`) or bytes (`450GB/s`).

    From 1 to 1e15 bytes per second. `b` alone, and `bps`, mean bits to some and bytes to others:
    `450GB/s` needs its capital B, and the others are refused.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_bandwidth("10gbit", "--bandwidth"), parse_bandwidth("450GB/s", "--bandwidth")
    (1250000000.0, 450000000000.0)
    """
    way_out = "a positive bandwidth in bits or bytes per second, as in 10gbit, 200mbit or 450GB/s"
    match = RATE.fullmatch(text.strip())
    if match is None or match[3] == "b":
        raise ValueError(f"{option} must be {way_out}, got {text!r}: write a number and its unit.")
    bytes_of_unit = 1 / BITS_PER_BYTE if match[3].lower() == "bit" else 1.0
    rate = float(match[1]) * THOUSANDS[match[2].lower()] * bytes_of_unit
    message = f"{option} must be {way_out}, got {text!r}"
    _require_between(MIN_RATE, rate, MAX_RATE, " bytes per second", message)
    return rate


def _match(pattern: re.Pattern[str], text: str, option: str, way_out: str) -> tuple[float, str]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{option} must be {way_out}, got {text!r}: write a number and its unit.")
    return float(match[1]), match[2]


def _require_between(low: float, value: float, high: float, unit: str, message: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{message}: give one from {low:g} to {high:g}{unit}.")
