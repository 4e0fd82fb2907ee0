"""Methods: what each algorithm of the library exchanges, by its name. NumPy only.

Every function returns a `Method` for `predict_step` and `simulate`. Names and arguments are those
of the transforms (`gx.sgp`, `gx.osgp`, ...). `wire` is a name such as "bfloat16", a number of bits
per parameter, or a codec of `gx.wire`. `kind` is that of an all-reduce. `from_plan` makes the
method of any algorithm that has a `gx.GossipState`. Every function raises `ValueError` for what is
unknown or out of its range.

SGP-19 is Assran et al., ICML 2019, arXiv:1811.10792; DPSGD-17 Lian et al., NIPS 2017,
arXiv:1705.09056; RAND-20 Zhang et al., ICASSP 2020, arXiv:2002.01119.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from gossipjax.cost_model._require import require_choice, require_quantity
from gossipjax.cost_model.exchange import KINDS, Exchange, Kind
from gossipjax.topology import Schedule, from_graph, random_ring
from gossipjax.topology.schedule import require_int

__all__ = [
    "WIRE_BITS",
    "Method",
    "adpsgd",
    "allreduce",
    "async_outer",
    "async_sgp",
    "centralized",
    "d1d_psgd",
    "desloc",
    "diloco",
    "dpsgd",
    "easgd",
    "from_plan",
    "gradient_tracking",
    "local_sgd",
    "mixed_momentum",
    "noloco",
    "osgp",
    "push_sum_outer",
    "rand_psgd",
    "relay",
    "sgp",
    "single",
    "slowmo",
    "sparse_loco",
    "sparta",
    "streaming_diloco",
]

WIRE_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.125,  # a float32 scale for a block of 256
    "int4": 4.125,
}
"""Form of a message on the wire -> bits of a value, with its part of the scales."""
COUNTED = 2**20  # parameters of a message whose bits a codec counts
ORDERS = ("adapt-then-combine", "combine-while-adapting")


@runtime_checkable
class Codec(Protocol):
    """A codec of `gx.wire`, which this module does not import, as it needs JAX."""

    def count_bytes(self, size: int) -> int:
        """The bytes of a message of `size` float32 values."""
        ...


Form = str | float | Codec | None  # None: full precision


@dataclasses.dataclass(frozen=True)
class Method:
    """An algorithm, as what it exchanges.

    Attributes:
      name: for tables.
      exchanges: those of a step, one after another.
      staleness: steps by which what a node gets from others is older than its own model.

    Raises:
      ValueError: if the exchanges are of different numbers of nodes.

    >>> import gossipjax as gx
    >>> method = sgp(gx.topology.one_peer_exponential(8))
    >>> (method.name, len(method.exchanges), method.is_asynchronous)
    ('sgp', 1, False)
    """

    name: str
    exchanges: tuple[Exchange, ...] = ()
    staleness: int = 0

    def __post_init__(self) -> None:
        sizes = {e.schedule.size for e in self.exchanges if e.schedule is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"schedules of a method must be of one number of nodes, got {sorted(sizes)}. Build "
                "them for the same nodes."
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether nodes go on without what others send."""
        return any(exchange.awaits in ("link", "nobody") for exchange in self.exchanges)


def from_plan(plan: Any, name: str, kind: Kind = "ring") -> Method:
    """What an algorithm sends, by the plan in its state.

    A round of the schedule every `max(1, overlap)` steps, with `models` models in a message, beside
    the computation where the exchange needs nothing of its step; without a schedule an all-reduce
    every `period` steps.

    Args:
      plan: `state.plan` of a `gx.GossipState`.
      name: of the method, for tables.
      kind: of an all-reduce.

    >>> import gossipjax as gx
    >>> import jax.numpy as jnp
    >>> state = gx.osgp(gx.topology.ring(4), 2, wire=gx.wire.bfloat16()).init({"w": jnp.zeros(3)})
    >>> [(e.every, e.overlap, e.bits) for e in from_plan(state.plan, "2-osgp").exchanges]
    [(2, 2, 16.0)]
    """
    wire = plan.wire.codec
    early = plan.exchanges_early
    if plan.schedule is None:
        exchange = _make_all_reduce(
            kind, wire, fraction=plan.models, every=plan.period, overlap=int(early)
        )
    else:
        exchange = _make_gossip(plan.schedule, wire, plan.models, plan.overlap, early)
    beside = (
        _make_gossip(rounds, wire)
        if isinstance(rounds, Schedule)
        else _make_all_reduce(kind, wire, every=rounds)
        for rounds in plan.beside
    )
    return Method(name, (exchange, *beside), staleness=plan.overlap)


def single() -> Method:
    """Nodes that exchange nothing.

    >>> single().exchanges
    ()
    """
    return Method("single")


def allreduce(kind: Kind = "ring", wire: Form = "float32", layers: int = 0) -> Method:
    """Exact average of the gradients in every step; beside the backward pass if `layers` > 0.

    The baseline of all papers: SGP-19, section 2 (AR-SGD).

    >>> allreduce("tree", layers=8).exchanges[0].list_layers().tolist()
    [7, 6, 5, 4, 3, 2, 1, 0]
    """
    return Method(f"allreduce {kind}", (_make_all_reduce(kind, wire, layers=layers),))


def centralized(wire: Form = "float32") -> Method:
    """A parameter server: node 0 gathers all gradients and sends their mean to every node.

    The baseline of DPSGD-17, section 1, with O(n) messages at the busiest node (Table 1).

    >>> centralized().exchanges[0].kind
    'server'
    """
    return Method("centralized", (_make_all_reduce("server", wire),))


def sgp(schedule: Schedule, order: str = ORDERS[0], wire: Form = "float32") -> Method:
    """SGP: a round of the schedule per step; beside the computation if it is combined meanwhile.

    SGP-19, algorithm 1; "combine-while-adapting" is its authors' released code.

    >>> import gossipjax as gx
    >>> [e.overlap for e in sgp(gx.topology.ring(4), "combine-while-adapting").exchanges]
    [1]
    """
    exchange = _make_gossip(schedule, wire, is_early=_is_early(order))
    return Method(f"sgp {order}" if exchange.overlap else "sgp", (exchange,))


def osgp(schedule: Schedule, overlap: int = 1, wire: Form = "float32") -> Method:
    """Overlap SGP: a round every `overlap` steps, used as many steps later; 0 is SGP.

    SGP-19, section 3; what every message takes is the worst case there.

    >>> import gossipjax as gx
    >>> osgp(gx.topology.one_peer_exponential(8), overlap=2).staleness
    2
    """
    overlap = require_int(overlap, "overlap of osgp", 0)
    return Method(f"{overlap}-osgp", (_make_gossip(schedule, wire, overlap=overlap),), overlap)


def dpsgd(
    schedule: Schedule,
    order: str = ORDERS[1],
    wire: Form = "float32",
    is_half_duplex: bool = False,
) -> Method:
    """D-PSGD: a symmetric round per step; half duplex if both directions wait for each other.

    DPSGD-17, algorithm 1, which combines while it adapts; the other order is its remark.

    Raises:
      ValueError: if the schedule is not doubly stochastic.

    >>> import gossipjax as gx
    >>> dpsgd(gx.topology.ring(8)).exchanges[0].overlap
    1
    """
    exchange = _make_gossip(
        schedule, wire, is_early=_is_early(order), is_half_duplex=is_half_duplex
    )
    if not schedule.is_doubly_stochastic:
        raise ValueError(
            f"schedule of dpsgd must be doubly stochastic, got {schedule!r}. Use sgp for it."
        )
    return Method("dpsgd", (exchange,))


def rand_psgd(n: int, rounds: int = 64, seed: int = 0, wire: Form = "float32") -> Method:
    """RAND-PSGD: D-PSGD on a ring that is drawn anew in every step. RAND-20, section 3.

    >>> rand_psgd(8, rounds=4).exchanges[0].schedule.size
    8
    """
    return dataclasses.replace(dpsgd(random_ring(n, rounds, seed), wire=wire), name="rand-psgd")


def d1d_psgd(kind: Kind = "ring", wire: Form = "float32") -> Method:
    """D1D-PSGD: an all-reduce of the models beside the computation, used one step later.

    RAND-20, eqs. 2, 13 and 14. The `wire` is that of an all-reduce; `gx.d1d_psgd` with one sends
    `n - 1` messages instead.

    >>> d1d_psgd().exchanges[0].overlap
    1
    """
    return Method("d1d-psgd", (_make_all_reduce(kind, wire, overlap=1),), staleness=1)


def adpsgd(schedule: Schedule, wire: Form = "float32", is_half_duplex: bool = False) -> Method:
    """AD-PSGD: pairs average beside the computation; a node waits for its own link alone.

    Lian et al., ICML 2018, arXiv:1710.06952. Half duplex: a message takes twice as long.

    >>> import gossipjax as gx
    >>> adpsgd(gx.topology.bipartite_exponential(8)).is_asynchronous
    True
    """
    exchange = _make_gossip(
        schedule, wire, is_early=True, awaits="link", is_half_duplex=is_half_duplex
    )
    return Method("adpsgd", (exchange,), staleness=1)


def async_sgp(schedule: Schedule, wire: Form = "float32") -> Method:
    """Asynchronous SGP: a node that finds its link busy keeps its share and goes on.

    Asynchronous push-sum: Assran and Rabbat 2018, arXiv:1803.08950.

    >>> import gossipjax as gx
    >>> async_sgp(gx.topology.one_peer_exponential(8)).is_asynchronous
    True
    """
    exchange = _make_gossip(schedule, wire, is_early=True, awaits="nobody")
    return Method("async-sgp", (exchange,), staleness=1)


def async_outer(
    schedule: Schedule, every: int, momentum: float = 0.9, wire: Form = "float32"
) -> Method:
    """Asynchronous outer optimizer: a share every `every` steps, of model and momentum.

    `gossipjax.asynchronous.outer`: nobody waits.

    >>> from gossipjax.topology import one_peer_exponential
    >>> async_outer(one_peer_exponential(4), every=10).exchanges[0].phase
    9
    """
    every = require_int(every, "every of async_outer", 1)
    exchange = Exchange(
        schedule=schedule,
        bits=find_bits(wire),
        fraction=2 if momentum else 1,
        every=every,
        phase=every - 1,
        overlap=1,
        awaits="nobody",
    )
    return Method("async-outer", (exchange,), staleness=1)


def easgd(period: int = 1, kind: Kind = "ring", wire: Form = "float32") -> Method:
    """EASGD: models and a shared center pull toward each other every `period` steps.

    Zhang et al. 2015, arXiv:1412.6651. The sum of all pulls at the center is an all-reduce.

    >>> easgd(period=4).exchanges[0].every
    4
    """
    return Method("easgd", (_make_all_reduce(kind, wire, every=period),))


def gradient_tracking(schedule: Schedule, wire: Form = "float32") -> Method:
    """Gradient tracking: models and trackers, so twice the bytes of SGP in every step.

    Push-DIGing: Nedic et al. 2017, arXiv:1607.03218.

    >>> import gossipjax as gx
    >>> gradient_tracking(gx.topology.ring(8)).exchanges[0].fraction
    2
    """
    return Method("gradient-tracking", (_make_gossip(schedule, wire, models=2),))


def mixed_momentum(schedule: Schedule, wire: Form = "float32") -> Method:
    """D-PSGD with momentum that neighbours average, too: twice the bytes in every step.

    Yu et al., ICML 2019, arXiv:1905.03817.

    >>> import gossipjax as gx
    >>> mixed_momentum(gx.topology.ring(8)).exchanges[0].fraction
    2
    """
    return Method("mixed-momentum", (_make_gossip(schedule, wire, models=2),))


def relay(tree: Any) -> Method:
    """RelaySGD: a sum of models to every neighbour on a tree, in float32, after each step.

    Vogels et al., NeurIPS 2021, arXiv:2110.04175, algorithm 1.

    Args:
      tree: an undirected networkx graph, as in `gx.relay`.

    Raises:
      ValueError: if it is no graph, not connected or directed, or has a cycle.

    >>> import networkx
    >>> relay(networkx.path_graph(4)).exchanges[0].schedule.size
    4
    """
    schedule = from_graph(tree, "metropolis")
    edges = tree.number_of_edges()
    if edges != schedule.size - 1:
        raise ValueError(
            f"tree of relay must have no cycle, got {edges} edges for {schedule.size} nodes: leave "
            "some out, as networkx.minimum_spanning_tree(tree) does."
        )
    return Method("relay", (_make_gossip(schedule, "float32"),))


def local_sgd(every: int, kind: Kind = "ring", wire: Form = "float32") -> Method:
    """Local SGD: an exact average of the models every `every` steps. Stich 2019, arXiv:1805.09767.

    >>> [exchange.happens_at(11) for exchange in local_sgd(every=12).exchanges]
    [True]
    """
    return Method("local-sgd", (_make_outer(kind, wire, every),))


def slowmo(inner: Method, every: int, kind: Kind = "ring", wire: Form = "float32") -> Method:
    """SlowMo: an exact average every `every` steps, beside what the inner method exchanges.

    Wang et al., ICLR 2020, arXiv:1910.00643, algorithm 1. Without the average it is `inner`.

    >>> import gossipjax as gx
    >>> inner = sgp(gx.topology.one_peer_exponential(8))
    >>> [exchange.every for exchange in slowmo(inner, every=48).exchanges]
    [1, 48]
    """
    exchanges = (*inner.exchanges, _make_outer(kind, wire, every))
    return Method(f"slowmo {inner.name}", exchanges, inner.staleness)


def diloco(every: int, kind: Kind = "ring", wire: Form = "float32", layers: int = 0) -> Method:
    """DiLoCo: an exact average of the models every `every` steps, then an outer step.

    Douillard et al. 2023, arXiv:2311.08105, algorithm 1.

    >>> diloco(every=500).exchanges[0].every
    500
    """
    return Method("diloco", (_make_outer(kind, wire, every, layers=layers),))


def streaming_diloco(
    every: int,
    fragments: int,
    delay: int = 1,
    kind: Kind = "ring",
    wire: Form = "float32",
    layers: int = 0,
) -> Method:
    """Streaming DiLoCo: fragment f is averaged once in `every` steps, and used `delay` steps later.

    Douillard et al. 2025, arXiv:2501.18512, algorithm 2. With `layers`, fragment f has layers `f`,
    `f + fragments`, ..., so that there must be at least as many layers as fragments.

    >>> [exchange.phase for exchange in streaming_diloco(every=6, fragments=3).exchanges]
    [1, 3, 5]
    """
    every = require_int(every, "every of streaming_diloco", 1)
    fragments = require_int(fragments, "fragments of streaming_diloco", 1, every)
    delay = require_int(delay, "delay of streaming_diloco", 0, every - 1)
    exchanges = (
        _make_all_reduce(
            kind,
            wire,
            fraction=1 / fragments,
            every=every,
            phase=(f + 1) * every // fragments - 1,
            overlap=delay,
            layers=layers,
            first_layer=f if layers else 0,
            layer_stride=fragments if layers else 1,
        )
        for f in range(fragments)
    )
    return Method("streaming-diloco", tuple(exchanges), staleness=delay)


def sparse_loco(every: int, nodes: int, wire: Form) -> Method:
    """SparseLoCo: all nodes gather the sparse messages of all every `every` steps.

    Sarfi et al. 2025, arXiv:2508.15706. A node sends `nodes - 1` messages on a ring, where an
    all-reduce sends `2 (nodes - 1) / nodes` models: as that of `nodes / 2` times the bits, of which
    it has twice the latency.

    >>> import gossipjax as gx
    >>> [e.bits for e in sparse_loco(15, 8, gx.wire.block_top_k()).exchanges]
    [1.0]
    """
    nodes = require_int(nodes, "nodes of sparse_loco", 1)
    bits = find_bits(wire) * nodes / 2
    return Method("sparse-loco", (_make_outer("ring", bits, every),))


def desloc(
    every: int, mu_every: int, nu_every: int, kind: Kind = "ring", wire: Form = "float32"
) -> Method:
    """DES-LOC: exact averages of the models and of Adam's two moments, each with a period.

    Iacob et al. 2025, arXiv:2505.22549.

    >>> [exchange.every for exchange in desloc(256, 768, 1536).exchanges]
    [256, 768, 1536]
    """
    periods = (("every", every), ("mu_every", mu_every), ("nu_every", nu_every))
    exchanges = (
        _make_all_reduce(kind, wire, every=require_int(period, f"{name} of desloc", 1))
        for name, period in periods
    )
    return Method("desloc", tuple(exchanges))


def sparta(fraction: float, kind: Kind = "ring", wire: Form = "float32") -> Method:
    """SPARTA: an exact average of a part of the model after every step.

    >>> [exchange.fraction for exchange in sparta(0.005).exchanges]
    [0.005]
    """
    return Method("sparta", (_make_all_reduce(kind, wire, fraction=fraction),))


def noloco(schedule: Schedule, every: int, wire: Form = "float32") -> Method:
    """NoLoCo: every `every` steps an outer gradient and an anchor, two models, to the neighbours.

    Kolehmainen et al. 2025, arXiv:2506.10911, whose schedule is `gx.topology.random_pairs`. With
    `pull=1` the two are one model: `diloco` over neighbours, `sgp(schedule.every(every))`.

    >>> import gossipjax as gx
    >>> noloco(gx.topology.random_pairs(8, 4, seed=0), every=50).exchanges[0].every
    50
    """
    every = require_int(every, "every", 1)
    exchange = _make_gossip(schedule, wire, models=2)
    return Method("noloco", (dataclasses.replace(exchange, every=every, phase=every - 1),))


def push_sum_outer(
    schedule: Schedule, every: int, tracking: bool = True, wire: Form = "float32"
) -> Method:
    """An outer optimizer over gossip: a round every `every` steps, of two models if it tracks.

    `gx.outer(inner, outer_tx, every, average=gx.gradient_tracking(schedule))`; else `gx.sgp`.

    >>> from gossipjax.topology import random_peer
    >>> push_sum_outer(random_peer(4, 8, seed=0), every=10).exchanges[0].fraction
    2
    """
    every = require_int(every, "every", 1)
    exchange = _make_gossip(schedule, wire, models=1 + bool(tracking))
    exchange = dataclasses.replace(exchange, every=every, phase=every - 1)
    return Method("push-sum-outer", (exchange,))


def find_bits(wire: Form) -> float:
    """Bits of a parameter in a message of that form, scales and indices included.

    >>> find_bits("bfloat16"), find_bits(4.5)
    (16.0, 4.5)
    """
    if wire is None:
        return WIRE_BITS["float32"]
    if isinstance(wire, str):
        require_choice(wire, "wire", tuple(WIRE_BITS))
        return WIRE_BITS[wire]
    if isinstance(wire, Codec):
        return 8 * wire.count_bytes(COUNTED) / COUNTED
    return require_quantity(wire, "wire", "bits per parameter")


def _make_gossip(
    schedule: Schedule,
    wire: Form,
    models: int = 1,
    overlap: int = 0,
    is_early: bool = False,
    **settings: Any,
) -> Exchange:
    return Exchange(
        schedule=schedule,
        bits=find_bits(wire),
        fraction=models,
        every=max(1, overlap),
        overlap=overlap or int(is_early),
        **settings,
    )


def _make_all_reduce(kind: Kind, wire: Form, **settings: Any) -> Exchange:
    require_choice(kind, "kind of an all-reduce", KINDS)
    return Exchange(kind=kind, bits=find_bits(wire), awaits="all", **settings)


def _make_outer(kind: Kind, wire: Form, every: int, layers: int = 0) -> Exchange:
    """An all-reduce at the last of every `every` steps."""
    phase = require_int(every, "every", 1) - 1
    return _make_all_reduce(kind, wire, every=every, phase=phase, layers=layers)


def _is_early(order: str) -> bool:
    require_choice(order, "order", ORDERS)
    return order == "combine-while-adapting"
