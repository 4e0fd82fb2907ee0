"""DeepSqueeze: gossip of compressed models with error compensation."""

from functools import partial
from typing import Any

import jax
import optax

from gossipjax.collectives import (
    NodeRound,
    StepLike,
    at_round,
    mix_encoded,
    require_doubly_stochastic,
)
from gossipjax.exchanges.model import add, subtract
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.renamed import renamed
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike


@renamed(codec="wire", gamma="strength")
def deepsqueeze(
    schedule: Schedule, wire: WireLike, strength: float, *, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """DeepSqueeze: each message also carries what the last one left out. Put it *last* in a chain.

    If `u` is the update from the chain, `C` is the codec, `P` is the round, and gamma is the
    `strength`, then

        y = x + u;    v = y + e;    q = C(v);    e <- v - q
        x <- y + gamma (sum_j P_ij q_j - q)

    Nodes send models, while in `gx.choco` they send differences. DeepSqueeze keeps one
    copy of the model less than `gx.choco`, and works with any doubly stochastic schedule. But the
    noise of the codec does not vanish as the nodes agree.

    Args:
      schedule: a doubly stochastic schedule.
      wire: the codec of the messages, such as `gx.wire.int4()`.
      strength: gamma, the step towards the neighbours, as in `gx.choco`.
      axis_name: as in `gx.sgp`.

    References:
      Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019,
      arXiv:1907.07346, algorithm 1.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.contrib.deepsqueeze(gx.topology.ring(2), gx.wire.top_k(0.5), strength=0.5)
    >>> def update(x):
    ...     updates, state = tx.update(jnp.zeros(2), tx.init(x), x, step=0)
    ...     return x + updates, state.extra["error"].value
    >>> x = jnp.array([[0.0, 4.0], [2.0, 1.0]])
    >>> [a.tolist() for a in jax.vmap(update, axis_name="nodes")(x)]
    [[[0.5, 3.0], [1.5, 2.0]], [[0.0, 0.0], [0.0, 1.0]]]
    """
    require_doubly_stochastic(schedule, "deepsqueeze")
    route = Wire.make(axis_name, wire=wire, takes_sparse=True)
    plan = ExchangePlan(schedule, wire=route)
    init = partial(init_state, plan=plan, zeros={"error": "restart"})

    def exchange(round_: NodeRound, operands: tuple[Any, Any, jax.Array]) -> tuple[Any, Any]:
        """Sends `y` with the error of the last message; returns the mixed model and new error."""
        y, error, count = operands
        if round_.is_identity:
            return y, error  # a round without messages
        v = add(y, error)
        sent, mixed = mix_encoded(v, round_, route, route.make_key(count))
        x = jax.tree.map(lambda y, p, q: y + strength * (p - q), y, mixed, sent)
        return x, subtract(v, sent)

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Takes the local step, and then `exchange` by the round of `step`."""
        operands = (add(x, updates), state.kept("error"), state.count)
        x, error = at_round(exchange, schedule, step, axis_name, operands)
        return Combined(x, state.keep(error=error))

    return gossip_transform("deepsqueeze", plan, init, combine)
