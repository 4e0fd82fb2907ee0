"""The exchange as a separate program that runs before, or together with, the step that uses it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gossipjax.collectives import StepLike, deliver, require_step, upcast, vary
from gossipjax.exchanges.chain import gossip_state, require_updates_numbered
from gossipjax.exchanges.fragments import Fragment, merge, pick, split_leaves
from gossipjax.exchanges.mask import gossiped
from gossipjax.exchanges.state import GossipState, PushSum, mix_once, numerators
from gossipjax.sharding import inner_axes, on_shards, shard_specs


def exchange(
    opt_state: optax.OptState,
    step: StepLike,
    axis_name: str | None = None,
    params: optax.Params | None = None,
) -> PushSum:
    """The first half of an update: an exchange that needs nothing that the step computes.

    - Under overlap (`osgp`) the exchange delivers messages that nodes sent before this step.
    - For algorithms that combine while they adapt (`dpsgd`, `adpsgd`, `sgp` in that order) the
      exchange mixes the models, `x, w <- P x, P w`, and the gradient then moves the mixed models.

    The exchange can run at the same time as the gradients, as a separate program. The second half
    is `tx.update(..., step=step, received=received)`. Both halves together equal
    `tx.update(..., step=step)`.

    Args:
      opt_state: the state of the transform, or of a whole chain that contains it.
      step: the step of the update that follows.
      axis_name: the mapped axis of the nodes; by default the axis of the transform.
      params: the parameters in your loop; under overlap you can leave them out.

    Raises:
      ValueError: if the exchange of this algorithm needs the update of its step (for `sgp` use
        `order="combine-while-adapting"`), if `params` are missing, or, when traced, if `gx.sgp`
        would raise it.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.osgp(gx.topology.one_peer_exponential(2))
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         received = gx.exchange(state, step)
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step, received=received)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 3.0])).tolist()
    [2.0, 1.0]
    """
    state = gossip_state(opt_state)
    if state is None or not state.plan.exchanges_early:
        raise ValueError(
            "the exchange must need nothing of its step, as that of gx.osgp, gx.dpsgd or gx.sgp("
            'order="combine-while-adapting"), got the state of another algorithm, which exchanges '
            "inside tx.update."
        )
    require_updates_numbered(opt_state)
    assert state.schedule is not None
    plan = state.plan
    if axis_name is not None:
        plan = dataclasses.replace(plan, wire=plan.wire._replace(axis_name=axis_name))
    require_step(step, plan.wire.axis_name)
    if not plan.overlap and params is None:
        raise ValueError(
            "params must be given to the exchange of an algorithm that mixes them, got None: call "
            "gx.exchange(opt_state, step, params=params)."
        )
    # What is mixed, and not the rest of the state, which may be large.
    state = GossipState(
        state.count,
        state.weight,
        in_flight=state.in_flight,
        plan=plan,
        mask=state.mask,
        residual=None if plan.overlap else state.residual,
    )
    params = None if plan.overlap else gossiped(params, state)
    specs = shard_specs(opt_state)
    run = partial(exchange_parts, pieces=split_messages(state))
    if specs is None:
        if inner_axes(plan.wire.axis_name):
            raise ValueError(
                "opt_state must be the state of the whole chain, with that of gx.sharded, where a "
                "node has further axes, got the gossip state inside: its specs are needed."
            )
        return run(state, params, step)
    like = state.in_flight.x if params is None else params
    args = (state, params, step)
    weight = None if state.weight is None else PartitionSpec()
    out_specs = PushSum(weight, specs.of(like, like))
    return on_shards(run, specs, plan.wire.axis_name, specs.of(args, like), out_specs)(*args)


def split_messages(state: GossipState) -> list[Fragment]:
    """The leaves of a message that travel in each step of an overlap, about as many bytes in each.

    How leaves are sharded inside a node does not matter, because only whole leaves are counted.
    """
    if not state.overlap:
        return []
    leaves = jax.tree.leaves(state.in_flight.x)
    return split_leaves(leaves, max(1, min(state.overlap, len(leaves))))


def exchange_parts(
    state: GossipState, params: Any, step: StepLike, pieces: list[Fragment]
) -> PushSum:
    """`exchange` by one device of a node, or by the whole node; `pieces` of `split_messages`."""
    if not state.overlap:
        x, weight = mix_once(numerators(params, state), state.weight, state, step)
        return PushSum(weight, x)

    def send(leaves: Fragment, mass: PushSum) -> PushSum:
        part = PushSum(mass.weight if 0 in leaves else None, pick(mass.x, leaves))
        received = deliver(part, schedule, last_round, state.wire, state.wire.make_key(state.count))
        weight = received.weight if 0 in leaves else mass.weight
        return PushSum(weight, merge(mass.x, received.x, leaves))

    schedule: Any = state.schedule
    last_round = (step - 1) // state.overlap  # by which all was sent that arrives now
    mass = vary(state.in_flight, state.wire.axis_name)
    branches = [partial(send, leaves) for leaves in pieces]
    branches += [lambda mass: mass] * (state.overlap - len(pieces))
    if len(branches) == 1:
        return branches[0](mass)
    piece = (step - 1) % state.overlap
    if isinstance(piece, int | np.integer):
        return branches[piece](mass)
    return jax.lax.switch(piece, branches, mass)


def mass_in_flight(params: optax.Params, state: GossipState | None) -> PushSum:
    """The weight and numerators (like `params`, float32 at least) of this node's messages.

    They are zeros if nothing is in flight. The weight is None for an algorithm without weights.
    """
    zeros = jax.tree.map(jnp.zeros_like, upcast(params))
    if state is None or state.in_flight is None:
        return PushSum(None, zeros)
    leaves = jax.tree.leaves(state.in_flight.x)
    if list(map(jnp.shape, leaves)) != list(map(jnp.shape, jax.tree.leaves(zeros))):
        raise ValueError(
            "params must be the parameters that the transform gossips, got others than those of "
            "the messages in flight: where it is masked, pass that part of the parameters."
        )
    return PushSum(state.in_flight.weight, jax.tree.unflatten(jax.tree.structure(zeros), leaves))
