"""What each algorithm exchanges. NumPy only.

Every function returns a `Method` for `predict_step` and `simulate`. `from_plan` makes the method of
every algorithm whose state is a `gx.GossipState`. The other functions need no JAX, and cover
algorithms that have no plan. `wire` is a name like "bfloat16", a number of bits per parameter, or a
codec of `gx.wire`. `kind` names the kind of all-reduce.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from gossipjax.cost_model._require import require_choice, require_quantity
from gossipjax.cost_model.exchange import Exchange, Kind
from gossipjax.topology.schedule import Schedule, require_int

__all__ = [
    "Method",
    "adpsgd",
    "allreduce",
    "async_sgp",
    "centralized",
    "diloco",
    "dpsgd",
    "from_plan",
    "noloco",
    "osgp",
    "sgp",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
]

WIRE_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.125,  # a float32 scale for a block of 256
    "int4": 4.125,
}
COUNTED = 2**20  # a codec counts the bits of a message of this size
ORDERS = ("adapt-then-combine", "combine-while-adapting")


@runtime_checkable
class Codec(Protocol):
    """A codec of `gx.wire`. This module does not import `gx.wire`, which needs JAX."""

    def count_bytes(self, size: int) -> int:
        """Returns the bytes of a message of `size` float32 values."""
        ...


Form = str | float | Codec | None  # None means full precision


@dataclasses.dataclass(frozen=True)
class Method:
    """The exchanges that an algorithm makes.

    Attributes:
      name: the name of the algorithm in tables.
      exchanges: the exchanges of a step, one after another.
      staleness: the number of steps by which a model that arrives is older than the receiver's
        model.

    Raises:
      ValueError: if the exchanges are for different numbers of nodes.

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
        """Whether nodes go on without waiting for messages."""
        return any(exchange.awaits in ("link", "nobody") for exchange in self.exchanges)


def from_plan(plan: Any, name: str, kind: Kind = "ring") -> Method:
    """Makes the method of a gossip transform from `state.plan` of its `gx.GossipState`.

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
    return Method(name, (exchange,), staleness=plan.overlap)


def allreduce(kind: Kind = "ring", wire: Form = "float32", layers: int = 0) -> Method:
    """Nodes all-reduce the gradients in every step, during the backward pass if `layers` > 0.

    >>> allreduce(kind="tree", layers=8).exchanges[0].list_layers().tolist()
    [7, 6, 5, 4, 3, 2, 1, 0]
    """
    return Method(f"allreduce {kind}", (_make_all_reduce(kind, wire, layers=layers),))


def centralized(wire: Form = "float32") -> Method:
    """A parameter server: node 0 gathers all gradients and sends their mean to every node.

    >>> centralized().exchanges[0].kind
    'server'
    """
    return Method("centralized", (_make_all_reduce("server", wire),))


def sgp(schedule: Schedule, order: str = ORDERS[0], wire: Form = "float32") -> Method:
    """SGP: nodes exchange by one round per step; with "combine-while-adapting" while they compute.

    >>> import gossipjax as gx
    >>> [e.overlap for e in sgp(gx.topology.ring(4), "combine-while-adapting").exchanges]
    [1]
    """
    exchange = _make_gossip(schedule, wire, is_early=_is_early(order))
    return Method(f"sgp {order}" if exchange.overlap else "sgp", (exchange,))


def osgp(schedule: Schedule, overlap: int = 1, wire: Form = "float32") -> Method:
    """Overlap SGP: a round begins every `overlap` steps and ends `overlap` steps later.

    >>> import gossipjax as gx
    >>> osgp(gx.topology.one_peer_exponential(8), overlap=2).staleness
    2
    """
    return Method(f"{overlap}-osgp", (_make_gossip(schedule, wire, overlap=overlap),), overlap)


def dpsgd(
    schedule: Schedule,
    order: str = ORDERS[1],
    wire: Form = "float32",
    is_half_duplex: bool = False,
) -> Method:
    """D-PSGD: nodes exchange by one round of a symmetric schedule per step.

    >>> import gossipjax as gx
    >>> dpsgd(gx.topology.ring(8)).exchanges[0].overlap
    1
    """
    if not schedule.is_doubly_stochastic:
        raise ValueError(
            f"schedule of dpsgd must be doubly stochastic, got {schedule!r}. Use sgp for it."
        )
    exchange = _make_gossip(
        schedule, wire, is_early=_is_early(order), is_half_duplex=is_half_duplex
    )
    return Method("dpsgd", (exchange,))


def adpsgd(schedule: Schedule, wire: Form = "float32", is_half_duplex: bool = False) -> Method:
    """AD-PSGD: pairs average during the computation, and a node waits for its own link only.

    >>> import gossipjax as gx
    >>> adpsgd(gx.topology.bipartite_exponential(8)).is_asynchronous
    True
    """
    exchange = _make_gossip(
        schedule, wire, is_early=True, awaits="link", is_half_duplex=is_half_duplex
    )
    return Method("adpsgd", (exchange,), staleness=1)


def async_sgp(schedule: Schedule, wire: Form = "float32") -> Method:
    """Asynchronous SGP: a node waits for no other node.

    If its link is busy, a node does not send in this step, keeps its share, and goes on.

    >>> import gossipjax as gx
    >>> async_sgp(gx.topology.one_peer_exponential(8)).is_asynchronous
    True
    """
    exchange = _make_gossip(schedule, wire, is_early=True, awaits="nobody")
    return Method("async-sgp", (exchange,), staleness=1)


def slowmo(inner: Method, every: int, kind: Kind = "ring", wire: Form = "float32") -> Method:
    """SlowMo: nodes exchange as in the inner method, and all-reduce every `every` steps.

    >>> import gossipjax as gx
    >>> inner = sgp(gx.topology.one_peer_exponential(8))
    >>> [exchange.every for exchange in slowmo(inner, every=48).exchanges]
    [1, 48]
    """
    exchanges = (*inner.exchanges, *diloco(every, kind, wire).exchanges)
    return Method(f"slowmo {inner.name}", exchanges, inner.staleness)


def diloco(every: int, kind: Kind = "ring", wire: Form = "float32", layers: int = 0) -> Method:
    """DiLoCo and Local SGD: nodes all-reduce their models at the last of every `every` steps.

    >>> [(e.every, e.phase) for e in diloco(every=500).exchanges]
    [(500, 499)]
    """
    exchange = _make_all_reduce(kind, wire, every=every, phase=every - 1, layers=layers)
    return Method("diloco", (exchange,))


def streaming_diloco(
    every: int,
    fragments: int,
    delay: int = 1,
    kind: Kind = "ring",
    wire: Form = "float32",
    layers: int = 0,
) -> Method:
    """Streaming DiLoCo: averages a fragment every `every` steps, and uses it `delay` steps later.

    With `layers`, fragment f consists of the layers `f`, `f + fragments`, ... There must be at
    least as many layers as fragments.

    >>> [exchange.phase for exchange in streaming_diloco(every=6, fragments=3).exchanges]
    [1, 3, 5]
    """
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
    """SparseLoCo: every `every` steps, each node sends its sparse message to all other nodes.

    >>> import gossipjax as gx
    >>> [e.bits for e in sparse_loco(15, 8, gx.wire.block_top_k()).exchanges]
    [1.0]
    """
    # On a ring a node sends nodes - 1 messages, where an all-reduce sends 2 (nodes - 1) / nodes.
    bits = find_bits(wire) * nodes / 2
    return dataclasses.replace(diloco(every, wire=bits), name="sparse-loco")


def noloco(schedule: Schedule, every: int, wire: Form = "float32", models: int = 2) -> Method:
    """NoLoCo and `gx.outer` over gossip: nodes gossip at the last of every `every` steps.

    A message contains two models, an outer gradient and an anchor. With `gx.sgp`, or
    `anchor_strength=1`, give `models=1`.

    >>> import gossipjax as gx
    >>> noloco(gx.topology.random_pairs(8, 4, seed=0), every=50).exchanges[0].every
    50
    """
    exchange = _make_gossip(schedule, wire, models)
    exchange = dataclasses.replace(exchange, every=every, phase=every - 1)
    return Method("noloco", (exchange,))


def find_bits(wire: Form) -> float:
    """Returns the bits of a parameter in a message, scales and indices included."""
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
        every=max(1, overlap),  # a message travels in this many pieces
        overlap=overlap or int(is_early),
        **settings,
    )


def _make_all_reduce(kind: Kind, wire: Form, **settings: Any) -> Exchange:
    return Exchange(kind=kind, bits=find_bits(wire), awaits="all", **settings)


def _is_early(order: str) -> bool:
    require_choice(order, "order", ORDERS)
    return order == "combine-while-adapting"
