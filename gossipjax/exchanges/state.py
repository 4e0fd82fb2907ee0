"""The state of all gossip transforms, and the plan of their exchange in it.

N nodes; `[...]` is the shape of one node's array. The state is a `GossipState`: arrays, and the
`ExchangePlan` (schedule, overlap and wire) as static data, so other functions can read the plan.

The model is `z + r`: parameters `z` and a residual `r` in float32. `as_update` makes the update
from `z` to another model, `predict` returns the parameters that the user will then hold, and
`residuals` returns what these parameters lack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import (
    StepLike,
    accumulation_dtype,
    clipped_node_mean,
    copy_for_leaves,
    mix,
    node_mean,
    require_floats,
    upcast,
)
from gossipjax.exchanges.mask import make_mask
from gossipjax.serialization import register_with_flax, written_by_flax
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import Wire, round_to

DEFAULT_WIRE = Wire()
MAX_STEPS = 2**16  # of one cycle of all that is exchanged

Order = Literal["combine-while-adapting", "adapt-then-combine"]
OnResize = Literal["average", "max", "first", "restart"]


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """When, with whom and in which form an algorithm exchanges: static data of its state."""

    schedule: Schedule | None = None  # None if all nodes exchange at once
    overlap: int = 0  # steps between sending a message and using it
    wire: Wire = DEFAULT_WIRE
    period: int = 1  # steps from one exchange to the next, if `schedule` is None
    order: Order = "adapt-then-combine"
    models: int = 1  # trees like the parameters in a message
    takes_gradients: bool = False  # whether the algorithm is the optimizer
    # Whether an update of zeros moves the state too, or the model beyond the exchange. Every update
    # must then carry a gradient.
    moves_by_zeros: bool = False

    @property
    def exchanges_early(self) -> bool:
        """Whether the exchange of a step needs nothing that the step computes."""
        return self.overlap > 0 or self.order == "combine-while-adapting"

    @functools.cached_property
    def schedule_by_step(self) -> Schedule | None:
        """The schedule of rounds by step: `schedule.every(overlap)`."""
        return None if self.schedule is None else self.schedule.every(max(1, self.overlap))

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on the exchanges repeat, and after how many steps."""
        schedule = self.schedule_by_step
        if schedule is None:
            return 0, self.period
        *others, last = schedule.segments
        return (last.start + self.overlap if others else 0), len(last.cycle)

    def canonical_step(self, step: int) -> int:
        """The smallest step with the same compiled program as `step`; see `gx.canonical_step`."""
        step = require_int(step, "step", 0)
        if self.schedule_by_step is None:
            return step % self.period
        return self.schedule_by_step.canonical_step(step, self.overlap)

    @functools.cached_property
    def canonical_steps(self) -> tuple[int, ...]:
        """All values that `canonical_step` returns."""
        if self.schedule_by_step is None:
            return tuple(range(self.period))
        return tuple(self.schedule_by_step.canonical_steps(self.overlap))


class PushSum(NamedTuple):
    """A push-sum pair: the weight `w`, None for an algorithm without one, and the numerator `x`."""

    weight: Any
    x: Any


@written_by_flax
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["on_resize", "is_mass"],
)
@dataclasses.dataclass(frozen=True)
class Extra:
    """A part of the state that only one algorithm keeps."""

    value: Any  # a pytree `[...]`
    # How it survives a change of nodes; with "restart", `init` makes it from the average model.
    on_resize: OnResize = "average"
    is_mass: bool = False  # whether `value`, the same on all nodes, counts in `sum_i x_i`


class GossipState(NamedTuple):
    """State of a gossip transform for one node; a field that an algorithm does not need is None.

    Your parameters are `z`. The model is `z` plus a residual `r`: what rounding to the type of the
    parameters left over, or, for an algorithm whose parameters are an older model, the difference
    to the latest model.

        x = w (z + r)

    So the algorithm sees changes that you make to the parameters outside of the chain, in any type.

    Attributes:
      count: int32 scalar, the number of updates so far.
      weight: the push-sum weight `w`, a scalar, float32 at least.
      residual: `r`, float32 at least, like the parameters. All leaves have a residual if any
        parameter has less precision than float32, or the parameters are an older model; otherwise
        `r = 0`.
      in_flight: the `PushSum` of messages that were sent and not yet used, already scaled. Until a
        leaf travels, it is part of a message of this node, and afterwards of a received message.
      extra: a dict of `Extra` by name, the parts that only one algorithm keeps.
      plan: the `ExchangePlan`, static data: schedule, overlap and wire of the algorithm.
      mask: the `Mask`, static data, of a transform inside `optax.masked` or
        `optax.multi_transform`.

    >>> import gossipjax as gx
    >>> gx.sgp(gx.topology.ring(4)).init({"w": jnp.zeros(3)})
    GossipState(count [], weight [], ring(4): 4 nodes, period 1)
    """

    count: Any
    weight: Any = None
    residual: Any = None
    in_flight: Any = None
    extra: Any = None
    plan: Any = ExchangePlan()
    mask: Any = None

    def __repr__(self) -> str:
        scalars = {"count": self.count, "weight": self.weight}
        parts = [f"{k} {_show(leaf)}" for k, leaf in scalars.items() if leaf is not None]
        leaves = jax.tree.leaves((self.residual, self.in_flight, self.extra))
        arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
        parts += [f"{size:,} bytes in {len(arrays)} other arrays"] if arrays else []
        overlap, schedule = (getattr(self.plan, k, None) for k in ("overlap", "schedule"))
        parts += [f"overlap {overlap}"] if overlap else []
        parts += [repr(schedule)] if schedule else []
        return f"GossipState({', '.join(parts)})"

    @property
    def schedule(self) -> Schedule | None:
        """The rounds of the exchanges; None if all nodes exchange at once."""
        return self.plan.schedule

    @property
    def overlap(self) -> int:
        """Steps between sending a message and using it."""
        return self.plan.overlap

    @property
    def wire(self) -> Wire:
        """The axes and the form of messages."""
        return self.plan.wire

    def kept(self, name: str) -> Any:
        """The value of a part that the algorithm keeps."""
        return self.extra[name].value

    def keep(self, **values: Any) -> GossipState:
        """Returns the state with new values of parts that the algorithm keeps."""
        parts = {
            name: dataclasses.replace(self.extra[name], value=value)
            for name, value in values.items()
        }
        return self._replace(extra=self.extra | parts)


def _show(leaf: Any) -> str:
    return str(list(leaf.shape)) if hasattr(leaf, "shape") else reprlib.repr(leaf)


class ErrorFeedback(NamedTuple):
    """State of `allreduce` for one node: only the plan, unless its codec leaves something out."""

    count: Any = None  # int32 scalar, the number of averages so far
    error: Any = None  # `e`, like the gradients: what the codec has left out so far
    plan: Any = ExchangePlan()  # static


def init_state(
    params: Any,
    plan: ExchangePlan,
    *,
    push_sum: bool = False,
    keep_residual: bool = False,
    zeros: Mapping[str, OnResize] | None = None,
) -> GossipState:
    """Returns the state at the start: weight 1, and residuals of 0 if they are needed.

    `zeros` names the parts like the model that the algorithm keeps, 0 at the start, and says how a
    new number of nodes gets each.
    """
    register_with_flax()
    require_floats(params, "params")
    leaves = jax.tree.leaves(params) or [np.float32()]
    dtypes = [jnp.result_type(leaf) for leaf in leaves]
    is_low_precision = any(dtype != accumulation_dtype(dtype) for dtype in dtypes)
    # Like a parameter, so that it varies over the nodes by its type too and can be scanned over.
    dtype = np.result_type(*map(accumulation_dtype, dtypes))
    weight = jnp.ones_like(leaves[0], shape=(), dtype=dtype)
    extra = {name: Extra(zeros_like_model(params), rule) for name, rule in (zeros or {}).items()}
    return GossipState(
        count=jnp.zeros((), jnp.int32),
        weight=weight if push_sum else None,
        residual=zeros_like_model(params) if is_low_precision or keep_residual else None,
        extra=extra or None,
        plan=plan,
        mask=make_mask(params),
    )


def zeros_like_model(params: Any) -> Any:
    """Zeros like the leaves, float32 at least; leaves may be `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, dtype=accumulation_dtype(jnp.result_type(leaf))), params
    )


def widen(params: optax.Params) -> Any:
    """The parameters that the user holds, float32 at least; they stay rounded to their types."""
    return jax.tree.map(lambda wide, z: round_to(wide, jnp.result_type(z)), upcast(params), params)


def as_update(params: optax.Params, target: Any) -> optax.Updates:
    """Returns the update, in the types of `params`, from `params` to the rounded `target`.

    In full precision the update is `target - params`, rounded once. In a narrower type the update
    is also rounded to this type, and the difference is a residual.
    """

    def difference(z: Any, wide: jax.Array, leaf: jax.Array) -> jax.Array:
        dtype = jnp.result_type(z)
        return round_to(round_to(leaf, dtype) - wide, dtype).astype(dtype)

    return jax.tree.map(difference, params, widen(params), target)


def predict(params: optax.Params, updates: optax.Updates) -> Any:
    """The parameters that `optax.apply_updates` will make, float32 at least."""

    def after(z: Any, wide: jax.Array, u: jax.Array) -> jax.Array:
        dtype = jnp.result_type(z)
        return round_to(wide + round_to(u.astype(wide.dtype), dtype), dtype)

    return jax.tree.map(after, params, widen(params), updates)


def residuals(model: Any, z: Any) -> Any:
    """Returns `r = model - z`, leaf by leaf, of two trees of float32 at least.

    If `z` is not finite, `r` is 0, so only the parameters contain values that are not finite.
    """
    return jax.tree.map(
        lambda leaf, z: jnp.where(jnp.isfinite(z), leaf - z, jnp.zeros_like(leaf)), model, z
    )


def models(params: optax.Params, state: GossipState | None) -> Any:
    """The latest models `z + r`, float32 at least."""
    z = widen(params)
    if state is None or state.residual is None:
        return z
    return jax.tree.map(jnp.add, z, state.residual)


def numerators(params: optax.Params, state: GossipState | None) -> Any:
    """The numerators `x = w (z + r)`, float32 at least."""
    if state is None or state.weight is None:
        return models(params, state)
    return jax.tree.map(
        lambda leaf, w: w.astype(leaf.dtype) * leaf,
        models(params, state),
        copy_for_leaves(state.weight, params, state.plan.wire.axis_name),
    )


def debias(x: Any, weight: jax.Array | None, axis_name: str | None = None) -> Any:
    """Returns `z = x / w`, leaf by leaf, in the type of `x`; without a weight it returns `x`.

    For simulated nodes it is fastest if you give the name of the nodes' axis.
    """
    if weight is None:
        return x
    if axis_name is None:
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), x)
    weights = copy_for_leaves(weight, x, axis_name)
    return jax.tree.map(lambda leaf, w: leaf / w.astype(leaf.dtype), x, weights)


def push_sum_weight(state: GossipState | None) -> jax.Array:
    """The weight `w`; 1 for algorithms without a weight."""
    if state is None or state.weight is None:
        return jnp.ones((), jnp.float32)
    return state.weight


def add(x: Any, updates: optax.Updates) -> Any:
    """Returns `x + u`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf, u: leaf + jnp.asarray(u, leaf.dtype), x, updates)


def subtract(x: Any, updates: optax.Updates) -> Any:
    """Returns `x - u`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf, u: leaf - jnp.asarray(u, leaf.dtype), x, updates)


def scale(x: Any, factor: Any) -> Any:
    """Returns `factor x`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, x)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates` that also takes updates wider than the parameters, if JAX is strict.

    Gossip returns updates in the types of the parameters; a chain without gossip may not.
    """
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def common_model(params: Any, axis_name: str | None) -> Any:
    """A copy of the parameters, float32 at least; inside the axis, their mean over the nodes."""

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.zeros_like(leaf)
        return jnp.array(leaf, accumulation_dtype(jnp.result_type(leaf)), copy=True)

    model = jax.tree.map(copy, params)
    if axis_name is not None:
        with contextlib.suppress(ValueError):  # no such axis here: all nodes have these parameters
            model = _common_mean(model, axis_name)
    return model


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _common_mean(tree: Any, axis_name: str) -> Any:
    """`clipped_node_mean` with the derivative of the mean, as a minimum over an axis has none."""
    return clipped_node_mean(tree, axis_name)


@_common_mean.defjvp
def _common_mean_jvp(axis_name: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (tree,) = primals
    (tangent,) = tangents
    return _common_mean(tree, axis_name), node_mean(tangent, axis_name)


def mix_once(tree: Any, weight: Any, state: GossipState, step: StepLike) -> tuple[Any, Any]:
    """Returns `P x, P w` by the round of `step` in the plan of a state."""
    key = state.wire.make_key(state.count)
    return mix(tree, weight, state.plan.schedule, step, **state.wire.arguments(), key=key)
