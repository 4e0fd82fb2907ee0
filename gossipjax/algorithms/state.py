"""What all gossip transforms share: their state, how it is read, and the frame around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.buffers import Layout, require_floats, wide, widened
from gossipjax.collectives import Step, Wire, default_step
from gossipjax.schedule import Schedule


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["buffers"],
    meta_fields=["schedule", "overlap", "wire"],
)
@dataclasses.dataclass(frozen=True)
class InFlight:
    """What a node has sent and not yet used: packed messages, and how they travel.

    Attributes:
      buffers: one array `[overlap, length]` per dtype: numerators and, first of all, the weight. A
        row is exchanged at a time; those that are hold what has arrived.
      schedule, overlap, wire: static: the rounds of the messages, the steps that one takes, the
        axes and the type in which it travels.
    """

    buffers: tuple[jax.Array, ...]
    schedule: Schedule
    overlap: int
    wire: Wire


class GossipState(NamedTuple):
    """What a gossip transform keeps for one node; a field that an algorithm does not need is `()`.

    Attributes:
      count: int32 scalar, the number of updates so far.
      weight: the push-sum weight `w`, a scalar, float32 at least.
      numerator: the push-sum numerator `x`, float32 at least, like the parameters. Kept, for all
        leaves, if any parameter is narrower than float32 or the parameters are an older model;
        otherwise it is `w * z`.
      in_flight: numerators and weight that were sent and not yet used, an `InFlight`.
      older: older models, `[D, ...]` like the parameters: a ring buffer (`adpsgd`).
      center: the center variable, float32 at least, like the parameters (`easgd`).
    """

    count: Any
    weight: Any = ()
    numerator: Any = ()
    in_flight: Any = ()
    older: Any = ()
    center: Any = ()


Combine = Callable[[Any, Any, GossipState, Step], tuple[Any, GossipState]]


def init_state(params: Any, push_sum: bool, keep_numerator: bool = False) -> GossipState:
    """The state at the start: weight 1, and wide numerators where parameters are narrow.

    The numerators are copies, so that parameters and state can both be donated.
    """
    require_floats(params, "params")
    leaves = jax.tree.leaves(params) or [np.float32()]
    dtypes = [jnp.result_type(leaf) for leaf in leaves]
    narrow = any(dtype != wide(dtype) for dtype in dtypes)
    # Like a parameter, so that it varies over the nodes by its type too and can be scanned over.
    weight = jnp.ones_like(leaves[0], shape=(), dtype=np.result_type(*map(wide, dtypes)))
    return GossipState(
        count=jnp.zeros((), jnp.int32),
        weight=weight if push_sum else (),
        numerator=wide_copies(params) if narrow or keep_numerator else (),
    )


def wide_copies(params: Any) -> Any:
    """Copies of the leaves, float32 at least."""
    return jax.tree.map(lambda x: jnp.array(x, wide(jnp.result_type(x)), copy=True), params)


def numerators(params: Any, state: GossipState | None) -> Any:
    """`x`, float32 at least: what the state keeps, or else `w * z`."""
    if state is not None and not is_empty(state.numerator):
        return state.numerator
    z = widened(params)
    if state is None or is_empty(state.weight):
        return z
    weight = state.weight
    return jax.tree.map(lambda leaf: weight.astype(leaf.dtype) * leaf, z)


def in_flight(params: Any, state: GossipState | None) -> tuple[Any, Any]:
    """Numerators (like `params`, wide) and weight that this node's messages in flight carry.

    Zeros where there are none; the weight is None for an algorithm that has no weights.
    """
    zeros = jax.tree.map(jnp.zeros_like, widened(params))
    if state is None or is_empty(state.in_flight):
        return zeros, None
    layout, buffers = message_layout(zeros, state), state.in_flight.buffers
    sizes = [-(-size // state.in_flight.overlap) * state.in_flight.overlap for size in layout.sizes]
    if sizes != [buffer.size for buffer in buffers]:
        raise ValueError(
            "the messages in flight are of other parameters: where the transform is masked, pass "
            "the part that it gossips."
        )
    weight, x = layout.unpack(buffers)
    return x, weight


def message_layout(x: Any, state: GossipState) -> Layout:
    """How numerators and weight lie in a message: the weight comes first."""
    return Layout((None if is_empty(state.weight) else state.weight, x))


def debias(x: Any, weight: jax.Array) -> Any:
    """`z = x / w`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), x)


def add(x: Any, updates: Any) -> Any:
    """`x + u`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf, u: leaf + jnp.asarray(u, leaf.dtype), x, updates)


def land(params: Any, new: Any) -> Any:
    """The update with which `optax.apply_updates` lands on `new`, rounded to the parameters' type.

    It is `wide(rounded new) - wide(params)`: exact unless the cancellation exceeds 2^24.
    """

    def difference(z: Any, target: jax.Array) -> jax.Array:
        rounded = target.astype(jnp.result_type(z)).astype(target.dtype)
        return rounded - jnp.asarray(z, target.dtype)

    return jax.tree.map(difference, params, new)


def gossip_transform(
    name: str, axis_name: str, init: optax.TransformInitFn, combine: Combine
) -> optax.GradientTransformationExtraArgs:
    """The frame of every algorithm: reads the numerators and lands on what `combine` makes.

    `combine(x, updates, state, step)` returns the new parameters, float32 at least, and the state
    with its new weight and numerators. The count is kept here, and numerators are only if `init`
    made some.

    Raises (when traced):
      ValueError: if the axis is missing, `params` are not passed to `update`, or the state is
        another transform's.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, step: Step | None = None, **extra_args: Any
    ) -> tuple[Any, GossipState]:
        del extra_args
        if params is None:
            raise ValueError(
                f"{name} mixes the parameters and needs them: tx.update(updates, state, params)."
            )
        if not isinstance(state, GossipState):
            raise ValueError(f"{name} was given the state of another: {type(state).__name__}.")
        step = default_step(step, state.count, axis_name)
        new, after = combine(numerators(params, state), updates, state, step)
        return land(params, new), after._replace(
            count=optax.safe_increment(state.count),
            numerator=() if is_empty(state.numerator) else after.numerator,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def find_state(opt_state: Any) -> GossipState | None:
    """The gossip state inside the state of a whole chain; None if there is none.

    Raises:
      ValueError: if there are several.
    """
    found = [
        leaf
        for leaf in jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, GossipState))
        if isinstance(leaf, GossipState)
    ]
    if len(found) > 1:
        raise ValueError(
            f"this optimizer state holds {len(found)} gossip states; a chain has one gossip "
            "transform. Pass the part of the state that is meant."
        )
    return found[0] if found else None


def push_sum_weight(state: GossipState | None) -> Any:
    """`w`; 1 for algorithms without a weight."""
    if state is None or is_empty(state.weight):
        return jnp.ones((), jnp.float32)
    return state.weight


def is_empty(field: Any) -> bool:
    """Whether an algorithm does not need this field of its state."""
    return isinstance(field, tuple) and not field
