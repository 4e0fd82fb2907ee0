"""The wrapper of all gossip transforms, and the exchange that can run before the rest of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gossipjax.algorithms.frame.chain import gossip_state
from gossipjax.algorithms.frame.masks import gossiped
from gossipjax.algorithms.frame.rounding import as_update, predict, residuals
from gossipjax.algorithms.frame.state import (
    ExchangePlan,
    GossipState,
    InFlight,
    PushSum,
    debias,
    numerators,
)
from gossipjax.algorithms.outer.fragments import merge, pick, split_leaves
from gossipjax.collectives import (
    Layout,
    StepLike,
    as_varying,
    at_round,
    default_step,
    deliver,
    mix,
    require_step,
)
from gossipjax.sharding import on_shards, require_whole, shard_specs
from gossipjax.wire import Wire, fold_in

Received = InFlight | PushSum


class Combined(NamedTuple):
    """The result of a `combine` function.

    Attributes:
      x: the new numerators, like the parameters, float32 at least.
      state: the state with its new weight and what else the algorithm keeps.
      params: the parameters that the user holds from now on, float32 at least, if they are not the
        latest model `x / w`; `init` must then keep a residual.
    """

    x: Any
    state: GossipState
    params: Any = None


Combine = Callable[
    [Any, optax.Updates, GossipState, StepLike, Any], Combined | tuple[Any, GossipState]
]


def gossip_transform(
    name: str, plan: ExchangePlan, init: optax.TransformInitFn, combine: Combine
) -> optax.GradientTransformationExtraArgs:
    """Wraps `combine` as an optax transform that goes last in a chain.

    `combine(x, updates, state, step, received)` gets the numerators and returns a `Combined`: the
    new ones, and the state with its new weight. `received` is the result of `exchange` where the
    plan exchanges early, else None. The wrapper returns the update that reaches the new parameters,
    in their types, counts, and keeps residuals if `init` made some.

    Raises (when traced):
      ValueError: if the axis is missing, `params` are not passed to `update`, the updates are not
        like them, the state was not made for them by this transform (another schedule, overlap or
        wire, another algorithm), `received` is not what `exchange` returns, or `combine` does not
        return new numerators like the old ones.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        received: Received | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        if params is None:
            raise ValueError(
                f"the params of {name} must be given, as it mixes them, got None: call "
                "tx.update(updates, state, params)."
            )
        own_state = require_own_state(name, plan, state)
        require_whole(name, plan.wire.axis_name)
        step = default_step(step, own_state.count, plan.wire.axis_name)
        require_state_of_params(name, init, params, own_state)
        require_like(params, updates, f"the updates of {name}")
        if plan.exchanges_early and received is None:
            received = exchange(own_state, step, params=params)
        require_received(name, plan, received)
        x = numerators(params, own_state)
        result = Combined(*combine(x, updates, own_state, step, received))
        return _finish(name, params, own_state, x, result)

    return optax.GradientTransformationExtraArgs(init, update)


def _finish(
    name: str, params: Any, old: GossipState, old_x: Any, result: Combined
) -> tuple[optax.Updates, GossipState]:
    """The update to the new parameters, and the new state with its residuals."""
    require_like(old_x, result.x, f"the numerators that combine of {name} returns", dtypes=True)
    if result.params is not None and old.residual is None:
        raise ValueError(
            f"the init of {name} must keep a residual, init_state(..., keep_residual=True), as its "
            "combine returns parameters that are not the latest model, got a state without one."
        )
    model = debias(result.x, result.state.weight)
    updates = as_update(params, model if result.params is None else result.params)
    residual = None if old.residual is None else residuals(model, predict(params, updates))
    count = optax.safe_increment(old.count)
    return updates, result.state._replace(count=count, residual=residual)


def require_like(expected: Any, tree: Any, name: str, dtypes: bool = False) -> None:
    """Raises `ValueError` unless `tree` has the structure, shapes and, on demand, types given."""

    def describe(leaf: Any) -> str:
        shape = list(jnp.shape(leaf))
        return f"{jnp.result_type(leaf)} {shape}" if dtypes else f"shape {shape}"

    def compare(path: Any, like: Any, leaf: Any) -> None:
        if describe(like) != describe(leaf):
            raise ValueError(
                f"{name} must be like the parameters, {describe(like)} at "
                f"{jax.tree_util.keystr(path) or 'their only leaf'}, got {describe(leaf)}."
            )

    structure = jax.tree.structure(tree)
    try:
        is_like = structure.num_leaves == jax.tree.structure(expected).num_leaves
        jax.tree.map(lambda like, part: None, expected, tree)
    except (ValueError, TypeError):
        is_like = False
    if not is_like:
        raise ValueError(
            f"{name} must have the structure of the parameters, {jax.tree.structure(expected)}, "
            f"got {structure}."
        )
    jax.tree_util.tree_map_with_path(compare, expected, tree)


def require_state_of_params(
    name: str, init: optax.TransformInitFn, params: Any, state: GossipState
) -> None:
    """Raises `ValueError` unless `init` makes a state of these shapes and types of `params`."""
    expected = jax.eval_shape(init, params)
    assert isinstance(expected, GossipState)
    for field in ("weight", "residual", "in_flight", "extra"):
        expected_specs = _specs(getattr(expected, field))
        actual_specs = _specs(getattr(state, field))
        if expected_specs != actual_specs:
            raise ValueError(
                f"the state of {name} must be made for these parameters by this algorithm, with "
                f"{field} {_summarize(expected_specs)}, got {_summarize(actual_specs)}: make it by "
                "tx.init(params) of the same chain; from other parameters or another algorithm, "
                "go on by gossipjax.checkpoint.change_nodes."
            )


def _specs(tree: Any) -> list[str]:
    return [f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(tree)]


def _summarize(specs: list[str]) -> str:
    """At most three of the specs, for an error message."""
    return ", ".join(specs[:3] + ["..."] * (len(specs) > 3)) or "None"


def require_own_state(name: str, plan: ExchangePlan, state: Any) -> GossipState:
    """Returns `state`; raises `ValueError` unless it is a `GossipState` made for this plan."""
    if not isinstance(state, GossipState):
        raise ValueError(
            f"the state of {name} must be a gx.GossipState, got {type(state).__name__}, the state "
            "of another transform: make it by tx.init(params) of the same chain."
        )
    for field in dataclasses.fields(plan):
        expected = getattr(plan, field.name)
        actual = getattr(state.plan, field.name)
        if expected != actual:
            raise ValueError(
                f"the state of {name} must have been made with its {field.name}, {expected}, got "
                f"one of {actual}: messages and rounds would not match. Switch schedules by "
                "gx.topology.piecewise, or go on from the average model by "
                "gossipjax.checkpoint.change_nodes."
            )
    return state


def require_received(name: str, plan: ExchangePlan, received: Any) -> None:
    """Raises `ValueError` unless `received` is what `exchange` returns for this plan."""
    if not plan.exchanges_early:
        if received is not None:
            raise ValueError(
                f"received must be left out for {name}, whose exchange needs the update of its "
                "step, got one."
            )
        return
    expected = InFlight if plan.overlap else PushSum
    if not isinstance(received, expected):
        raise ValueError(
            f"received must be what gx.exchange returns, got {received!r}: call "
            "gx.exchange(opt_state, step, params=params)."
        )


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
        return _exchange(state, params, step, wire)
    like = state.in_flight.x if params is None else params
    options = {"wire": wire, "pieces": split_messages(state)}
    if isinstance(step, int | np.integer):  # it must stay known when traced
        exchange_parts_at, args = partial(exchange_parts, step=step, **options), (state, params)
    else:
        exchange_parts_at, args = partial(exchange_parts, **options), (state, params, step)
    weight = None if state.weight is None else PartitionSpec()
    out_specs = PushSum(weight, specs.of(like, like))
    return on_shards(exchange_parts_at, specs, wire.axis_name, specs.of(args, like), out_specs)(
        *args
    )


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
    last_round, chunk = (step - 1) // state.overlap, (step - 1) % state.overlap
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
