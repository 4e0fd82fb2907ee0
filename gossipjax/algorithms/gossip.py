"""An algorithm of your own in a few lines: its equations, and the rest is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import optax

from gossipjax.algorithms.state import ExchangePlan, GossipState, init_state, mix_once
from gossipjax.algorithms.transform import Combined, gossip_transform, make_route, require_like
from gossipjax.collectives import StepLike, require_schedule, upcast
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike

Rule = Literal["average", "restart"]


@dataclasses.dataclass(frozen=True)
class Node:
    """What a node has in one update, beside its model and the update that arrives.

    Attributes:
      mix: `mix(tree) -> P tree`, the exchange of this step, of any tree of floats.
      kept: what the algorithm keeps, by name, each like the parameters, float32 at least.
      count: int32 scalar, the number of updates so far, for an `optax.Schedule`.
    """

    mix: Callable[[Any], Any]
    kept: Mapping[str, Any]
    count: jax.Array


def gossip(
    schedule: Schedule,
    combine: Callable[[Any, Any, Node], Any],
    keeps: Mapping[str, Rule] | None = None,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """An algorithm of your own, by its equations for one node. Goes *last* in a chain.

    With `x` the parameters and `u` the update from the chain before it, both trees like the
    parameters, `[...]` per node and float32 at least,

        x <- combine(x, u, node)          node.mix(tree) = P tree: the exchange of this step
        x, kept <- combine(x, u, node)    with keeps: node.kept[name], 0 at the start

    All that a step exchanges goes into one `node.mix`, as one message per peer: a tuple, say. Where
    the schedule is not doubly stochastic `x` is the numerator of push-sum, as in `gx.sgp`:
    `node.mix` mixes the weight `w` too, and the user holds `z = x / w`.

    It stands where the library's own algorithms stand, in `gx.TrainStep`, `gx.outer`, `gx.sharded`
    and checkpoints. Its exchange is inside the step, after the gradients.

    Args:
      schedule: any schedule. Where only a doubly stochastic one is right, check
        `schedule.is_doubly_stochastic`.
      combine: the equations. `optax.tree` has sums and products of trees.
      keeps: name -> what becomes of it on a change of nodes: it is `"average"`d, or starts again
        from 0, `"restart"`.
      axis_name, local_axis_name, wire: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: when traced, if `combine` calls `node.mix` never or twice, or returns another
        tree; else as `gx.sgp`.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> def combine(x, u, node):  # D-PSGD
    ...     return optax.tree.add(node.mix(x), u)
    >>> tx = gx.gossip(gx.topology.ring(2), combine)
    >>> def update(x, u):
    ...     return x + tx.update(u, tx.init(x), x, step=0)[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    require_schedule(schedule, "gossip")
    keeps = dict(keeps or {})
    route = make_route("gossip", axis_name, local_axis_name, wire)
    plan = ExchangePlan(schedule, wire=route, moves_by_zeros=bool(keeps))
    push_sum = not schedule.is_doubly_stochastic
    init = partial(init_state, plan=plan, push_sum=push_sum, zeros=keeps)

    def combine_once(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        exchange = _Exchange(state, step)
        kept = {name: state.kept(name) for name in keeps}
        result = combine(x, upcast(updates), Node(exchange.mix, kept, state.count))
        if not exchange.is_done:
            raise ValueError(
                "combine of gossip must call node.mix, got no call: it would exchange nothing. "
                "Without exchange, leave gx.gossip out of the chain."
            )
        if keeps:
            result, state = _keep(result, kept, state)
        require_like(x, result, "the numerators that combine of gossip returns", dtypes=True)
        return Combined(result, state._replace(weight=exchange.weight))

    return gossip_transform("gossip", plan, init, combine_once)


class _Exchange:
    """The exchange of one update, which is asked for once."""

    def __init__(self, state: GossipState, step: StepLike):
        self.is_done = False
        self.weight = state.weight
        self._state = state
        self._step = step

    def mix(self, tree: Any) -> Any:
        """`P tree`, and the weight with it."""
        if self.is_done:
            raise ValueError(
                "combine of gossip must call node.mix once, got a second call: give it all that "
                "travels as one tuple, x, y = node.mix((x, y))."
            )
        self.is_done = True
        mixed, self.weight = mix_once(tree, self.weight, self._state, self._step)
        return mixed


def _keep(result: Any, kept: dict[str, Any], state: GossipState) -> tuple[Any, GossipState]:
    """The numerators, and the state with what `combine` returned beside them."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    if not is_pair or result[1].keys() != kept.keys():
        raise ValueError(
            f"combine of gossip must return x and a dict with {', '.join(kept)}, as keeps says, "
            f"got {type(result).__name__}: return x, {{{', '.join(f'{n!r}: ...' for n in kept)}}}."
        )
    for name, value in result[1].items():
        what = f"{name!r} that combine of gossip returns"
        require_like(kept[name], value, what, dtypes=True)
    return result[0], state.keep(**result[1])
