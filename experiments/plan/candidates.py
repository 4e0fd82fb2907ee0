"""The methods that a plan compares: what each exchanges, and how fast it averages."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import gossipjax as gx
from gossipjax import cost_model
from gossipjax.cost_model import Method

Kind = Literal["ring", "tree", "two-level"]
Wire = Literal["float32", "bfloat16", "int8", "int4"]

ASYNCHRONOUS_WIRES = ("float32", "bfloat16")  # of gx.asynchronous
MAX_DENSE_NODES = 256  # of schedules whose spectrum needs dense matrices, which take seconds beyond
MAX_STEPS = 2**20
AVERAGED = 0.1  # of the differences between nodes, that are left when they count as averaged
ELASTICITY = 0.9  # of EASGD, divided by the number of nodes, as in experiments.image
LOCAL_STEPS = 12  # of Local SGD in the SlowMo paper
SLOWMO_STEPS = 48  # of SlowMo around SGP in the same paper
FRAGMENTS = 4  # of Streaming DiLoCo
BUCKETS = 8
RANDOM_ROUNDS = 16
CWA = "combine-while-adapting"


class Candidate(NamedTuple):
    """A method in the comparison.

    Attributes:
      name: as `experiments` spell it.
      method: what it exchanges.
      mixing: steps until the differences between the nodes have shrunk to a tenth, if each exchange
        is used at once; 0 if the average is exact in every step.
      sigma: second singular value of the product of the first `ceil(log2 N)` steps: 0 is an exact
        average, 1 none at all.
      kept_models: models that a node keeps beside its parameters, gradients and optimizer state.
      wire: the form of the messages.
      is_here: whether gossipjax has it.
      gradient_age: steps by which gradients are older than the model that they change.
    """

    name: str
    method: Method
    mixing: float
    sigma: float
    kept_models: float
    wire: str = "float32"
    is_here: bool = True
    gradient_age: float = 0

    @property
    def label(self) -> str:
        """The name, with the form of the messages unless it is float32."""
        return self.name if self.wire == "float32" else f"{self.name} {self.wire}"


def list_candidates(
    nodes: int, wires: Sequence[Wire], kind: Kind, outer_every: int
) -> list[Candidate]:
    """The methods for a number of nodes.

    Args:
      nodes: N.
      wires: forms of the messages of gossip; all-reduces of gradients and models have float32, and
        those of Streaming DiLoCo 4 bits, as in its paper.
      kind: of all-reduces.
      outer_every: steps from one outer step of DiLoCo to the next.

    >>> [candidate.name for candidate in list_candidates(1, ["float32"], "ring", 100)]
    ['single']
    """
    if nodes == 1:
        return [Candidate("single", cost_model.single(), 0, 0.0, 0)]
    gossip = [row for wire in wires for row in _list_gossip(nodes, wire)]
    return [*_list_exact(nodes, kind), *gossip, *_list_outer(nodes, kind, outer_every)]


def _list_exact(nodes: int, kind: Kind) -> Iterator[Candidate]:
    yield Candidate("allreduce", cost_model.allreduce(kind), 0, 0.0, 0)
    buckets = cost_model.allreduce(kind, layers=BUCKETS)
    yield Candidate(f"allreduce in {BUCKETS} buckets", buckets, 0, 0.0, 0, is_here=False)
    yield Candidate("centralized", cost_model.centralized(), 0, 0.0, 0, is_here=False)
    yield Candidate("d1d-psgd", cost_model.d1d_psgd(kind), 0, 0.0, 1, gradient_age=1)
    elastic = math.log(AVERAGED) / math.log1p(-ELASTICITY / nodes)
    sigma = (1 - ELASTICITY / nodes) ** count_rounds(nodes)
    yield Candidate("easgd", cost_model.easgd(1, kind), elastic, sigma, 1)


def _list_gossip(nodes: int, wire: Wire) -> Iterator[Candidate]:
    peer = gx.topology.one_peer_exponential(nodes)
    ring = gx.topology.ring(nodes)
    is_dense_possible = nodes <= MAX_DENSE_NODES
    pairs = None
    if is_dense_possible and nodes % 2 == 0:
        pairs = gx.topology.bipartite_exponential(nodes)
    yield _rate("sgp", cost_model.sgp(peer, wire=wire), peer, 0, wire)
    yield _rate("sgp-cwa", cost_model.sgp(peer, CWA, wire), peer, 0, wire)
    if nodes > 2:
        two = gx.topology.k_peer_exponential(nodes, 2)
        name = "sgp-cwa@two_peer_exponential"
        yield _rate(name, cost_model.sgp(two, CWA, wire), two, 0, wire)
    yield _rate("1-osgp", cost_model.osgp(peer, 1, wire), peer, 1, wire)
    yield _rate("2-osgp", cost_model.osgp(peer, 2, wire), peer.every(2), 1, wire)
    yield _rate("dpsgd@ring", cost_model.dpsgd(ring, wire=wire), ring, 0, wire)
    if pairs is not None:
        name = "dpsgd@bipartite_exponential"
        yield _rate(name, cost_model.dpsgd(pairs, wire=wire), pairs, 0, wire)
    if is_dense_possible:
        drawn = gx.topology.random_ring(nodes, RANDOM_ROUNDS, 0)
        method = cost_model.rand_psgd(nodes, RANDOM_ROUNDS, wire=wire)
        yield _rate("rand-psgd", method, drawn, 0, wire)
    if wire in ASYNCHRONOUS_WIRES:
        yield _rate("async-sgp", cost_model.async_sgp(peer, wire), peer, 1, wire)
        if pairs is not None:
            yield _rate("async-adpsgd", _make_async_adpsgd(pairs, wire), pairs, 1, wire)


def _make_async_adpsgd(pairs: gx.Schedule, wire: Wire) -> Method:
    """AD-PSGD of `gx.asynchronous`: a node whose link is busy does not average at that step."""
    (exchange,) = cost_model.adpsgd(pairs, wire).exchanges
    free = dataclasses.replace(exchange, awaits="nobody")
    return Method("async-adpsgd", (free,), staleness=1)


def _list_outer(nodes: int, kind: Kind, every: int) -> Iterator[Candidate]:
    peer = gx.topology.one_peer_exponential(nodes)
    local = cost_model.local_sgd(LOCAL_STEPS, kind)
    yield Candidate(f"local-sgd, every {LOCAL_STEPS}", local, LOCAL_STEPS, 1.0, 1)
    slowmo = cost_model.slowmo(cost_model.sgp(peer, CWA), SLOWMO_STEPS, kind)
    yield _rate(f"slowmo sgp-cwa, every {SLOWMO_STEPS}", slowmo, peer, 2, "float32")
    sigma = float(count_rounds(nodes) < every)
    diloco = cost_model.diloco(every, kind)
    yield Candidate(f"diloco, every {every}", diloco, every, sigma, 2)
    if every > FRAGMENTS:
        streaming = cost_model.streaming_diloco(every, FRAGMENTS, 1, kind, "int4")
        name = f"streaming-diloco, every {every}"
        yield Candidate(name, streaming, every, sigma, 2 + 1 / FRAGMENTS, "int4")


def _rate(
    name: str, method: Method, schedule: gx.Schedule, kept_models: float, wire: Wire
) -> Candidate:
    sigma = gx.topology.second_singular_value(schedule, count_rounds(schedule.size))
    return Candidate(name, method, count_mixing_steps(schedule), sigma, kept_models, wire)


def count_rounds(nodes: int) -> int:
    """`ceil(log2 N)`: the fewest rounds of one peer that can average exactly; 1 for one node.

    >>> count_rounds(32), count_rounds(12)
    (5, 4)
    """
    return max(1, math.ceil(math.log2(nodes)))


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
