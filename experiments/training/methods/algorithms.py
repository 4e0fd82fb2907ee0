"""The algorithms that programs know by name, a row each, and the transform that a name means.

A new algorithm is one row of `ALGORITHMS`; help texts, errors and benchmarks read the table.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import optax

import gossipjax as gx
from experiments.training.methods.topologies import MAX_ROUNDS, TOPOLOGIES, make_schedule
from experiments.training.optimization import accumulate_gradients

Transform = optax.GradientTransformationExtraArgs
OuterAverage = Literal["exact", "none"]
WireName = Literal["float32", "bfloat16", "int8", "int4", "top_k", "random_k"]

MAX_DELAY = 4  # steps, of AD-PSGD
ELASTICITY = 0.9  # of EASGD, divided by the number of nodes, as in its paper
SPARSE_FRACTION = 0.1  # of the values, that sparse codecs send


class Form(NamedTuple):
    """A form of messages that programs know by name.

    Attributes:
      codec: None for full precision.
      gamma: of CHOCO with this codec.
    """

    codec: gx.wire.Codec | None
    gamma: float


FORMS: dict[WireName, Form] = {
    "float32": Form(None, 1.0),
    "bfloat16": Form(gx.wire.bfloat16(), 1.0),
    "int8": Form(gx.wire.int8(), 1.0),
    "int4": Form(gx.wire.int4(), 0.5),
    "top_k": Form(gx.wire.top_k(SPARSE_FRACTION), 0.2),
    "random_k": Form(gx.wire.random_k(SPARSE_FRACTION), 0.1),
}
DENSE: tuple[WireName, ...] = ("float32", "bfloat16", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """An outer optimizer around the chain of a run: SGD at every `every`-th update.

    Attributes:
      every: updates from one outer step to the next.
      rate: its learning rate; 1 without momentum is the plain average.
      momentum: its momentum.
      nesterov: whether that is Nesterov's.
      average: over all nodes, or over none: each steps by itself.
    """

    every: int
    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    average: OuterAverage = "exact"


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """The options of a run that an algorithm may depend on.

    Attributes:
      nodes: N.
      steps: of the run; a hybrid topology switches after the fraction `switch_at` of them.
      seed: of random topologies and delays.
      local_steps: updates from one exchange to the next.
      wire: the form of messages, a name of `FORMS`.
      staleness: the mean delay of AD-PSGD's gradients, in steps.
      delays_of: a folder of journals whose delays AD-PSGD has instead.
      switch_at: see `steps`.
      overlap: updates between sending a message and using it; part of the algorithm's name.
      accumulate: steps for one update.
      outer: an outer optimizer around the chain.
    """

    nodes: int
    steps: int = 1
    seed: int = 0
    local_steps: int = 1
    wire: WireName = "float32"
    staleness: float = 1.0
    delays_of: Path | None = None
    switch_at: float = 1 / 3
    overlap: int = 0
    accumulate: int = 1
    outer: OuterOptions | None = None

    @property
    def codec(self) -> gx.wire.Codec | None:
        """The `wire` of a transform; None, the parameters' type, for float32."""
        return FORMS[self.wire].codec


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A row of `ALGORITHMS`.

    Attributes:
      build: makes the transform for a schedule, in which `local_steps` are counted already.
      topology: that of the algorithm's paper.
      fixed_topology: whether it runs on no other.
      wires: the forms in which its messages can travel.
      overlaps: whether its name has a number of steps before the last part: `2-osgp`.
      goes_first: whether the transform goes first in the chain, and acts on the gradients.
      accumulates: whether gradients of several steps can be one update.
      skips_steps: whether there can be steps without exchange.
      exchanges: whether it exchanges anything.
    """

    build: Callable[[gx.Schedule, MethodOptions], Transform]
    topology: str
    fixed_topology: bool = False
    wires: tuple[WireName, ...] = DENSE
    overlaps: bool = False
    goes_first: bool = False
    accumulates: bool = True
    skips_steps: bool = True
    exchanges: bool = True


def _build_osgp(schedule: gx.Schedule, options: MethodOptions, biased: bool = False) -> Transform:
    # Counted in steps: what is sent with the first step after an update is used so many later.
    overlap = options.overlap * options.accumulate
    return gx.osgp(schedule, overlap, biased, wire=options.codec)


def _build_adpsgd(schedule: gx.Schedule, options: MethodOptions) -> Transform:
    if options.delays_of is None:
        rounds, nodes = MAX_ROUNDS, schedule.size
        delays = gx.random_delays(nodes, rounds, options.seed, options.staleness, MAX_DELAY)
    else:
        delays = _read_delays(options.delays_of)
    return gx.adpsgd(schedule, delays, wire=options.codec)


def _build_choco(schedule: gx.Schedule, options: MethodOptions) -> Transform:
    form = FORMS[options.wire]
    return gx.choco(schedule, form.codec or gx.wire.float32(), form.gamma)


def _read_delays(folder: Path) -> Any:
    """Returns the delays `[T, N]` that a run of nodes that wait for nobody has shown."""
    journals = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    if not journals:
        raise ValueError(
            f"--delays-of must be a folder of journals, OUT/nodes/RUN/journals/JOB, got {folder}."
        )
    return gx.asynchronous.measure_delays(journals)


def _build_relay(schedule: gx.Schedule, options: MethodOptions) -> Transform:
    """RelaySGD on the graph of the schedule, which must be a tree."""
    round_ = schedule.round_at(0)
    tree = networkx.empty_graph(schedule.size)
    edges = zip(round_.senders.tolist(), round_.receivers.tolist(), strict=True)
    tree.add_edges_from((i, j) for i, j in edges if i != j)
    return gx.relay(tree)


ALGORITHMS = {
    "sgp": Algorithm(
        lambda schedule, options: gx.sgp(schedule, wire=options.codec),
        "one_peer_exponential",
    ),
    "sgp-cwa": Algorithm(
        lambda schedule, options: gx.sgp(schedule, "combine-while-adapting", wire=options.codec),
        "one_peer_exponential",
    ),
    "osgp": Algorithm(_build_osgp, "one_peer_exponential", overlaps=True),
    "biased-osgp": Algorithm(
        lambda schedule, options: _build_osgp(schedule, options, biased=True),
        "one_peer_exponential",
        overlaps=True,
    ),
    "dpsgd": Algorithm(lambda schedule, options: gx.dpsgd(schedule, wire=options.codec), "ring"),
    "dpsgd-adapt-then-combine": Algorithm(
        lambda schedule, options: gx.dpsgd(schedule, "adapt-then-combine", wire=options.codec),
        "ring",
    ),
    "choco": Algorithm(_build_choco, "ring", wires=tuple(FORMS)),
    "adpsgd": Algorithm(_build_adpsgd, "bipartite_exponential", accumulates=False),
    "rand-psgd": Algorithm(
        lambda schedule, options: gx.dpsgd(schedule, wire=options.codec),
        "random_ring",
        fixed_topology=True,
    ),
    "d1d-psgd": Algorithm(  # gx.d1d_psgd, but for the local steps that may lie between rounds
        lambda schedule, options: gx.adpsgd(schedule, 1, wire=options.codec),
        "complete",
        fixed_topology=True,
        accumulates=False,
    ),
    "easgd": Algorithm(
        lambda schedule, options: gx.easgd(
            ELASTICITY / schedule.size, options.local_steps * options.accumulate
        ),
        "center",
        fixed_topology=True,
        wires=("float32",),
    ),
    "gradient-tracking": Algorithm(
        lambda schedule, options: gx.gradient_tracking(schedule, wire=options.codec),
        "ring",
    ),
    "d2": Algorithm(
        lambda schedule, options: gx.d2(schedule, wire=options.codec),
        "lazy_ring",
        skips_steps=False,
    ),
    "relay": Algorithm(_build_relay, "chain", wires=("float32",), skips_steps=False),
    "allreduce": Algorithm(
        lambda schedule, options: gx.allreduce(wire=options.codec),
        "complete",
        fixed_topology=True,
        wires=tuple(FORMS),
        goes_first=True,
    ),
    "local": Algorithm(  # Local SGD, DiLoCo: with --outer-every
        lambda schedule, options: optax.with_extra_args_support(optax.identity()),
        "none",
        fixed_topology=True,
        wires=("float32",),
        exchanges=False,
    ),
}


# That of EASGD cannot be chosen: its center exchanges with all nodes at once.
FIXED_TOPOLOGIES = TOPOLOGIES | dict.fromkeys(("center", "none"), TOPOLOGIES["complete"])


def spell_name(name: str, overlap: int | str = "N") -> str:
    """Returns the name of a row of `ALGORITHMS` as it is given to a program.

    >>> spell_name("biased-osgp", 1), spell_name("sgp")
    ('biased-1-osgp', 'sgp')
    """
    if not ALGORITHMS[name].overlaps:
        return name
    *first, last = name.split("-")
    return "-".join([*first, f"{overlap}-{last}"])


class ParsedName(NamedTuple):
    """An algorithm's name in parts.

    Attributes:
      row: its key in `ALGORITHMS`.
      overlap: the number in the name; 0 without one.
      topology: what follows `@`; None without it.
    """

    row: str
    overlap: int
    topology: str | None


def parse_name(name: str) -> ParsedName:
    """Takes `ALGORITHM` or `ALGORITHM@TOPOLOGY` apart.

    Raises:
      ValueError: for an unknown algorithm, or a topology for one whose topology is fixed.

    >>> parse_name("2-osgp@ring")
    ParsedName(row='osgp', overlap=2, topology='ring')
    """
    algorithm, at, topology = name.partition("@")
    number = re.fullmatch(r"(?P<first>(?:.*-)?)(?P<overlap>[0-9]+)-(?P<last>[^-]+)", algorithm)
    row = number["first"] + number["last"] if number else algorithm
    if row not in ALGORITHMS or ALGORITHMS[row].overlaps != bool(number):
        raise ValueError(
            f"no algorithm is named {algorithm!r}: it must be one of "
            f"{', '.join(map(spell_name, ALGORITHMS))} (N is a number of steps, as in 1-osgp)."
        )
    if at and ALGORITHMS[row].fixed_topology:
        raise ValueError(
            f"the topology of {algorithm} must be {ALGORITHMS[row].topology}, got {name!r}: drop "
            "@ and what follows it."
        )
    return ParsedName(row, int(number["overlap"]) if number else 0, topology if at else None)


@dataclasses.dataclass(frozen=True)
class Method:
    """One algorithm on one topology, around an optimizer.

    Attributes:
      algorithm: its name, without the topology.
      topology: its name.
      schedule: the rounds in the order in which they are used; under overlap, one every `overlap`
        steps.
      inner: what comes before the gossip.
      gossip: goes last.
      outer: an outer optimizer around both, counted in steps.
    """

    algorithm: str
    topology: str
    schedule: gx.Schedule
    inner: Transform
    gossip: Transform
    outer: OuterOptions | None = None

    @property
    def transform(self) -> Transform:
        """The whole chain; its state, or the one inside, is the pair of its parts' states."""
        chain = optax.chain(self.inner, self.gossip)
        outer = self.outer
        if outer is None:
            return chain
        optimizer = optax.sgd(outer.rate, outer.momentum or None, outer.nesterov)
        return gx.outer(chain, optimizer, outer.every, outer.average)

    def inner_updates(self, grads: Any, opt_state: Any, params: Any) -> optax.Updates:
        """Returns the updates that arrive at the gossip, given the state of the whole chain."""
        chain_state = opt_state if self.outer is None else opt_state.inner
        updates, _ = self.inner.update(grads, chain_state[0], params)
        return updates

    def state(self, params: Any = None) -> gx.GossipState | None:
        """Returns the gossip state of one node, of shapes and static data; None without gossip.

        Args:
          params: `[...]`, arrays or their shapes; one value if not given.
        """
        return gx.gossip_state(self._init_shapes(params))

    def canonical_steps(self) -> list[int]:
        """Returns the steps that need different programs; see `gx.canonical_steps`."""
        return gx.canonical_steps(self._init_shapes())

    def _init_shapes(self, params: Any = None) -> Any:
        if params is None:
            params = jax.ShapeDtypeStruct((1,), jnp.float32)
        return jax.eval_shape(self.transform.init, params)


def make_method(
    name: str,
    options: MethodOptions,
    optimizer: optax.GradientTransformation,
    default_topology: str | None = None,
) -> Method:
    """Returns the named algorithm on its topology, around `optimizer`.

    Args:
      name: `ALGORITHM` or `ALGORITHM@TOPOLOGY`; a topology is a name or a hybrid, `FIRST/THEN`,
        as AR/1P-SGP is `sgp@complete/one_peer_exponential`.
      options: those of the run; `overlap` is taken from the name.
      optimizer: the local one.
      default_topology: used if the name has none; None is that of the algorithm's paper.

    Raises:
      ValueError: for an unknown name, a topology that is impossible for this number of nodes or
        this algorithm, a form of messages that the algorithm does not have, or an outer optimizer
        around an algorithm that it cannot stand around.

    >>> make_method("dpsgd", MethodOptions(nodes=4), optax.sgd(0.1)).topology
    'ring'
    """
    parsed = parse_name(name)
    algorithm = ALGORITHMS[parsed.row]
    options = dataclasses.replace(options, overlap=parsed.overlap)
    if options.wire not in algorithm.wires:
        raise ValueError(
            f"the wire of {parsed.row} must be {' or '.join(algorithm.wires)}, got "
            f"{options.wire}: leave out the algorithm or the option."
        )
    if options.accumulate > 1 and not algorithm.accumulates:
        raise ValueError(
            f"gradients of {parsed.row} are of older models, counted in steps: --accumulate must "
            f"be 1, got {options.accumulate}: leave out the algorithm or the option."
        )
    if options.local_steps * options.accumulate > 1 and not algorithm.skips_steps:
        raise ValueError(
            f"{parsed.row} must exchange at every step: --local-steps and --accumulate must be 1, "
            f"got {options.local_steps} and {options.accumulate}: leave out the algorithm or the "
            "options."
        )
    topology = _choose_topology(algorithm, parsed.topology, default_topology)
    if algorithm.fixed_topology:
        schedule = FIXED_TOPOLOGIES[topology](options.nodes, MAX_ROUNDS, options.seed)
    else:
        schedule = _make_rounds(topology, options)
    if not algorithm.goes_first:
        schedule = _space_out(schedule, algorithm, options)
    transform = algorithm.build(schedule, options)
    inner = optimizer
    if algorithm.goes_first:
        inner = optax.chain(transform, optimizer)
        transform = optax.with_extra_args_support(optax.identity())
    inner = optax.with_extra_args_support(accumulate_gradients(inner, options.accumulate))
    outer = options.outer
    if outer is not None:
        outer = dataclasses.replace(outer, every=outer.every * options.accumulate)
    method = Method(name.partition("@")[0], topology, schedule, inner, transform, outer)
    if outer is not None:
        method.state()  # raises where no outer optimizer can stand around this algorithm
    return method


def _space_out(schedule: gx.Schedule, algorithm: Algorithm, options: MethodOptions) -> gx.Schedule:
    """The rounds with those of no exchange between them, where there are several steps for each.

    An exchange comes at the last of the steps that make an update, but under overlap, where it is
    counted in steps: there a message leaves with the first step after an update.
    """
    if algorithm.overlaps:
        return schedule.every(options.local_steps)
    accumulate = options.accumulate
    return schedule.every(options.local_steps * accumulate, phase=accumulate - 1)


def _choose_topology(algorithm: Algorithm, given: str | None, default: str | None) -> str:
    if given is not None:
        return given
    if algorithm.fixed_topology or default is None:
        return algorithm.topology
    return default


def _make_rounds(topology: str, options: MethodOptions) -> gx.Schedule:
    """The rounds of a topology, or of two one after the other: `FIRST/THEN`."""
    names = topology.split("/")
    schedules = [make_schedule(name, options.nodes, seed=options.seed) for name in names]
    if len(schedules) == 1:
        return schedules[0]
    if len(schedules) > 2:
        raise ValueError(f"a hybrid must have two topologies, FIRST/THEN, got {topology!r}.")
    if names[0] == names[1]:
        raise ValueError(
            f"a hybrid must have two different topologies, FIRST/THEN, got {topology!r}: give one."
        )
    # The switch points of a piecewise schedule count rounds.
    steps_per_round = options.local_steps * max(1, options.overlap) * options.accumulate
    switch = max(1, round(options.switch_at * options.steps / steps_per_round))
    if switch * steps_per_round >= options.steps:
        raise ValueError(
            f"{topology} would never switch: {options.steps} steps are too few at "
            f"{steps_per_round} steps per round. Train longer, or lower --switch-at."
        )
    return gx.topology.piecewise({0: schedules[0], switch: schedules[1]})


ALGORITHM_HELP = (
    f"One or several, NAME or NAME@TOPOLOGY: {', '.join(map(spell_name, ALGORITHMS))}. N is a "
    "number of steps, as in 1-osgp. The asynchrony of adpsgd is simulated."
)
TOPOLOGY_HELP = (
    f"The topology of algorithms given without one: {', '.join(TOPOLOGIES)}, or FIRST/THEN; if "
    "not given, that of each algorithm's paper. It is fixed for "
    f"{', '.join(name for name, row in ALGORITHMS.items() if row.fixed_topology)}."
)
_FLOAT32_ONLY = [name for name, row in ALGORITHMS.items() if row.wires == ("float32",)]
_SPARSE = [name for name, row in ALGORITHMS.items() if set(row.wires) > set(DENSE)]
WIRE_HELP = (
    f"The form of messages. Only float32: {', '.join(_FLOAT32_ONLY)}. top_k and random_k, which "
    f"send {SPARSE_FRACTION:.0%} of the values: {', '.join(_SPARSE)}."
)
