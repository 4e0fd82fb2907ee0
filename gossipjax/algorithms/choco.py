"""CHOCO-SGD: gossip of compressed differences."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import (
    NodeRound,
    StepLike,
    at_round,
    mix_encoded,
    require_doubly_stochastic,
)
from gossipjax.exchanges.model import add, add_scaled
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.stability import follow_nodes
from gossipjax.exchanges.state import GossipState, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform, require_choice, require_number
from gossipjax.renamed import renamed
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Codec, Wire, WireLike, require_codec

Copies = Literal["updated", "previous"]
ROUNDS = 300  # of a simulation
MAX_VALUES = 200  # of a simulated model
GROWTH = 2.0  # of the distance in a simulation; where nodes come to agree, it falls


@renamed(codec="wire", gamma="strength")
def choco(
    schedule: Schedule,
    wire: WireLike,
    strength: float,
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    copies: Copies = "updated",
) -> optax.GradientTransformationExtraArgs:
    """CHOCO-SGD: nodes send each other compressed differences. Put it *last* in a chain.

    If `u` is the update from the chain, `C` is the codec, `W` is the static graph, and gamma is the
    `strength`, then

        y = x + u;    q = C(y - xh);    xh <- xh + q
        d <- d + sum_j w_ij q_j - q;    x <- y + gamma d

    `xh` is what a node's neighbours know of its model, and `d = sum_j w_ij xh_j - xh_i`. As the
    nodes agree, the differences vanish, and the noise of the codec vanishes with them. So nodes
    reach consensus with any codec, sparse ones too, while `sgp` and `dpsgd` keep the rounding error
    of a whole model. Mixing changes the sum of `x` by about 1e-7 of the model a step.

    The formulas are in the order of the paper. The code that the authors released, which made the
    figures, mixes the previous copies first (`copies="previous"`):

        x <- y + gamma d;    q = C(x - xh);    xh <- xh + q;    d <- d + sum_j w_ij q_j - q

    The state keeps `xh` as `extra["known"]` and `d` as `extra["difference"]`; both start at 0.

    Args:
      schedule: a static, doubly stochastic graph: a schedule of one round, perhaps with rounds
        without an exchange (`schedule.every(k)`), for local steps. The paper has symmetric ones.
      wire: the codec of the messages, such as `gx.wire.top_k(0.01)`.
      strength: gamma, the step towards the neighbours, above 0 and at most 1. The less the codec
        keeps, the smaller gamma must be; with a larger gamma, nodes diverge. On a ring of 8 nodes
        with fractions of 0.1, use 1 for `bfloat16` and `int8`, 0.5 for `int4`, the fraction for
        `random_k`, and twice the fraction for `top_k`.
      axis_name, local_axis_name: as in `gx.sgp`; `update` takes the same `step=`.
      copies: "updated" for the order of the paper, or "previous" for the order of the code.

    Raises:
      ValueError: if the schedule has several rounds, an argument is not as above, or `gx.sgp` would
        raise it. In `init`: if nodes would diverge with a sparse codec and this gamma.

    References:
      Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with
      Compressed Communication", ICML 2019, arXiv:1902.00340, algorithms 1 and 2.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.choco(gx.topology.ring(4), gx.wire.top_k(0.5), strength=0.3)
    >>> def mix(x):
    ...     def step(carry, _):
    ...         x, state = carry
    ...         updates, state = tx.update(jnp.zeros(2), state, x, step=0)
    ...         return (x + updates, state), None
    ...     return jax.lax.scan(step, (x, tx.init(x)), length=200)[0][0]
    >>> x = jnp.array([[0.0, 4.0], [1.0, 3.0], [2.0, 2.0], [5.0, 3.0]])
    >>> mixed = jax.vmap(mix, axis_name="nodes")(x)
    >>> bool(abs(mixed - jnp.array([[2.0, 3.0]])).max() < 1e-5)
    True
    """
    require_doubly_stochastic(schedule, "choco")
    rounds = [round_ for round_ in schedule.rounds if not round_.is_identity]
    if len(rounds) > 1:
        raise ValueError(
            f"the schedule of choco must be a static graph, of one round, got {schedule} with "
            f"{len(rounds)} different ones: nodes know the models of their neighbours, which must "
            "stay the same. Use gx.topology.ring or exponential, or dpsgd or sgp with a dense "
            "codec."
        )
    codec = require_codec(wire, "wire of choco")
    allowed = "above 0 and at most 1"
    gamma = require_number(strength, "strength of choco", allowed, lambda g: 0 < g <= 1)
    require_choice(copies, "copies of choco", get_args(Copies))
    route = Wire.make(axis_name, local_axis_name, codec, takes_sparse=True)
    tx = _make_transform(schedule, gamma, copies, route)
    if not codec.is_sparse or schedule.size == 1:
        return tx

    def init(params: optax.Params) -> optax.OptState:
        """Simulates the nodes before it makes the state, because a large gamma diverges."""
        values = min(MAX_VALUES, max(map(np.size, jax.tree.leaves(params)), default=0))
        growth = _find_growth(schedule, codec, gamma, copies, values) if values else 0.0
        if not growth <= GROWTH:
            raise ValueError(
                f"strength of choco must be small enough for {codec} and this graph, "
                f"{schedule!r}, so that nodes come to agree, got {gamma:.6g}, with which models "
                f"are {growth:.3g} times as far apart after {ROUNDS} rounds: give a smaller "
                "strength, or a codec that keeps more."
            )
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def _make_transform(
    schedule: Schedule, gamma: float, copies: Copies, route: Wire
) -> optax.GradientTransformationExtraArgs:
    """Makes the transform of `choco`, without its checks."""
    plan = ExchangePlan(schedule, wire=route)
    init = partial(init_state, plan=plan, zeros={"known": "average", "difference": "average"})

    def exchange(
        round_: NodeRound, operands: tuple[Any, Any, Any, jax.Array]
    ) -> tuple[Any, Any, Any]:
        """Sends the change of `y`, compressed, and mixes; returns `x`, `known` and `difference`.

        `known` is the copy of the model that the neighbours have, and `difference` is
        `sum_j P_ij known_j - known_i`. With `copies="previous"` the node mixes before it sends.
        """
        y, known, difference, count = operands
        if round_.is_identity:  # a local step, without messages
            return y, known, difference
        x = add_scaled(y, gamma, difference) if copies == "previous" else y
        change = jax.tree.map(jnp.subtract, x, known)
        sent, mixed = mix_encoded(change, round_, route, route.make_key(count))
        known = jax.tree.map(jnp.add, known, sent)
        difference = jax.tree.map(lambda d, m, s: d + (m - s), difference, mixed, sent)
        if copies == "updated":
            x = add_scaled(y, gamma, difference)
        return x, known, difference

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Takes the local step, and then `exchange` by the round of `step`."""
        operands = add(x, updates), state.kept("known"), state.kept("difference"), state.count
        x, known, difference = at_round(exchange, schedule, step, route.axis_name, operands)
        return Combined(x, state.keep(known=known, difference=difference))

    return gossip_transform("choco", plan, init, combine)


@functools.lru_cache(64)
def _find_growth(
    schedule: Schedule, codec: Codec, gamma: float, copies: Copies, values: int
) -> float:
    """Simulates random models `[values]`; returns by what factor they move apart in `ROUNDS`."""
    wire = Wire(codec=codec)
    tx = _make_transform(schedule, gamma, copies, wire)
    start = np.random.default_rng(0).normal(size=(schedule.size, 1, values))
    start -= start.mean(axis=0)
    (logs,) = follow_nodes(tx, schedule, wire, start, ROUNDS, pull=np.zeros(1))  # no updates
    return math.exp(logs[-1, 0])
