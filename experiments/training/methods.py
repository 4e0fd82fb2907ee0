"""The algorithms that options name, and how a method is made from a name."""

import dataclasses
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax

import gossipjax as gx
from experiments.training.delays import measure_delays
from experiments.training.forms import CODECS, DENSE, FORMS, RANK, SPARSE_FRACTION, WireName
from experiments.training.outer import OuterOptions
from experiments.training.topologies import MAX_ROUNDS, TOPOLOGIES, make_schedule

Transform = optax.GradientTransformationExtraArgs

Momentum = Literal["local", "quasi-global"]


class Sharding(NamedTuple):
    """How a model is sharded inside a node."""

    params: Any  # shapes of the parameters
    specs: Any  # `PartitionSpec`s of the parameters
    devices: int  # devices of a node


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """The options of a run on which an algorithm may depend."""

    nodes: int
    steps: int = 1  # of the run; a hybrid topology switches after the fraction `switch_at` of them
    seed: int = 0  # seed of random topologies and delays
    local_steps: int = 1  # updates from one exchange to the next
    wire: WireName = "float32"
    staleness: float = 1.0  # the mean delay of AD-PSGD's gradients, in steps
    delays_of: Path | None = None  # folder of journals from which AD-PSGD takes delays instead
    switch_at: float = 1 / 3
    overlap: int = 0  # updates between sending a message and using it; part of the name
    outer: OuterOptions | None = None
    momentum: Momentum = "local"
    rate: optax.ScalarOrSchedule = 0.1  # for an algorithm that replaces SGD
    sharding: Sharding | None = None  # None if each device of a node has the whole model

    @property
    def form(self) -> gx.wire.Codec | gx.wire.LowRank | None:
        """The `wire` of a transform. For float32 it is None, which means the parameters' type."""
        return FORMS[self.wire].wire

    @property
    def mixes_momentum(self) -> bool:
        """Whether momentum is mixed with the models, by a transform that replaces SGD."""
        return self.momentum == "quasi-global"


MOMENTUM = 0.9  # momentum of SGD
AVERAGED = ", which needs averages over all nodes, as of allreduce or --outer-every"
MAX_DELAY = 4  # largest delay of AD-PSGD in steps
ELASTICITY = 0.9  # of EASGD, divided by the number of nodes, as in its paper


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A row of `ALGORITHMS`."""

    # Makes the transform for a schedule that includes `local_steps`.
    build: Callable[[gx.Schedule, MethodOptions], Transform]
    topology: str  # the topology of the algorithm's paper
    fixed_topology: bool = False  # the algorithm runs on no other topology
    wires: tuple[WireName, ...] = DENSE  # the forms in which its messages can travel
    overlaps: bool = False  # the name contains a number of steps: `2-osgp`
    goes_first: bool = False  # first in the chain, because it acts on the gradients
    skips_steps: bool = True  # there can be steps without exchange
    exchanges: bool = True
    takes_outer: bool = True  # it keeps nothing but models, which an outer step reaches
    mixes_after: bool = False  # it is `x <- P (x + u)`: momentum can be mixed with the models


def _build_osgp(schedule: gx.Schedule, options: MethodOptions, biased: bool = False) -> Transform:
    return gx.osgp(schedule, options.overlap, biased=biased, wire=options.form)


def _build_adpsgd(schedule: gx.Schedule, options: MethodOptions) -> Transform:
    if options.delays_of is None:
        delays = gx.random_delays(
            schedule.size,
            MAX_ROUNDS,
            options.seed,
            mean_delay=options.staleness,
            max_delay=MAX_DELAY,
        )
    else:
        delays = _read_delays(options.delays_of)
    return gx.adpsgd(schedule, delays, wire=options.form)


def _read_delays(folder: Path) -> np.ndarray:
    """Returns the delays `[T, N]` that were measured in a run of asynchronous nodes."""
    journals = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    if not journals:
        raise ValueError(
            f"--delays-of must be a folder of journals, OUT/nodes/RUN/journals/JOB, got {folder}."
        )
    return measure_delays(journals)


def _build_relay(schedule: gx.Schedule, options: MethodOptions) -> Transform:
    """RelaySGD on the graph of the schedule, which must be a tree."""
    matrix = schedule.matrices()[0]
    return gx.contrib.relay(networkx.from_numpy_array(matrix - np.diag(np.diag(matrix))))


ALGORITHMS = {
    "sgp": Algorithm(
        lambda schedule, options: gx.sgp(schedule, wire=options.form),
        "one_peer_exponential",
        mixes_after=True,
    ),
    "sgp-cwa": Algorithm(
        lambda schedule, options: gx.sgp(
            schedule, order="combine-while-adapting", wire=options.form
        ),
        "one_peer_exponential",
    ),
    "osgp": Algorithm(_build_osgp, "one_peer_exponential", overlaps=True),
    "biased-osgp": Algorithm(
        lambda schedule, options: _build_osgp(schedule, options, biased=True),
        "one_peer_exponential",
        overlaps=True,
    ),
    "dpsgd": Algorithm(lambda schedule, options: gx.dpsgd(schedule, wire=options.form), "ring"),
    "dpsgd-adapt-then-combine": Algorithm(
        lambda schedule, options: gx.dpsgd(schedule, order="adapt-then-combine", wire=options.form),
        "ring",
        mixes_after=True,
    ),
    "choco": Algorithm(
        lambda schedule, options: gx.choco(
            schedule, options.form or gx.wire.float32(), FORMS[options.wire].gamma
        ),
        "ring",
        wires=CODECS,
        takes_outer=False,
    ),
    "adpsgd": Algorithm(_build_adpsgd, "bipartite_exponential", takes_outer=False),
    "rand-psgd": Algorithm(
        lambda schedule, options: gx.dpsgd(schedule, wire=options.form),
        "random_ring",
        fixed_topology=True,
    ),
    "d1d-psgd": Algorithm(  # gx.d1d_psgd, but for the local steps that may lie between rounds
        lambda schedule, options: gx.adpsgd(schedule, 1, wire=options.form),
        "complete",
        fixed_topology=True,
    ),
    "easgd": Algorithm(
        lambda schedule, options: gx.easgd(ELASTICITY / schedule.size, options.local_steps),
        "center",
        fixed_topology=True,
        wires=("float32",),
        takes_outer=False,
    ),
    "gradient-tracking": Algorithm(
        lambda schedule, options: gx.gradient_tracking(schedule, wire=options.form),
        "ring",
        takes_outer=False,
    ),
    "d2": Algorithm(
        lambda schedule, options: gx.contrib.d2(schedule),
        "lazy_ring",
        wires=("float32",),
        skips_steps=False,
        takes_outer=False,
    ),
    "relay": Algorithm(
        _build_relay, "chain", wires=("float32",), skips_steps=False, takes_outer=False
    ),
    "allreduce": Algorithm(
        lambda schedule, options: gx.allreduce(wire=options.form),
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


OWN_TOPOLOGY = "ring"  # default topology of an algorithm MODULE:FUNCTION


def find_algorithm(name: str) -> Algorithm:
    """Returns a row of `ALGORITHMS`, or makes the row of a user's algorithm `MODULE:FUNCTION`.

    The function gets a schedule that includes local steps, and returns a transform like those of
    `gx.gossip`.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    return Algorithm(
        functools.partial(_build_own, name, import_function(name, "--algorithm")),
        OWN_TOPOLOGY,
        wires=("float32",),
        takes_outer=False,
    )


def import_function(name: str, option: str) -> Callable[[Any], Any]:
    """Imports a user's function `MODULE:FUNCTION` from the current folder or `sys.path`."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), attribute, None)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"the module of {option} {name or '(none)'} must be one that can be imported, got "
            f"{error}: give MODULE:FUNCTION, and start the program in the folder of MODULE.py, or "
            "add that folder to PYTHONPATH."
        ) from error
    if not callable(function):
        raise ValueError(
            f"{attribute or 'the function'} of {option} {name} must be a function in "
            f"{module_name}, got {type(function).__name__}."
        )
    return function


def find_source(name: str, option: str) -> Path:
    """Returns the file of the module of a user's `MODULE:FUNCTION`."""
    import_function(name, option)
    return Path(inspect.getfile(sys.modules[name.partition(":")[0]]))


def _build_own(
    name: str,
    function: Callable[[gx.Schedule], Any],
    schedule: gx.Schedule,
    options: MethodOptions,
) -> Transform:
    """Returns the transform of a user's algorithm, which must exchange over these nodes."""
    transform = function(schedule)
    if not isinstance(transform, optax.GradientTransformation):
        raise ValueError(
            f"{name} must return an optax.GradientTransformation, got {type(transform).__name__}: "
            "gx.gossip(schedule, combine) makes one."
        )
    transform = optax.with_extra_args_support(transform)

    def update(params: Any) -> Any:
        return transform.update(params, transform.init(params), params, step=0)

    # Trace over all nodes by shapes, so that an error comes here and not after data are loaded.
    params = [jax.ShapeDtypeStruct((schedule.size, 1), jnp.float32)]
    _, state = jax.eval_shape(jax.vmap(update, axis_name="nodes"), params)
    if gx.gossip_state(state) is None:
        raise ValueError(
            f"{name} must exchange by gossip that its state shows, got a transform without: make "
            "it by gx.gossip(schedule, combine), which knows the rounds; gx.mix alone does not."
        )
    return transform


# That of EASGD cannot be chosen: its center exchanges with all nodes at once.
FIXED_TOPOLOGIES = TOPOLOGIES | dict.fromkeys(("center", "none"), TOPOLOGIES["complete"])


def spell_name(name: str, overlap: int | str = "N") -> str:
    """Returns the name of a row of `ALGORITHMS` as a command line spells it.

    >>> spell_name("biased-osgp", 1), spell_name("sgp")
    ('biased-1-osgp', 'sgp')
    """
    if not ALGORITHMS[name].overlaps:
        return name
    *first, last = name.split("-")
    return "-".join([*first, f"{overlap}-{last}"])


class ParsedName(NamedTuple):
    """The parts of an algorithm's name."""

    row: str  # key in `ALGORITHMS`, or MODULE:FUNCTION
    overlap: int  # the number in the name; 0 without one
    topology: str | None  # what follows `@`; None without it


def parse_name(name: str) -> ParsedName:
    """Splits `ALGORITHM` or `ALGORITHM@TOPOLOGY` into its parts.

    >>> parse_name("2-osgp@ring")
    ParsedName(row='osgp', overlap=2, topology='ring')
    """
    algorithm, at, topology = name.partition("@")
    number = re.fullmatch(r"(?P<first>(?:[^:]*-)?)(?P<overlap>[0-9]+)-(?P<last>[^-:]+)", algorithm)
    row = number["first"] + number["last"] if number else algorithm
    is_own = re.fullmatch(r"[\w.]+:\w+", algorithm)
    if not is_own and (row not in ALGORITHMS or ALGORITHMS[row].overlaps != bool(number)):
        raise ValueError(
            f"no algorithm is named {algorithm!r}: it must be one of "
            f"{', '.join(map(spell_name, ALGORITHMS))} (N is a number of steps, as in 1-osgp), or "
            "MODULE:FUNCTION, one of your own."
        )
    found = find_algorithm(row)
    if at and found.fixed_topology:
        raise ValueError(
            f"the topology of {algorithm} must be {found.topology}, got {name!r}: drop @ and what "
            "follows it."
        )
    return ParsedName(row, int(number["overlap"]) if number else 0, topology if at else None)


ALGORITHM_HELP = (
    f"One or several, NAME or NAME@TOPOLOGY: {', '.join(map(spell_name, ALGORITHMS))}. N is a "
    "number of steps, as in 1-osgp. The asynchrony of adpsgd is simulated. MODULE:FUNCTION is one "
    "of your own: a function (schedule) -> transform in a module of the current folder."
)
TOPOLOGY_HELP = (
    f"The topology of algorithms named without one: {', '.join(TOPOLOGIES)}, or FIRST/THEN. By "
    "default each algorithm has the topology of its paper. You cannot choose one for "
    f"{', '.join(name for name, row in ALGORITHMS.items() if row.fixed_topology)}."
)
_FLOAT32_ONLY = [name for name, row in ALGORITHMS.items() if row.wires == ("float32",)]
_SPARSE = [name for name, row in ALGORITHMS.items() if set(row.wires) > set(DENSE)]
WIRE_HELP = (
    f"The form of messages. {', '.join(_FLOAT32_ONLY)} send float32 only. {', '.join(_SPARSE)} may "
    f"also send top_k or random_k, {SPARSE_FRACTION:.0%} of the values, or block_top_k, 1.6% of "
    f"the values in 14 bits each. allreduce may also average low_rank, factors of rank {RANK} "
    "(PowerSGD)."
)
OUTER_NAMES = ", ".join(spell_name(name) for name, row in ALGORITHMS.items() if row.takes_outer)
MOMENTUM_HELP = (
    "What --optimizer nesterov takes its momentum from. local: the gradients of each node. "
    "quasi-global: the changes of the mixed models. It needs a doubly stochastic topology and one "
    f"of {', '.join(name for name, row in ALGORITHMS.items() if row.mixes_after)}."
)


@dataclasses.dataclass(frozen=True)
class Method:
    """An algorithm on a topology, with an optimizer."""

    algorithm: str  # name of the algorithm without the topology
    topology: str  # name of the topology
    schedule: gx.Schedule  # in the order in which updates use it; under overlap, every `overlap`
    inner: Transform  # what comes before the gossip
    gossip: Transform  # the last transform of the chain
    outer: OuterOptions | None = None  # goes around `inner` and `gossip`
    rate: optax.ScalarOrSchedule | None = None  # for a gossip that is also the optimizer
    sharding: Sharding | None = None  # inside a node; what exchanges exchanges parts then
    outer_average: Any = "exact"  # argument `average` of `gx.outer`

    @property
    def transform(self) -> Transform:
        """The whole chain. Its state (or the state inside) is the pair of its parts' states."""
        chain = optax.chain(self.inner, self.gossip)
        outer = self.outer
        if outer is None:
            return chain
        whole = outer.wrap(chain, self.outer_average)
        return whole if self.sharding is None else gx.sharded(whole, self.sharding.specs)

    @property
    def spectral_gap(self) -> float | None:
        """The gap of the schedule per step; None if it says nothing of the method, or is unknown.

        It is unknown where two topologies follow one another.
        """
        if self.topology in ("center", "none") or "/" in self.topology:
            return None
        return gx.topology.spectral_gap(self.schedule, per_round=True)

    def local_updates(self, grads: Any, opt_state: Any, params: Any) -> optax.Updates:
        """Returns the update of this node before the exchange, from the state of the chain."""
        # The states of wrappers hold the chain's, whose first part is the optimizer's.
        chain_state = opt_state
        if self.sharding is not None and self.outer is not None:
            chain_state = chain_state.inner
        if self.outer is not None:
            chain_state = chain_state.inner
        updates, _ = self.inner.update(grads, chain_state[0], params)
        if self.rate is None:
            return updates
        state = gx.gossip_state(opt_state)
        assert state is not None
        rate = jnp.asarray(self.rate(state.count) if callable(self.rate) else self.rate)

        def step(g: jax.Array, m: jax.Array) -> jax.Array:
            return -rate * (g + MOMENTUM * (MOMENTUM * m + g))  # Nesterov's momentum

        return jax.tree.map(step, updates, state.extra["momentum"].value)

    def state(self, params: Any = None) -> gx.GossipState | None:
        """Returns the gossip state of one node (shapes and static data), or None without gossip.

        `params` are arrays `[...]` or their shapes, by default the sharded model's parameters, or a
        few leaves of one value.
        """
        return gx.gossip_state(self._init_shapes(params))

    def canonical_steps(self) -> list[int]:
        """Returns the steps that need different programs; see `gx.canonical_steps`."""
        return gx.canonical_steps(self._init_shapes())

    def _init_shapes(self, params: Any = None) -> Any:
        if params is None and self.sharding is not None:
            params = self.sharding.params
        if params is None:  # a leaf for every fragment
            leaves = 1 if self.outer is None else self.outer.outer_fragments
            params = [jax.ShapeDtypeStruct((1,), jnp.float32)] * leaves
        return jax.eval_shape(self.transform.init, params)


def make_method(
    name: str,
    options: MethodOptions,
    optimizer: optax.GradientTransformation,
    default_topology: str | None = None,
) -> Method:
    """Makes the named algorithm on its topology, with `optimizer`.

    The name is `ALGORITHM` or `ALGORITHM@TOPOLOGY`. A topology is a name or a hybrid `FIRST/THEN`:
    AR/1P-SGP is `sgp@complete/one_peer_exponential`. A name without a topology gets
    `default_topology`, or the topology of the algorithm's paper. `overlap` is taken from the name.
    `optimizer` is the local optimizer, or with quasi-global momentum the transform before it.

    >>> make_method("dpsgd", MethodOptions(nodes=4), optax.sgd(0.1)).topology
    'ring'
    """
    parsed = parse_name(name)
    algorithm = find_algorithm(parsed.row)
    options = dataclasses.replace(options, overlap=parsed.overlap)
    _require_fitting(parsed.row, options)
    topology = parsed.topology or default_topology or algorithm.topology
    if algorithm.fixed_topology:
        topology = algorithm.topology
        schedule = FIXED_TOPOLOGIES[topology](options.nodes, MAX_ROUNDS, options.seed)
    else:
        schedule = _make_rounds(topology, options)
    if not algorithm.goes_first:
        schedule = schedule.every(options.local_steps)  # rounds without exchange in between
    if options.mixes_momentum:  # instead of both the optimizer and the algorithm
        transform = gx.quasi_global(
            schedule, options.rate, momentum=MOMENTUM, nesterov=True, wire=options.form
        )
    else:
        transform = algorithm.build(schedule, options)
    if options.sharding is not None and algorithm.exchanges:
        transform = gx.sharded(transform, options.sharding.specs)
    inner = optimizer
    if algorithm.goes_first:  # gradients are averaged before the optimizer sees them
        inner = optax.chain(transform, optimizer)
        transform = optax.with_extra_args_support(optax.identity())
    outer = options.outer
    method = Method(
        algorithm=name.partition("@")[0],
        topology=topology,
        schedule=schedule,
        inner=optax.with_extra_args_support(inner),
        gossip=transform,
        outer=outer,
        rate=options.rate if options.mixes_momentum else None,
        sharding=options.sharding,
        outer_average=outer and outer.make_average(options.nodes, options.seed),
    )
    if outer is not None:
        method.state()  # raises if they cannot go around this algorithm or optimizer
    return method


def _require_fitting(name: str, options: MethodOptions) -> None:
    """Raises `ValueError` unless the algorithm in this row supports these options."""
    algorithm = find_algorithm(name)
    local_steps = options.local_steps
    mixing = " or ".join(row for row, other in ALGORITHMS.items() if other.mixes_after)
    way_out = "leave out the algorithm or the option."
    refusals = (
        (
            options.wire not in algorithm.wires,
            f"the wire of {name} must be {' or '.join(algorithm.wires)}, got {options.wire}"
            f"{AVERAGED * (options.wire == 'low_rank')}: {way_out}",
        ),
        (
            local_steps > 1 and not algorithm.exchanges,
            f"--local-steps must be 1 with {name}, which exchanges nothing by itself, got "
            f"{local_steps}: give --outer-every {local_steps} instead.",
        ),
        (
            options.mixes_momentum and not algorithm.mixes_after,
            f"the algorithm of --momentum {options.momentum} must be {mixing}, which mix models "
            f"after a local step, got {name}: {way_out}",
        ),
        (
            local_steps > 1 and not algorithm.skips_steps,
            f"{name} must exchange at every update: --local-steps must be 1, got {local_steps}: "
            f"{way_out}",
        ),
        (
            local_steps > 1 and options.mixes_momentum,
            f"--momentum {options.momentum} must exchange at every update: --local-steps must be "
            f"1, got {local_steps}.",
        ),
        (
            options.outer is not None and not algorithm.takes_outer,
            "the algorithm of --outer-every must be one of "
            f"{OUTER_NAMES}, got {name}, which keeps more than models: {way_out}",
        ),
        (
            options.outer is not None and options.mixes_momentum,
            "--momentum must be local with --outer-every, got "
            f"{options.momentum}: leave one of them out.",
        ),
    )
    for is_met, message in refusals:
        if is_met:
            raise ValueError(message)


def _make_rounds(topology: str, options: MethodOptions) -> gx.Schedule:
    """Makes the rounds of a topology, or of two topologies in turn (`FIRST/THEN`)."""
    names = topology.split("/")
    schedules = [make_schedule(name, options.nodes, seed=options.seed) for name in names]
    if len(schedules) == 1:
        return schedules[0]
    if len(schedules) > 2 or names[0] == names[1]:
        raise ValueError(
            f"a hybrid must have two different topologies, FIRST/THEN, got {topology!r}."
        )
    # The switch points of a piecewise schedule count rounds.
    steps_per_round = options.local_steps * max(1, options.overlap)
    switch = max(1, round(options.switch_at * options.steps / steps_per_round))
    if switch * steps_per_round >= options.steps:
        raise ValueError(
            f"a run must have steps for both of {topology}, got {options.steps}, of which a round "
            f"takes {steps_per_round}: it would never switch. Train longer, or lower --switch-at."
        )
    return gx.topology.piecewise({0: schedules[0], switch: schedules[1]})
