"""Nodes that do not compute at some steps."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import axis_size
from gossipjax.exchanges.chain import find_exchanging, gossip_state
from gossipjax.exchanges.state import GossipState
from gossipjax.exchanges.transform import require_state, require_transform
from gossipjax.faults._faults import Faults
from gossipjax.faults._links import is_active
from gossipjax.faults._rounds import require_isolated
from gossipjax.faults._transforms import LINKS


class InactiveState(NamedTuple):
    """State of `gx.faults.inactive` for one node.

    Attributes:
      count: int32 scalar, the number of steps so far, whether the node was active or not.
      inner: the state of the chain that `inactive` wraps.

    >>> InactiveState(count=3, inner=()).count
    3
    """

    count: Any
    inner: Any


def inactive(
    inner: optax.GradientTransformation, faults: Faults, *, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """Wraps a whole chain, so that its nodes compute only while they are active.

    While a node is not active, or dead, its update is 0. The states of its optimizer and algorithm
    stay as they were: the push-sum weight, corrections, momentum, and the step counts of the
    optimizer. Only the count of the gossip goes on, and messages on their way still arrive.

    No node may exchange with an inactive node: take a schedule of `gx.faults.apply` for the gossip
    in the chain, or `gx.faults.sgp` or `dpsgd`. `inactive` refuses algorithms that exchange with
    all nodes or need a graph that never changes (`easgd`, `d2`, `choco`, `relay`). It does not
    notice `gx.allreduce`, which goes on averaging the gradients of all nodes, inactive nodes
    included. Put `inactive` inside `gx.outer`, whose averages wait for all nodes.

    Args:
      inner: the chain that is wrapped.
      faults: the same faults that the exchange of the chain gets.
      axis_name: the mapped axis of the nodes, which is needed only if the chain has no gossip.

    Raises:
      ValueError: in `init`, if a node would exchange while it is not active, or if the chain
        contains `gx.outer`, which must be outside.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> faults = gx.faults.Faults(2, deaths={0: 1})
    >>> schedule = gx.faults.apply(gx.topology.ring(2), faults)
    >>> tx = gx.faults.inactive(optax.chain(optax.sgd(1.0), gx.sgp(schedule)), faults)
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update(jnp.ones(()), state, z, step=step)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 4.0])).tolist()
    [1.0, 0.0]
    """
    chain = require_transform(inner, "inner of inactive")

    def init(params: optax.Params) -> InactiveState:
        state = chain.init(params)
        # Only a transform around a chain, such as gx.outer, has an `inner` state.
        if any(part.inner is not None for part in find_exchanging(state)):
            raise ValueError(
                "inner of inactive must be a chain without gx.outer, got one with it: write "
                "gx.outer(gx.faults.inactive(tx, faults), ...)."
            )
        gossip = gossip_state(state)
        if gossip is not None and LINKS not in (gossip.extra or {}):
            # With the links of gx.faults.sgp or dpsgd, nobody sends to an inactive node anyway.
            if gossip.schedule is None:
                raise ValueError(
                    "inner of inactive must exchange by a schedule, got an algorithm in which all "
                    "nodes exchange at once: take sgp, osgp, dpsgd or gradient_tracking."
                )
            require_isolated(gossip.schedule, faults, gossip.overlap)
        return InactiveState(jnp.zeros((), jnp.int32), state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, InactiveState]:
        before = require_state(state, InactiveState, "gx.faults.inactive")
        gossip = gossip_state(before.inner)
        name = axis_name if gossip is None else gossip.wire.axis_name
        if axis_size(name) != faults.size:
            raise ValueError(
                f"the axis {name!r} must have as many nodes as the faults of inactive, "
                f"{faults.size}, got {axis_size(name)}."
            )
        count = before.count if gossip is None else gossip.count  # picks the row of the tables
        choose = partial(_choose_state, is_active(faults, count, name))
        # All nodes run the chain, because its exchange is one program for all of them. An inactive
        # node then takes back its old state, and makes no update.
        updates, after = chain.update(updates, before.inner, params, **extra_args)
        inner_state = jax.tree.map(choose, after, before.inner, is_leaf=_is_gossip)
        updates = choose(updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, InactiveState(optax.safe_increment(before.count), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _choose_state(is_active: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new state if this node is active, else the old state.

    Of a `GossipState`, the count and the messages on their way are new in both cases.
    """
    chosen = jax.tree.map(partial(jnp.where, is_active), new, old)
    if not _is_gossip(new):
        return chosen
    chosen = chosen._replace(count=new.count, in_flight=new.in_flight)
    return chosen.keep(links=new.kept(LINKS)) if LINKS in (new.extra or {}) else chosen


def _is_gossip(part: Any) -> bool:
    return isinstance(part, GossipState)
