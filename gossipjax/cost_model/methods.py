"""What a method exchanges, read from its transform."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.cost_model.exchange import Awaits, Exchange, Kind
from gossipjax.exchanges.chain import find_parts, step_plan
from gossipjax.exchanges.state import Exchanging

MAX_FRAGMENTS = 64  # if `params` are not given: a fragment contains at least one leaf


@dataclasses.dataclass(frozen=True)
class Method:
    """The exchanges that an algorithm makes.

    `from_transform` makes the method of a transform. For any other, give the exchanges yourself.

    Attributes:
      name: the name of the algorithm in tables.
      exchanges: the exchanges of a step, one after another.

    Raises:
      ValueError: if the exchanges are for different numbers of nodes.

    >>> method = Method("all-reduce of the step before", (Exchange(None, late=1),))
    >>> (method.staleness, method.is_asynchronous)
    (1, False)
    """

    name: str
    exchanges: tuple[Exchange, ...] = ()

    def __post_init__(self) -> None:
        sizes = {e.schedule.size for e in self.exchanges if e.schedule is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"schedules of a method must be of one number of nodes, got {sorted(sizes)}. Build "
                "them for the same nodes."
            )

    @property
    def is_asynchronous(self) -> bool:
        """Says whether nodes go on without waiting for messages."""
        return any(exchange.awaits != "peers" for exchange in self.exchanges)

    @property
    def staleness(self) -> int:
        """The number of steps by which a model that arrives is older than the receiver's model.

        It is the largest `late` of the exchanges, and at least 1 if nodes are asynchronous. An
        exchange that `is_early` counts 0, because its models are of the same step.
        """
        late = (exchange.late for exchange in self.exchanges)
        return max((*late, int(self.is_asynchronous)))


def from_transform(
    tx: optax.GradientTransformation,
    name: str,
    kind: Kind = "ring",
    *,
    params: Any = None,
    layers: int = 0,
    awaits: Awaits = "peers",
    is_half_duplex: bool = False,
) -> Method:
    """Makes the method of a transform: what all its parts exchange over the axis of the nodes.

    Args:
      tx: the transform, or a whole chain.
      name: the name of the method in tables.
      kind: how all nodes average: "ring", "tree" or "server".
      params: the parameters of the model, or their shapes. You need them only if the transform cuts
        the model into more than 64 fragments, or averages factors of matrices. No array is made.
      layers: the number of layers of the model, if averages run during the backward pass, layer by
        layer; else 0. Fragment f of p consists of the layers `f`, `f + p`, ...
      awaits: what a node that gossips waits for: "peers", or, if nodes are asynchronous, its "link"
        or "nobody".
      is_half_duplex: whether a node sends and receives in turn.

    Raises:
      ValueError: if an argument is out of its range, parts of a chain are in a wrong order, nodes
        that average wait for nobody, or factors of `gx.wire.low_rank` are averaged and `params` are
        missing.

    >>> import gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(8)))
    >>> slowmo = gx.outer(tx, optax.sgd(1.0, 0.7), every=48)
    >>> [(e.every, e.phase) for e in from_transform(slowmo, "slowmo").exchanges]
    [(1, 0), (48, 47)]
    >>> tx = optax.chain(gx.allreduce(wire=jnp.bfloat16), optax.adam(1e-3))
    >>> [(e.kind, e.bits) for e in from_transform(tx, "server", "server").exchanges]
    [('server', 16.0)]
    """
    has_no_params = params is None
    if has_no_params:  # most sizes are fractions of the model, so any leaves will do
        params = [jax.ShapeDtypeStruct((1,), jnp.float32)] * MAX_FRAGMENTS
    state = jax.eval_shape(tx.init, params)
    step_plan(state)  # raises if parts of the chain are in a wrong order
    found = [part.plan for part in find_parts(state, Exchanging)]
    if has_no_params and any(plan.wire.low_rank for plan in found):
        raise ValueError(
            "params must be given where factors of gx.wire.low_rank are averaged, got None: their "
            "sizes depend on the shapes. jax.ShapeDtypeStructs are enough."
        )
    # Only exchanges between nodes count. Averages inside a node come before them in a chain.
    over_nodes = [plan for plan in found if plan.wire.axis_name == found[-1].wire.axis_name]
    exchanges: list[Exchange] = []
    for exchange in (exchange for plan in over_nodes for exchange in plan.exchanges()):
        if exchange.models is None:
            raise ValueError(
                "models must be known to the cost model, got an algorithm of gx.gossip without: "
                "write gx.gossip(..., models=2) if node.mix sends two trees like the parameters. "
                "gx.bytes_per_step counts what a transform sends."
            )
        is_average = exchange.schedule is None
        # The averages of a chain are those of fragments 0, 1, and so on: count the earlier ones.
        fragment = sum(other.schedule is None for other in exchanges)
        exchanges.append(
            Exchange(
                **vars(exchange),
                kind=kind,
                layers=layers if is_average else 0,
                fragment=fragment if is_average else 0,
                awaits=awaits,
                is_half_duplex=is_half_duplex,
            )
        )
    return Method(name, tuple(exchanges))
