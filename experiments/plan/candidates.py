"""The methods that a plan compares: what each exchanges, and how fast it averages."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp

import gossipjax as gx
from experiments.training.forms import FORMS
from gossipjax import cost_model
from gossipjax.cost_model import Method

Kind = Literal["ring", "tree"]
Wire = Literal["float32", "bfloat16", "int8", "int4"]

MAX_DENSE_NODES = 256  # of schedules whose spectrum needs dense matrices, which take seconds beyond
MAX_STEPS = 2**20
AVERAGED = 0.1  # of the differences between nodes, that are left when they count as averaged
ELASTICITY = 0.9  # of EASGD, divided by the number of nodes, as in experiments.image
LOCAL_STEPS = 12  # of Local SGD in the SlowMo paper
SLOWMO_STEPS = 48  # of SlowMo around SGP in the same paper
EXACT_STEPS = 48  # of Gossip-PGA
PAIR_STEPS = 50  # of outer steps over gossip, as of NoLoCo in its paper
TRACKED_OUTER = "outer gradient-tracking@one_peer_exponential"
FRAGMENTS = 4  # of Streaming DiLoCo
BUCKETS = 8
RANDOM_ROUNDS = 16
CWA = "combine-while-adapting"


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


def _list_exact(kind: Kind, wire: Wire, nodes: int, every: int) -> Iterator[Candidate]:
    """Exact averages: of gradients in every step, or of models now and then."""
    buckets = cost_model.allreduce(kind, wire, BUCKETS)
    server = cost_model.centralized(wire)
    local = cost_model.diloco(LOCAL_STEPS, kind, wire)
    diloco = cost_model.diloco(every, kind, wire)
    yield Candidate("allreduce", cost_model.allreduce(kind, wire), 0, wire)
    yield Candidate(f"allreduce in {BUCKETS} buckets", buckets, 0, wire, is_here=False)
    yield Candidate("centralized", server, 0, wire, is_here=False)
    yield Candidate(f"local-sgd, every {LOCAL_STEPS}", local, LOCAL_STEPS, wire)
    yield Candidate(f"diloco, every {every}", diloco, every, wire)


def _list_gossip(nodes: int, wire: Wire, kind: Kind) -> list[Candidate]:
    """Rounds of a schedule, in every step or, of NoLoCo, now and then."""
    peer = gx.topology.one_peer_exponential(nodes)
    ring = gx.topology.ring(nodes)
    early = cost_model.sgp(peer, CWA, wire)
    state = gx.gossip_state(gx.gradient_tracking(peer, wire=FORMS[wire].codec).init(jnp.zeros(1)))
    assert state is not None
    tracking = cost_model.from_plan(state.plan, "gradient-tracking")
    slowmo = cost_model.slowmo(early, SLOWMO_STEPS, kind, wire)
    rows = [  # name, method, schedule
        ("sgp", cost_model.sgp(peer, wire=wire), peer),
        ("sgp-cwa", early, peer),
        ("1-osgp", cost_model.osgp(peer, 1, wire), peer),
        ("2-osgp", cost_model.osgp(peer, 2, wire), peer.every(2)),
        ("gradient-tracking@one_peer_exponential", tracking, peer),
        ("dpsgd@ring", cost_model.dpsgd(ring, wire=wire), ring),
        ("async-sgp", cost_model.async_sgp(peer, wire), peer),
        (f"slowmo sgp-cwa, every {SLOWMO_STEPS}", slowmo, peer),
    ]
    if nodes > 2:
        two = gx.topology.k_peer_exponential(nodes, 2)
        rows.append(("sgp-cwa@two_peer_exponential", cost_model.sgp(two, CWA, wire), two))
    mixing = PAIR_STEPS * count_mixing_steps(peer)
    tracked = cost_model.noloco(peer, PAIR_STEPS, wire)
    outer = [Candidate(f"{TRACKED_OUTER}, every {PAIR_STEPS}", tracked, mixing, wire)]
    if nodes <= MAX_DENSE_NODES:
        drawn = gx.topology.random_ring(nodes, RANDOM_ROUNDS, 0)
        rows.append(("rand-psgd", cost_model.dpsgd(drawn, wire=wire), drawn))
    if nodes <= MAX_DENSE_NODES and nodes % 2 == 0:
        pairs = gx.topology.bipartite_exponential(nodes)
        rows.append(("dpsgd@bipartite_exponential", cost_model.dpsgd(pairs, wire=wire), pairs))
        if wire == "float32":  # it sends copies in full
            # A node of gx.asynchronous whose link is busy does not average at that step.
            (exchange,) = cost_model.adpsgd(pairs).exchanges
            free = dataclasses.replace(exchange, awaits="nobody")
            rows.append(("async-adpsgd", Method("async-adpsgd", (free,), staleness=1), pairs))
        drawn = gx.topology.random_pairs(nodes, RANDOM_ROUNDS, 0)
        mixing = PAIR_STEPS * count_mixing_steps(drawn)
        method = cost_model.noloco(drawn, PAIR_STEPS, wire)
        outer.append(Candidate(f"noloco, every {PAIR_STEPS}", method, mixing, wire))
    rated = (Candidate(name, way, count_mixing_steps(rounds), wire) for name, way, rounds in rows)
    return [*rated, *outer]


def _list_of_one_form(nodes: int, kind: Kind, every: int) -> Iterator[Candidate]:
    """Methods of one form of messages."""
    average = cost_model.allreduce(kind)
    late = Method("d1d-psgd", (dataclasses.replace(average.exchanges[0], overlap=1),), staleness=1)
    yield Candidate("d1d-psgd", late, 0, gradient_age=1)
    elastic = math.log(AVERAGED) / math.log1p(-ELASTICITY / nodes)
    yield Candidate("easgd", average, elastic)
    if nodes <= MAX_DENSE_NODES:
        exact = gx.topology.periodic(gx.topology.one_peer_exponential(nodes), EXACT_STEPS)
        pga = cost_model.sgp(exact, CWA)
        yield Candidate(f"gossip-pga, every {EXACT_STEPS}", pga, count_mixing_steps(exact))
    peer = gx.topology.one_peer_exponential(nodes)
    (share,) = cost_model.async_sgp(peer).exchanges
    rare = dataclasses.replace(share, fraction=2.0, every=every, phase=every - 1)  # with momentum
    method = Method("async-outer", (rare,), staleness=1)
    mixing = every * count_mixing_steps(peer)
    yield Candidate(f"async-outer, every {every}", method, mixing)
    if every > FRAGMENTS:
        streaming = cost_model.streaming_diloco(every, FRAGMENTS, 1, kind, "int4")
        yield Candidate(f"streaming-diloco, every {every}", streaming, every, "int4")
    codec = gx.wire.block_top_k()
    sparse = cost_model.sparse_loco(every, nodes, codec)
    yield Candidate(f"sparse-loco, every {every}", sparse, every, "block_top_k")


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
