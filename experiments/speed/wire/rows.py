"""The rows of the measurement: its options, what each algorithm sends, and when, by the cost model.

The bytes and the modelled seconds of a row come from its `gossipjax.cost_model.Method`.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.flatten_util import ravel_pytree

import gossipjax as gx
from experiments.options import NonNegativeFloat, OutputOptions, require_different
from experiments.speed.wire import links
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.forms import DENSE, FORMS, WireName
from experiments.training.methods import (
    ALGORITHM_HELP,
    ALGORITHMS,
    MethodOptions,
    make_method,
    parse_name,
)
from gossipjax.cost_model import Method, Workload, from_transform

# Rows of this measurement only, not of `experiments.training.methods`.
CENTRALIZED = "centralized"
NEVER_WAIT = ("async-sgp", "async-adpsgd")
DEFAULT_ALGORITHMS = (
    *("allreduce", CENTRALIZED, "dpsgd@ring", "dpsgd@bipartite_exponential"),
    *("sgp@one_peer_exponential", "sgp@two_peer_exponential"),
    *("sgp@complete/one_peer_exponential", "sgp-cwa", "1-osgp", "2-osgp", *NEVER_WAIT),
)
FLOATS: tuple[WireName, ...] = ("float32", "bfloat16")
WIRES: dict[str, tuple[WireName, ...]] = {
    CENTRALIZED: FLOATS,
    **dict.fromkeys(NEVER_WAIT, FLOATS[:1]),
    "async-sgp": DENSE,
}
"""The forms in which messages of these rows can travel."""

Computation = Literal["computed", "slept"]

LAYERS = 8  # of the model
LEARNING_RATE = 1e-3  # of plain SGD; small, because only time counts here
MIN_HOSTS = 2
MAX_HOSTS = 64
MIN_MEGABYTES = 0.001
MEGA = 1e6
MIN_ITERATIONS = 10
HELP = (
    f"{ALGORITHM_HELP} Here also {CENTRALIZED} (node 0 gathers gradients and sends their mean) "
    f"and, of asynchronous nodes, {', '.join(NEVER_WAIT)}."
)


@dataclasses.dataclass(frozen=True)
class WireOptions(OutputOptions):
    """Options of the measurement."""

    hosts: tuple[int, ...] = (4,)
    """Number of hosts, one process each: one or several numbers."""
    bandwidth: tuple[str, ...] = ()
    """Bandwidth of every host's link, each way, as 200mbit or 25MB/s: one or several; needs root.
    Without it the hosts share the machine's loopback, without limits."""
    megabytes: float = 20.0
    """Float32 parameters of the model, in 1e6 bytes."""
    compute_seconds: NonNegativeFloat = 0.5
    """Seconds of computation per iteration, on all hosts at once, for which the batch is sized."""
    computation: tuple[Computation, ...] = ("computed", "slept")
    """computed: by the cores, which all hosts and their exchanges share. slept: a sleep of as many
    seconds, as if each host had a device. One or both, each with its table."""
    iterations: int = 12
    """Measured iterations of each row, at least 10."""
    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=HELP)] = DEFAULT_ALGORITHMS
    wire: Annotated[tuple[WireName, ...], tyro.conf.arg(aliases=["--wire-dtype"])] = FLOATS
    """Forms in which messages travel; an algorithm without one of them is left out of its rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = [links.parse_rate(rate) for rate in self.bandwidth]
        require_different(self, "hosts", "algorithm", "wire", "computation")
        if len(set(rates)) < len(rates):
            raise ValueError(f"--bandwidth must be different values, got {self.bandwidth}.")
        if min(self.hosts) < MIN_HOSTS or max(self.hosts) > MAX_HOSTS:
            raise ValueError(f"--hosts must be from {MIN_HOSTS} to {MAX_HOSTS}, got {self.hosts}.")
        if not MIN_MEGABYTES <= self.megabytes < math.inf:
            raise ValueError(
                f"--megabytes must be finite and >= {MIN_MEGABYTES}, got {self.megabytes}."
            )
        if self.iterations < MIN_ITERATIONS:
            raise ValueError(f"--iterations must be >= {MIN_ITERATIONS}, got {self.iterations}.")


class Row(NamedTuple):
    """One algorithm with messages of one form."""

    algorithm: str  # as it was given
    wire: WireName
    nodes: int
    topology: str
    transform: optax.GradientTransformationExtraArgs  # around plain SGD; nothing if asynchronous
    opt_state: Any  # of one node: shapes and static data
    method: Method  # what it exchanges

    @property
    def name(self) -> str:
        """Name of the row in the files, unique among the rows."""
        return f"{self.algorithm}, {self.wire} wire"

    @property
    def waits(self) -> bool:
        """Whether nodes wait for each other."""
        return not self.method.is_asynchronous

    @property
    def overlaps(self) -> bool:
        """Whether the exchange can run during the computation of the gradients."""
        return any(exchange.overlap or exchange.layers for exchange in self.method.exchanges)

    @property
    def is_in_buckets(self) -> bool:
        """Whether the exchange begins with the first gradients, in the middle of a computation."""
        return any(exchange.layers for exchange in self.method.exchanges)

    @property
    def gathers(self) -> bool:
        """Whether all nodes send sparse messages to all others, as no all-reduce can sum them."""
        return any(exchange.gathers for exchange in self.method.exchanges)

    @property
    def has_one_cycle(self) -> bool:
        """Whether the topology stays the same during the run."""
        schedules = [exchange.schedule for exchange in self.method.exchanges]
        return all(schedule is None or len(schedule.segments) == 1 for schedule in schedules)

    def canonical_step(self, step: int) -> int:
        """The static step of the program that runs the measured step of this number."""
        return gx.canonical_step(self.opt_state, step)

    def count_sent_bytes(self, step: int, parameters: int) -> float:
        """Bytes that the node that sends most sends at `step`, for a model of `parameters` float32.

        Only the messages, without headers. Asynchronous nodes send less where their link is busy.
        """
        if self.algorithm in NEVER_WAIT:  # which exchange by no transform
            workload = Workload(parameters, compute_seconds=0)
            (exchange,) = self.method.exchanges
            return exchange.count_sent_bytes(step, workload, self.nodes)
        params = list_shapes(parameters)
        return float(gx.bytes_per_step(self.transform, params, self.nodes, steps=[step]).sent.max())

    def count_link_bytes(self, step: int, parameters: int) -> float:
        """Bytes that the busiest link carries one after another at `step`."""
        sent = self.count_sent_bytes(step, parameters)
        # Links are full duplex. But the center knows the mean only when all gradients are in: it
        # receives N - 1 models, and then sends as many.
        return 2 * sent if self.algorithm == CENTRALIZED else sent


def list_shapes(parameters: int) -> list[jax.ShapeDtypeStruct]:
    """The square matrices of a model of that size, and all its biases.

    >>> [shape.shape for shape in list_shapes(8 * (30 * 30 + 30))][-2:]
    [(30, 30), (240,)]
    """
    width = math.isqrt(parameters // LAYERS)
    rest = parameters - LAYERS * width**2
    return [jax.ShapeDtypeStruct(x, jnp.float32) for x in [(width, width)] * LAYERS + [(rest,)]]


def make_row(
    algorithm: str, wire: WireName, nodes: int, steps: int = 12, megabytes: float = 20.0
) -> Row:
    """The named algorithm over `nodes` nodes, around plain SGD.

    A hybrid topology switches after a third of the `steps`. Factors are of the matrices of a
    model of this size.

    >>> row = make_row("1-osgp", "bfloat16", 4)
    >>> row.topology, row.overlaps, row.count_sent_bytes(0, 1_000_000)
    ('one_peer_exponential', True, 2000004.0)
    """
    if wire not in WIRES.get(algorithm, FORMS):
        raise ValueError(
            f"messages of {algorithm} must be {' or '.join(WIRES[algorithm])}, got {wire}."
        )
    codec: Any = FORMS[wire].wire
    sgd = optax.sgd(LEARNING_RATE)
    if algorithm == CENTRALIZED:
        method = from_transform(gx.allreduce(wire=codec), algorithm, "server")
        transform = optax.chain(average_at_center(codec), sgd)
        topology = "star"
    elif algorithm in NEVER_WAIT:
        early = make_method("sgp-cwa", MethodOptions(nodes, wire=wire), sgd).transform
        method = from_transform(early, algorithm, awaits="nobody")
        transform = optax.identity()
        topology = ASYNCHRONOUS[algorithm].topology
    else:
        row = parse_name(algorithm).row
        if row not in ALGORITHMS or not ALGORITHMS[row].exchanges:
            raise ValueError(f"{algorithm} must be of the library, and exchange something.")
        made = make_method(algorithm, MethodOptions(nodes, steps, wire=wire), sgd)
        transform = made.transform
        topology = made.topology
        params = list_shapes(int(megabytes * MEGA / 4))
        # A train step averages the gradients of each layer while it computes those before it.
        layers = LAYERS if algorithm == "allreduce" and wire in FLOATS else 0
        method = from_transform(transform, algorithm, params=params, layers=layers)
    params = [jax.ShapeDtypeStruct((1,), jnp.float32)]
    transform = optax.with_extra_args_support(transform)
    opt_state = jax.eval_shape(transform.init, params)
    return Row(algorithm, wire, nodes, topology, transform, opt_state, method)


def build_rows(options: WireOptions, nodes: int) -> tuple[list[Row], dict[str, str]]:
    """All rows that are possible for `nodes` nodes; and by name, why the others are not."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for algorithm in options.algorithm:
        if algorithm not in WIRES:
            parse_name(algorithm)
        for wire in options.wire:
            try:
                rows.append(make_row(algorithm, wire, nodes, options.iterations, options.megabytes))
            except ValueError as error:
                left_out[f"{algorithm}, {wire} wire"] = str(error)
    if not rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"nothing to measure with {nodes} hosts. {reasons}")
    return rows, left_out


def average_at_center(codec: gx.wire.Codec | None) -> optax.GradientTransformationExtraArgs:
    """A parameter server: node 0 gathers all gradients and sends every node their mean.

    Goes first in a chain. Needs a mesh: the permutations are partial, because only the link of
    node 0 is busy.
    """

    def encode(values: jax.Array) -> jax.Array:
        return values if codec is None else codec.encode(values)

    def decode(words: jax.Array, like: jax.Array) -> jax.Array:
        return words if codec is None else codec.decode(words, like)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        buffer, unravel = ravel_pytree(updates)
        nodes = jax.lax.axis_size("nodes")
        node = jax.lax.axis_index("nodes")
        words = encode(buffer)
        total = buffer
        for sender in range(1, nodes):
            received = jax.lax.ppermute(words, "nodes", [(sender, 0)])
            total = total + decode(received, buffer)
        mean = encode(total / nodes)  # only node 0 has the mean
        result = mean
        for receiver in range(1, nodes):
            received = jax.lax.ppermute(mean, "nodes", [(0, receiver)])
            result = jnp.where(node == receiver, received, result)
        return unravel(decode(result, buffer)), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
