"""The algorithms that programs know by name, a row each.

A new algorithm is one row of `ALGORITHMS`; help texts, errors and benchmarks read the table.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import optax

import gossipjax as gx
from experiments.training.methods.options import (
    DENSE,
    FORMS,
    SPARSE_FRACTION,
    MethodOptions,
    Transform,
    WireName,
)
from experiments.training.methods.topologies import MAX_ROUNDS, TOPOLOGIES

MAX_DELAY = 4  # steps, of AD-PSGD
ELASTICITY = 0.9  # of EASGD, divided by the number of nodes, as in its paper


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
      skips_steps: whether there can be steps without exchange.
      exchanges: whether it exchanges anything.
      takes_outer: whether an outer optimizer can stand around it; not where it keeps more than
        models, which an outer step would not reach.
      mixes_after: whether it is `x <- P (x + u)`, so that momentum can be mixed with the models.
    """

    build: Callable[[gx.Schedule, MethodOptions], Transform]
    topology: str
    fixed_topology: bool = False
    wires: tuple[WireName, ...] = DENSE
    overlaps: bool = False
    goes_first: bool = False
    skips_steps: bool = True
    exchanges: bool = True
    takes_outer: bool = True
    mixes_after: bool = False


def _build_osgp(schedule: gx.Schedule, options: MethodOptions, biased: bool = False) -> Transform:
    return gx.osgp(schedule, options.overlap, biased, wire=options.codec)


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
        mixes_after=True,
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
        mixes_after=True,
    ),
    "choco": Algorithm(_build_choco, "ring", wires=tuple(FORMS), takes_outer=False),
    "adpsgd": Algorithm(_build_adpsgd, "bipartite_exponential", takes_outer=False),
    "rand-psgd": Algorithm(
        lambda schedule, options: gx.dpsgd(schedule, wire=options.codec),
        "random_ring",
        fixed_topology=True,
    ),
    "d1d-psgd": Algorithm(  # gx.d1d_psgd, but for the local steps that may lie between rounds
        lambda schedule, options: gx.adpsgd(schedule, 1, wire=options.codec),
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
        lambda schedule, options: gx.gradient_tracking(schedule, wire=options.codec),
        "ring",
        takes_outer=False,
    ),
    "d2": Algorithm(
        lambda schedule, options: gx.d2(schedule, wire=options.codec),
        "lazy_ring",
        skips_steps=False,
        takes_outer=False,
    ),
    "relay": Algorithm(
        _build_relay, "chain", wires=("float32",), skips_steps=False, takes_outer=False
    ),
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


MOMENTUM = 0.9
MOMENTUMS: dict[str, Callable[[gx.Schedule, MethodOptions], Transform]] = {
    "mixed": lambda schedule, options: gx.mixed_momentum(
        schedule, options.rate, MOMENTUM, nesterov=True, wire=options.codec
    ),
    "quasi-global": lambda schedule, options: gx.quasi_global(
        schedule, options.rate, MOMENTUM, nesterov=True, wire=options.codec
    ),
}
"""What takes the place of SGD with momentum and of the algorithm, by the name of its momentum."""

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
OUTER_NAMES = ", ".join(spell_name(name) for name, row in ALGORITHMS.items() if row.takes_outer)
OUTER_HELP = (
    "Updates from one outer step to the next: all nodes go on from their average, moved by an "
    f"outer optimizer. Around {OUTER_NAMES}; local with it is Local SGD, or DiLoCo, the others "
    "SlowMo."
)
MOMENTUM_HELP = (
    "What the momentum of --optimizer nesterov is of. local: of each node's gradients. mixed: "
    "neighbours average it as they average their models. quasi-global: of the mixed models. outer: "
    "of the outer optimizer, around plain SGD, with --outer-every 12 and --outer-momentum 0.7 if "
    "not given. mixed and quasi-global are for "
    f"{', '.join(name for name, row in ALGORITHMS.items() if row.mixes_after)}, where the topology "
    "is doubly stochastic."
)
