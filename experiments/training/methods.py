"""The algorithms, topologies, optimizers and learning rates that programs know by name."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import optax

import gossipjax as gx

Topology = Literal[
    "one_peer_exponential",
    "two_peer_exponential",
    "exponential",
    "bipartite_exponential",
    "complete_cycle",
    "random_peer_exponential",
    "random_peer_complete",
    "ring",
    "directed_ring",
    "random_ring",
    "torus",
    "hypercube",
    "star",
    "complete",
    "base_graph",
    "two_peer_base_graph",
]
Optimizer = Literal["sgd", "nesterov", "adam"]
RateSchedule = Literal["constant", "cosine", "goyal"]

# The algorithms that run on any topology, and the one that their papers run them on.
TOPOLOGY_OF = {
    "sgp": "one_peer_exponential",
    "N-osgp": "one_peer_exponential",
    "biased-N-osgp": "one_peer_exponential",
    "dpsgd": "ring",
    "dpsgd-adapt-then-combine": "ring",
    "adpsgd": "bipartite_exponential",
}
# Those that have a topology of their own.
OWN_TOPOLOGY = {
    "rand-psgd": "random_ring",
    "d1d-psgd": "complete",
    "easgd": "center",
    "allreduce": "complete",
}
ALGORITHMS = (*TOPOLOGY_OF, *OWN_TOPOLOGY)
FULL_WIDTH = ("easgd",)  # for which there is no narrow wire

DRAWN = 100  # distinct graphs of a random topology, and rows of a table of delays
LARGEST_DELAY = 4  # steps, of AD-PSGD
GOYAL_BATCH = 256  # examples that the reference rate is for
GOYAL_EPOCHS = 90
GOYAL_WARM_UP, GOYAL_DECAYS = 5, (30, 60, 80)


class Method(NamedTuple):
    """One algorithm on one topology, around an optimizer."""

    algorithm: str
    topology: str
    schedule: gx.Schedule  # the round of each step
    lookback: int  # rounds before it that a step depends on, too
    inner: optax.GradientTransformationExtraArgs  # what comes before the gossip
    gossip: optax.GradientTransformationExtraArgs

    @property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The whole chain; its state is the pair of its parts' states."""
        return optax.chain(self.inner, self.gossip)


class Setting(NamedTuple):
    """What the methods of a run have in common.

    Attributes:
      nodes: N.
      steps: of the run; a hybrid switches after the share `switch_at` of them.
      seed: of random topologies and delays.
      local_steps: steps from one exchange to the next.
      wire_dtype: the type in which messages travel; None for full width.
      staleness: the mean delay of AD-PSGD's gradients, in steps.
    """

    nodes: int
    steps: int = 1
    seed: int = 0
    local_steps: int = 1
    wire_dtype: Any = None
    staleness: float = 1.0
    switch_at: float = 1 / 3


def schedule(topology: str, nodes: int, rounds: int = DRAWN, seed: int = 0) -> gx.Schedule:
    """The named topology over `nodes` nodes; `rounds` and `seed` are for the random ones.

    Raises:
      ValueError: for a topology that is unknown, or impossible for so many nodes.

    >>> schedule("two_peer_exponential", 8).period
    3
    >>> schedule("torus", 12) == gx.topology.torus(3, 4)
    True
    """
    of = gx.topology
    if topology not in get_args(Topology):
        raise ValueError(
            f"no topology is named {topology!r}; known: {', '.join(get_args(Topology))}."
        )
    if topology == "two_peer_exponential" and nodes == 2:
        raise ValueError("two_peer_exponential needs two peers: 1 node, or 3 and more; given 2.")
    others: dict[str, Callable[[int], gx.Schedule]] = {
        "two_peer_exponential": lambda n: of.k_peer_exponential(n, 2),
        "random_peer_exponential": lambda n: of.random_peer(n, rounds, seed),
        "random_peer_complete": lambda n: of.random_peer(n, rounds, seed, "complete"),
        "random_ring": lambda n: of.random_ring(n, rounds, seed),
        "torus": lambda n: of.torus(*_sides(n)),
        "two_peer_base_graph": lambda n: of.base_graph(n, 2),
    }
    return (others.get(topology) or getattr(of, topology))(nodes)


def _sides(nodes: int) -> tuple[int, int]:
    """The two factors of `nodes` that are closest to each other."""
    short = max(d for d in range(1, math.isqrt(nodes) + 1) if nodes % d == 0)
    return short, nodes // short


def _rounds(names: str, setting: Setting, steps_per_round: int) -> gx.Schedule:
    """The rounds of a topology, or of several one after another: `FIRST/THEN`."""
    first, *others = [schedule(n, setting.nodes, seed=setting.seed) for n in names.split("/")]
    if not others:
        return first
    if len(others) > 1:
        raise ValueError(f"a hybrid has two topologies, FIRST/THEN; given {names!r}.")
    switch = max(1, round(setting.switch_at * setting.steps / steps_per_round))
    if switch * steps_per_round >= setting.steps:
        raise ValueError(
            f"{names} would never switch: with {steps_per_round} steps per round, {setting.steps} "
            "steps are too few. Train longer, or switch earlier."
        )
    return gx.topology.piecewise({0: first, switch: others[0]})


def split_name(name: str) -> tuple[str, str | None]:
    """`ALGORITHM@TOPOLOGY` or `ALGORITHM`, taken apart.

    Raises:
      ValueError: for an unknown algorithm, or a topology for one that has its own.

    >>> split_name("2-osgp@ring")
    ('2-osgp', 'ring')
    """
    algorithm, at, graph = name.partition("@")
    kind = _kind(algorithm)
    if kind not in ALGORITHMS:
        raise ValueError(
            f"no algorithm is named {algorithm!r}; known: {', '.join(ALGORITHMS)} (N is a number "
            "of steps, as in 1-osgp)."
        )
    if at and kind in OWN_TOPOLOGY:
        raise ValueError(f"{algorithm} has a topology of its own, {OWN_TOPOLOGY[kind]}: drop @.")
    return algorithm, graph if at else None


def _kind(algorithm: str) -> str:
    """The name in `ALGORITHMS`, with N for the number of steps; empty if that is missing."""
    return "" if "N" in algorithm else re.sub(r"[0-9]+(?=-osgp$)", "N", algorithm)


def method(
    name: str,
    setting: Setting,
    optimizer: optax.GradientTransformation,
    default_topology: str | None = None,
) -> Method:
    """The named algorithm on its topology, around `optimizer`.

    Args:
      name: `ALGORITHM` or `ALGORITHM@TOPOLOGY`; a topology is a name or a hybrid, `FIRST/THEN`,
        as AR/1P-SGP is `sgp@complete/one_peer_exponential`.
      setting: what methods have in common.
      optimizer: the local one.
      default_topology: where the name has none; else the one of the algorithm's paper.

    Raises:
      ValueError: for an unknown name, a topology that is impossible for so many nodes or for this
        algorithm, or a narrow wire where there is none.

    >>> method("dpsgd", Setting(nodes=4), optax.sgd(0.1)).topology
    'ring'
    """
    algorithm, given = split_name(name)
    nodes, k, wire = setting.nodes, setting.local_steps, setting.wire_dtype
    if algorithm in FULL_WIDTH and wire is not None:
        raise ValueError(f"{algorithm} travels in full width: leave it out, or the wire's type.")
    nothing = optax.with_extra_args_support(optax.identity())
    local = optax.with_extra_args_support(optimizer)
    if algorithm == "allreduce":
        averaged = optax.chain(gx.allreduce(wire_dtype=wire), optimizer)
        return Method(algorithm, "complete", gx.topology.complete(nodes), 0, averaged, nothing)
    if algorithm == "easgd":  # the elasticity of its paper
        everyone = gx.topology.complete(nodes).every(k)
        return Method(algorithm, "center", everyone, 0, local, gx.easgd(0.9 / nodes, k))

    kind = _kind(algorithm)
    number = re.search(r"[0-9]+(?=-osgp$)", algorithm)
    overlap = int(number[0]) if number else 0
    asked = default_topology if given is None else given
    graph = OWN_TOPOLOGY.get(kind) or (TOPOLOGY_OF[kind] if asked is None else asked)
    rounds = _rounds(graph, setting, k * max(1, overlap)).every(k)
    if number:
        gossip = gx.osgp(rounds, overlap, kind.startswith("biased"), wire_dtype=wire)
    elif algorithm == "sgp":
        gossip = gx.sgp(rounds, wire_dtype=wire)
    elif algorithm == "adpsgd":
        delays = gx.random_delays(nodes, DRAWN, setting.seed, setting.staleness, LARGEST_DELAY)
        gossip = gx.adpsgd(rounds, delays, wire_dtype=wire)
    elif algorithm == "d1d-psgd":  # what gx.d1d_psgd is; here local steps may lie between
        gossip = gx.adpsgd(rounds, 1, wire_dtype=wire)
    elif algorithm == "dpsgd-adapt-then-combine":
        gossip = gx.dpsgd(rounds, "adapt-then-combine", wire_dtype=wire)
    else:  # D-PSGD, and on random rings RAND-PSGD
        gossip = gx.dpsgd(rounds, wire_dtype=wire)
    return Method(algorithm, graph, rounds.every(max(1, overlap)), overlap, local, gossip)


def learning_rate(name: RateSchedule, rate: float, steps: int, total_batch: int) -> optax.Schedule:
    """The learning rate over steps.

    `constant`: `rate`. `cosine`: from `rate` to 0 by half a cosine. Neither is scaled by the number
    of nodes. `goyal` (Goyal et al. 2017): `rate` is for 256 examples and is scaled linearly with
    `total_batch`, all nodes together; it warms up from `rate`, or what is less, over the first 5 of
    90 epochs and falls by 10 at epochs 30, 60 and 80, all stretched to `steps`.

    >>> goyal = learning_rate("goyal", 0.1, 900, 1024)
    >>> [round(float(goyal(10 * epoch)), 4) for epoch in (0, 5, 29, 30, 60, 80)]
    [0.1, 0.4, 0.4, 0.04, 0.004, 0.0004]
    """
    if name == "constant":
        return optax.constant_schedule(rate)
    if name == "cosine":
        return optax.cosine_decay_schedule(rate, steps)
    peak = rate * total_batch / GOYAL_BATCH
    warm_up = max(1, round(steps * GOYAL_WARM_UP / GOYAL_EPOCHS))
    decays = {round(steps * epoch / GOYAL_EPOCHS) - warm_up: 0.1 for epoch in GOYAL_DECAYS}
    return optax.join_schedules(
        [
            optax.linear_schedule(min(rate, peak), peak, warm_up),
            optax.piecewise_constant_schedule(peak, decays),
        ],
        [warm_up],
    )


def optimizer(
    name: Optimizer, rate: optax.ScalarOrSchedule, weight_decay: float
) -> optax.GradientTransformation:
    """SGD, SGD with Nesterov momentum 0.9, or Adam, with weight decay.

    For SGD the decay is added to the gradient (L2), for Adam it is decoupled (AdamW). It sees the
    parameters that the user holds: for SGP the de-biased ones.
    """
    if name == "adam":
        return optax.adamw(rate, weight_decay=weight_decay)
    momentum = 0.9 if name == "nesterov" else None
    return optax.chain(
        optax.add_decayed_weights(weight_decay),
        optax.sgd(rate, momentum=momentum, nesterov=name == "nesterov"),
    )
