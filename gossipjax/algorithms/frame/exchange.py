"""The exchange that needs nothing of its step, and can be a program of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gossipjax.algorithms.frame.accumulation import accumulation_plan
from gossipjax.algorithms.frame.chain import gossip_state, require_updates_numbered
from gossipjax.algorithms.frame.masks import gossiped
from gossipjax.algorithms.frame.state import GossipState, InFlight, PushSum, numerators
from gossipjax.algorithms.outer.fragments import merge, pick, split_leaves
from gossipjax.collectives import (
    Layout,
    StepLike,
    as_varying,
    at_round,
    deliver,
    mix,
    require_step,
)
from gossipjax.sharding import inner_axes, on_shards, shard_specs
from gossipjax.wire import Wire, fold_in

Received = InFlight | PushSum


def exchange(
    opt_state: optax.OptState,
    step: StepLike,
    axis_name: str | None = None,
    params: optax.Params | None = None,
) -> Received:
    """The first half of an update: the exchange, where it needs nothing that the step computes.

    - Under overlap (`osgp`) it exchanges what was sent before this step.
    - Of an algorithm that combines while it adapts (`dpsgd`, `adpsgd`, `sgp` in that order) it
      mixes the models, `x, w <- P x, P w`, which the gradient then moves.

    It can run at the same time as the gradients, as a separate program; `tx.update(..., step=step,
    received=received)` is the other half. Both together equal `tx.update(..., step=step)`.

    Args:
      opt_state: the state of the transform, or of a whole chain that holds it.
      step: the step of the update that follows.
      axis_name: the mapped axis of the nodes; that of the transform if not given.
      params: the parameters that the user holds; under overlap they are not needed.

    Raises:
      ValueError: if the exchange of this algorithm needs the update of its step (`sgp`: use
        `order="combine-while-adapting"`), if `params` are missing, or as `sgp` when traced.

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
    accumulation = accumulation_plan(opt_state)
    if isinstance(step, int | np.integer) and not accumulation.makes_update(step):
        raise ValueError(
            f"step must be one that makes an update, the last of {accumulation.every}, got {step}: "
            "the others exchange nothing. Leave the exchange and received out there."
        )
    step = accumulation.update_number(step)
    assert state.schedule is not None
    wire = state.wire if axis_name is None else state.wire._replace(axis_name=axis_name)
    require_step(step, wire.axis_name)
    if not state.plan.overlap and params is None:
        raise ValueError(
            "params must be given to the exchange of an algorithm that mixes them, got None: call "
            "gx.exchange(opt_state, step, params=params)."
        )
    # What is mixed, and not the rest of the state, which may be large.
    state = GossipState(
        state.count,
        state.weight,
        in_flight=state.in_flight,
        plan=state.plan,
        mask=state.mask,
        residual=None if state.plan.overlap else state.residual,
    )
    params = None if state.plan.overlap else gossiped(params, state)
    specs = shard_specs(opt_state)
    if specs is None:
        if inner_axes(wire.axis_name):
            raise ValueError(
                "opt_state must be the state of the whole chain, with that of gx.sharded, where a "
                "node has further axes, got the gossip state inside: its specs are needed."
            )
        if isinstance(state.in_flight, PushSum):
            return exchange_parts(state, params, step, wire, split_messages(state))
        return _exchange(state, params, step, wire)
    like = state.in_flight.x if params is None else params
    run = partial(exchange_parts, wire=wire, pieces=split_messages(state))
    args: tuple[Any, ...] = (state, params, step)
    if isinstance(step, int | np.integer):  # it must stay known when traced
        run = partial(run, step=step)
        args = (state, params)
    weight = None if state.weight is None else PartitionSpec()
    out_specs = PushSum(weight, specs.of(like, like))
    return on_shards(run, specs, wire.axis_name, specs.of(args, like), out_specs)(*args)


def split_messages(state: GossipState) -> list[range]:
    """The leaves of messages like the parameters that travel in each of the steps of an overlap.

    They depend on whole leaves, and not on how these are sharded inside a node.
    """
    if not isinstance(state.in_flight, PushSum):
        return []
    leaves = jax.tree.leaves(state.in_flight.x)
    return split_leaves(leaves, max(1, min(state.overlap, len(leaves))))


def exchange_parts(
    state: GossipState, params: Any, step: StepLike, wire: Wire, pieces: list[range]
) -> PushSum:
    """`exchange` for a device of several in a node, with messages like the parameters.

    Under overlap a message travels in pieces, `split_messages`, of whole leaves: what of it has
    travelled is then known without knowing how it is sharded.
    """
    if not state.overlap:
        received = _exchange(state, params, step, wire)
        assert isinstance(received, PushSum)
        return received
    last_round = (step - 1) // state.overlap
    chunk = (step - 1) % state.overlap
    key = wire.make_key(state.count)

    def send(leaves: range, mass: PushSum) -> PushSum:
        part = PushSum(mass.weight if not leaves.start else None, pick(mass.x, leaves))
        layout = Layout(part)
        assert state.schedule is not None
        buffers = at_round(
            lambda round_, buffers: [
                deliver(buffer, round_, wire, fold_in(key, i)) for i, buffer in enumerate(buffers)
            ],
            state.schedule,
            last_round,
            wire.axis_name,
            layout.pack(part),
        )
        received = layout.unpack(buffers)
        weight = mass.weight if leaves.start else received.weight
        return PushSum(weight, merge(mass.x, received.x, leaves))

    mass = jax.tree.map(lambda leaf: as_varying(leaf, wire.axis_name), state.in_flight)
    branches = [partial(send, leaves) for leaves in pieces]
    branches += [lambda mass: mass] * (state.overlap - len(pieces))
    if isinstance(chunk, int | np.integer):
        return branches[chunk](mass)
    return jax.lax.switch(chunk, branches, mass)


def _exchange(state: GossipState, params: Any, step: StepLike, wire: Wire) -> Received:
    assert state.schedule is not None
    if not state.overlap:
        x, weight = mix(
            numerators(params, state),
            state.weight,
            state.schedule,
            step,
            **wire.arguments(),
            key=wire.make_key(state.count),
        )
        return PushSum(weight, x)
    last_round, chunk = (step - 1) // state.overlap, (step - 1) % state.overlap
    buffers = state.in_flight.buffers
    key = wire.make_key(state.count)
    received = at_round(
        lambda round_, rows: [
            deliver(row, round_, wire, fold_in(key, i)) for i, row in enumerate(rows)
        ],
        state.schedule,
        last_round,
        wire.axis_name,
        [jax.lax.dynamic_index_in_dim(buffer, chunk, keepdims=False) for buffer in buffers],
    )
    return InFlight(
        tuple(
            _replace_row(as_varying(buffer, wire.axis_name), row, chunk)
            for buffer, row in zip(buffers, received, strict=True)
        )
    )


def _replace_row(buffer: jax.Array, row: jax.Array, index: StepLike) -> jax.Array:
    """`buffer` `[rows, length]` with another row; on accelerators in place.

    On CPU a selection: there XLA may fuse an update in place with the permutation of a row, which
    under vmap reads the same buffer, so that nodes read what others have just written.
    """
    if len(buffer) == 1:
        return row[None]

    def select(buffer: jax.Array, row: jax.Array) -> jax.Array:
        is_row = jax.lax.broadcasted_iota(jnp.int32, buffer.shape, 0) == index
        return jnp.where(is_row, jnp.broadcast_to(row, buffer.shape), buffer)

    def update(buffer: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(buffer, row, index, 0)

    return jax.lax.platform_dependent(buffer, row, cpu=select, default=update)
