"""Methods: what each algorithm of the library exchanges, by its name. NumPy only.

Every function returns a `Method` for `predict_step` and `simulate`. Names and arguments are those
of the transforms (`gx.sgp`, `gx.osgp`, ...), `wire` is a name such as "bfloat16" or a number of
bits per parameter, and `kind` is that of an all-reduce.
"""

import dataclasses
from typing import Any

from gossipjax.cost_model._collectives import KINDS
from gossipjax.cost_model._require import require_choice, require_quantity
from gossipjax.cost_model.exchange import Exchange, Kind
from gossipjax.topology import Schedule, random_ring
from gossipjax.topology.schedule import require_int

WIRE_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "int8": 8.125,  # a float32 scale for a block of 256
    "int4": 4.125,
}
ORDERS = ("adapt-then-combine", "combine-while-adapting")
ADAPT_THEN_COMBINE = ORDERS[0]


@dataclasses.dataclass(frozen=True)
class Method:
    """An algorithm, as what it exchanges.

    Attributes:
      name: for tables.
      exchanges: those of a step, one after another.
      staleness: steps by which what a node gets from others is older than its own model.

    Raises:
      ValueError: if an exchange is none, or the exchanges are of different numbers of nodes.
    """

    name: str
    exchanges: tuple[Exchange, ...] = ()
    staleness: int = 0

    def __post_init__(self) -> None:
        for exchange in self.exchanges:
            if not isinstance(exchange, Exchange):
                raise ValueError(
                    f"exchanges of a method must be Exchange objects, got {exchange!r}."
                )
        require_int(self.staleness, "staleness of a method", 0)
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


def single() -> Method:
    """Nodes that exchange nothing."""
    return Method("single")


def allreduce(kind: Kind = "ring", wire: str | float = "float32", layers: int = 0) -> Method:
    """Exact average of the gradients in every step; beside the backward pass if `layers` > 0."""
    return Method(f"allreduce {kind}", (_make_all_reduce(kind, wire, layers=layers),))


def centralized(wire: str | float = "float32") -> Method:
    """A parameter server: node 0 gathers all gradients and sends their mean to every node."""
    return Method("centralized", (_make_all_reduce("server", wire),))


def sgp(
    schedule: Schedule, order: str = ADAPT_THEN_COMBINE, wire: str | float = "float32"
) -> Method:
    """SGP: a round of the schedule per step; beside the computation if it is combined meanwhile."""
    exchange = _make_gossip(schedule, wire, overlap=_find_overlap(order))
    return Method(f"sgp {order}" if exchange.overlap else "sgp", (exchange,))


def osgp(schedule: Schedule, overlap: int = 1, wire: str | float = "float32") -> Method:
    """Overlap SGP: a round every `overlap` steps, used as many steps later; 0 is SGP."""
    overlap = require_int(overlap, "overlap of osgp", 0)
    exchange = _make_gossip(schedule, wire, every=max(1, overlap), overlap=overlap)
    return Method(f"{overlap}-osgp", (exchange,), staleness=overlap)


def dpsgd(
    schedule: Schedule,
    order: str = ORDERS[1],
    wire: str | float = "float32",
    is_half_duplex: bool = False,
) -> Method:
    """D-PSGD: a symmetric round per step; half duplex if both directions wait for each other."""
    if isinstance(schedule, Schedule) and not schedule.is_doubly_stochastic:
        raise ValueError(
            f"schedule of dpsgd must be doubly stochastic, got {schedule!r}. Use sgp for it."
        )
    exchange = _make_gossip(
        schedule, wire, overlap=_find_overlap(order), is_half_duplex=is_half_duplex
    )
    return Method("dpsgd", (exchange,))


def rand_psgd(n: int, rounds: int = 64, seed: int = 0, wire: str | float = "float32") -> Method:
    """RAND-PSGD: D-PSGD on a ring that is drawn anew in every step."""
    method = dpsgd(random_ring(n, rounds, seed), wire=wire)
    return dataclasses.replace(method, name="rand-psgd")


def d1d_psgd(kind: Kind = "ring", wire: str | float = "float32") -> Method:
    """D1D-PSGD: an all-reduce of the models beside the computation, used one step later."""
    return Method("d1d-psgd", (_make_all_reduce(kind, wire, overlap=1),), staleness=1)


def adpsgd(
    schedule: Schedule, wire: str | float = "float32", is_half_duplex: bool = False
) -> Method:
    """AD-PSGD: pairs average beside the computation; a node waits for its own link alone."""
    exchange = _make_gossip(schedule, wire, overlap=1, awaits="link", is_half_duplex=is_half_duplex)
    return Method("adpsgd", (exchange,), staleness=1)


def async_sgp(schedule: Schedule, wire: str | float = "float32") -> Method:
    """Asynchronous SGP: a node that finds its link busy keeps its share and goes on."""
    exchange = _make_gossip(schedule, wire, overlap=1, awaits="nobody")
    return Method("async-sgp", (exchange,), staleness=1)


def easgd(period: int = 1, kind: Kind = "ring", wire: str | float = "float32") -> Method:
    """EASGD: models and a center draw each other every `period` steps."""
    return Method("easgd", (_make_all_reduce(kind, wire, every=period),))


def local_sgd(every: int, kind: Kind = "ring", wire: str | float = "float32") -> Method:
    """Local SGD: an exact average of the models every `every` steps."""
    exchange = _make_all_reduce(kind, wire, every=every, phase=_last(every))
    return Method("local-sgd", (exchange,))


def slowmo(inner: Method, every: int, kind: Kind = "ring", wire: str | float = "float32") -> Method:
    """SlowMo: an exact average every `every` steps, beside what the inner method exchanges."""
    if not isinstance(inner, Method):
        raise ValueError(f"inner of slowmo must be a Method, as sgp(schedule), got {inner!r}.")
    exchange = _make_all_reduce(kind, wire, every=every, phase=_last(every))
    return Method(f"slowmo {inner.name}", (*inner.exchanges, exchange), inner.staleness)


def diloco(
    every: int, kind: Kind = "ring", wire: str | float = "float32", layers: int = 0
) -> Method:
    """DiLoCo: an exact average of the models every `every` steps, then an outer step."""
    exchange = _make_all_reduce(kind, wire, every=every, phase=_last(every), layers=layers)
    return Method("diloco", (exchange,))


def streaming_diloco(
    every: int,
    fragments: int,
    delay: int = 1,
    kind: Kind = "ring",
    wire: str | float = "float32",
    layers: int = 0,
) -> Method:
    """Streaming DiLoCo: fragment f is averaged once in `every` steps, and used `delay` steps later.

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


def find_bits(wire: str | float) -> float:
    """Bits of a parameter in a message of that form.

    >>> find_bits("bfloat16"), find_bits(4.5)
    (16.0, 4.5)
    """
    if isinstance(wire, str):
        require_choice(wire, "wire", tuple(WIRE_BITS))
        return WIRE_BITS[wire]
    return require_quantity(wire, "wire", "bits per parameter")


def _make_gossip(schedule: Schedule, wire: str | float, **settings: Any) -> Exchange:
    return Exchange(schedule=schedule, bits=find_bits(wire), **settings)


def _make_all_reduce(kind: Kind, wire: str | float, **settings: Any) -> Exchange:
    require_choice(kind, "kind of an all-reduce", KINDS)
    return Exchange(kind=kind, bits=find_bits(wire), awaits="all", **settings)


def _find_overlap(order: str) -> int:
    require_choice(order, "order", ORDERS)
    return int(order != ADAPT_THEN_COMBINE)


def _last(every: int) -> int:
    return require_int(every, "every", 1) - 1
