"""The methods that a plan compares: what each exchanges, and how fast it averages."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.training.forms import FORMS, WireName
from experiments.training.methods import ELASTICITY, MethodOptions, make_method
from experiments.training.outer import OuterOptions
from gossipjax.cost_model import Exchange, Method, from_transform

Kind = Literal["ring", "tree"]
Wire = Literal["float32", "bfloat16", "int8", "int4"]

MAX_DENSE_NODES = 256  # of schedules whose spectrum needs dense matrices, which take seconds beyond
MAX_STEPS = 2**20
AVERAGED = 0.1  # of the differences between nodes, that are left when they count as averaged
LOCAL_STEPS = 12  # of Local SGD in the SlowMo paper
SLOWMO_STEPS = 48  # of SlowMo around SGP in the same paper
EXACT_STEPS = 48  # of Gossip-PGA
PAIR_STEPS = 50  # of outer steps over gossip, as of NoLoCo in its paper
FRAGMENTS = 4  # of Streaming DiLoCo
LEAVES = [jax.ShapeDtypeStruct((1,), jnp.float32)] * FRAGMENTS
# Factors of rank 4 are 1.6 % of such a matrix, and 1.5 % of ResNet-50.
MATRIX = [jax.ShapeDtypeStruct((512, 512), jnp.float32)]
BUCKETS = 8
RANDOM_ROUNDS = 16
TWO_PEERS = "sgp-cwa@two_peer_exponential"
PAIRED = "dpsgd@bipartite_exponential"
TRACKING = "gradient-tracking@one_peer_exponential"
GOSSIPS = ("sgp", "sgp-cwa", "1-osgp", "2-osgp", TRACKING, "dpsgd@ring")


class Candidate(NamedTuple):
    """A method in the comparison."""

    name: str  # as `experiments` spell it
    method: Method  # what it exchanges
    # steps until the differences between the nodes have shrunk to a tenth, if each exchange is used
    # at once; 0 if the average is exact in every step
    mixing: float
    wire: str = "float32"  # the form of the messages
    is_here: bool = True  # whether gossipjax has it
    gradient_age: float = 0  # steps by which gradients are older than the model that they change

    @property
    def label(self) -> str:
        """The name, with the form of the messages unless it is float32."""
        return self.name if self.wire == "float32" else f"{self.name} {self.wire}"


def list_candidates(
    nodes: int, wires: Sequence[Wire], kind: Kind, outer_every: int
) -> list[Candidate]:
    """The methods for a number of nodes: those whose exchanges differ.

    Quasi-global momentum has the row of SGP. CHOCO-SGD is not compared: how fast it averages
    depends on its `gamma`.

    >>> [candidate.name for candidate in list_candidates(1, ["float32"], "ring", 100)]
    ['single']
    """
    if nodes == 1:
        return [Candidate("single", Method("single"), 0)]
    rows: list[Candidate] = []
    for wire in wires:
        reduction = kind if wire == "float32" else "ring"
        rows += _list_exact(reduction, wire, nodes, outer_every)
        rows += _list_gossip(nodes, wire, reduction)
    return [*rows, *_list_of_one_form(nodes, kind, outer_every)]


def _make(
    name: str,
    nodes: int,
    wire: WireName = "float32",
    kind: Kind | Literal["server"] = "ring",
    outer: OuterOptions | None = None,
    params: Any = LEAVES,
    **settings: Any,
) -> Method:
    """What a run of that name exchanges."""
    made = make_method(name, MethodOptions(nodes, wire=wire, outer=outer), optax.sgd(1.0))
    return from_transform(made.transform, name, kind, params=params, **settings)


def _list_exact(kind: Kind, wire: Wire, nodes: int, every: int) -> Iterator[Candidate]:
    """Exact averages: of gradients in every step, or of models now and then."""
    buckets = _make("allreduce", nodes, wire, kind, layers=BUCKETS)
    server = _make("allreduce", nodes, wire, "server")
    yield Candidate("allreduce", _make("allreduce", nodes, wire, kind), 0, wire)
    yield Candidate(f"allreduce in {BUCKETS} buckets", buckets, 0, wire, is_here=False)
    yield Candidate("centralized", server, 0, wire, is_here=False)
    for name, steps in (("local-sgd", LOCAL_STEPS), ("diloco", every)):
        method = _make("local", nodes, kind=kind, outer=OuterOptions(steps, outer_wire=wire))
        yield Candidate(f"{name}, every {steps}", method, steps, wire)


def _list_gossip(nodes: int, wire: Wire, kind: Kind) -> list[Candidate]:
    """Rounds of a schedule, in every step or, of NoLoCo, now and then."""
    is_dense = nodes <= MAX_DENSE_NODES
    is_paired = is_dense and nodes % 2 == 0
    methods = {name: _make(name, nodes, wire) for name in GOSSIPS}
    methods["async-sgp"] = _make("sgp-cwa", nodes, wire, awaits="nobody")
    outer = OuterOptions(SLOWMO_STEPS, outer_wire=wire)
    methods[f"slowmo sgp-cwa, every {SLOWMO_STEPS}"] = _make("sgp-cwa", nodes, wire, kind, outer)
    if nodes > 2:
        methods[TWO_PEERS] = _make(TWO_PEERS, nodes, wire)
    codec = FORMS[wire].wire
    assert not isinstance(codec, gx.wire.LowRank)  # which gossip does not take
    if is_dense:
        drawn = gx.topology.random_ring(nodes, RANDOM_ROUNDS, 0)
        methods["rand-psgd"] = from_transform(gx.dpsgd(drawn, wire=codec), "rand-psgd")
    if is_paired:
        methods[PAIRED] = _make(PAIRED, nodes, wire)
    if is_paired and wire == "float32":  # it sends copies in full
        # A node of gx.asynchronous whose link is busy does not average at that step.
        methods["async-adpsgd"] = _make("adpsgd", nodes, awaits="nobody")
    rows = []
    for name, method in methods.items():
        first = method.exchanges[0]
        assert first.schedule is not None
        steps = count_mixing_steps(first.schedule.every(first.every))
        rows.append(Candidate(name, method, steps, wire))
    rare = {f"outer {TRACKING}": gx.topology.one_peer_exponential(nodes)}
    if is_paired:
        rare["noloco"] = gx.topology.random_pairs(nodes, RANDOM_ROUNDS, 0)
    for name, schedule in rare.items():
        # Not by gx.outer, which takes seconds to simulate whether nodes drift apart.
        exchange = Exchange(schedule, 2, codec, every=PAIR_STEPS, phase=PAIR_STEPS - 1)
        method = Method(f"{name}, every {PAIR_STEPS}", (exchange,))
        rows.append(Candidate(method.name, method, PAIR_STEPS * count_mixing_steps(schedule), wire))
    return rows


def _list_of_one_form(nodes: int, kind: Kind, every: int) -> Iterator[Candidate]:
    """Methods of one form of messages. Async-outer also sends a momentum."""
    factors = _make("allreduce", nodes, "low_rank", params=MATRIX)
    yield Candidate("powersgd", factors, 0, "low_rank")
    late = Method("d1d-psgd", (Exchange(None, late=1, kind=kind),))
    yield Candidate("d1d-psgd", late, 0, gradient_age=1)
    elastic = math.log(AVERAGED) / math.log1p(-ELASTICITY / nodes)
    yield Candidate("easgd", _make("easgd", nodes, kind=kind), elastic)
    peer = gx.topology.one_peer_exponential(nodes)
    if nodes <= MAX_DENSE_NODES:
        exact = gx.topology.periodic(peer, EXACT_STEPS)
        pga = from_transform(gx.sgp(exact, order="combine-while-adapting"), "gossip-pga")
        yield Candidate(f"gossip-pga, every {EXACT_STEPS}", pga, count_mixing_steps(exact))
    rare = Exchange(peer, 2, every=every, phase=every - 1, is_early=True, awaits="nobody")
    method = Method(f"async-outer, every {every}", (rare,))
    yield Candidate(method.name, method, every * count_mixing_steps(peer))
    if every > FRAGMENTS:
        outer = OuterOptions(every, outer_fragments=FRAGMENTS, outer_delay=1, outer_wire="int4")
        streaming = _make("local", nodes, kind=kind, outer=outer)
        yield Candidate(f"streaming-diloco, every {every}", streaming, every, "int4")
    outer = OuterOptions(every, outer_wire="block_top_k", outer_error_feedback=1.0)
    sparse = _make("local", nodes, outer=outer)
    yield Candidate(f"sparse-loco, every {every}", sparse, every, "block_top_k")
    outer = OuterOptions(every, outer_wire="low_rank", outer_error_feedback=1.0)
    thin = _make("local", nodes, outer=outer, params=MATRIX)
    yield Candidate(f"diloco of factors, every {every}", thin, every, "low_rank")


def count_mixing_steps(schedule: gx.Schedule) -> int:
    """Steps until the differences between nodes have shrunk to a tenth, for every start.

    The smallest k with `sigma_2(P_(k-1) ... P_0) <= 0.1`, for doubly stochastic rounds.

    >>> count_mixing_steps(gx.topology.one_peer_exponential(32))
    5
    >>> count_mixing_steps(gx.topology.ring(32))
    179
    """
    steps = 1
    while gx.topology.second_singular_value(schedule, steps) > AVERAGED and steps < MAX_STEPS:
        steps *= 2
    low = steps // 2
    while steps - low > 1:
        middle = (low + steps) // 2
        if gx.topology.second_singular_value(schedule, middle) > AVERAGED:
            low = middle
        else:
            steps = middle
    return steps
