"""The state of all gossip transforms: arrays, and its `ExchangePlan` as static data.

N nodes; `[...]` is the shape of one node's array. Every transform that exchanges has a state that
answers for itself (`Exchanging`), so nobody asks which algorithm it belongs to.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gossipjax.collectives import (
    StepLike,
    accumulation_dtype,
    deliver,
    mix,
    require_floats,
    require_step,
    upcast,
    vary,
)
from gossipjax.exchanges.fragments import Fragment, merge, pick, split_leaves
from gossipjax.exchanges.mask import gossiped, make_mask
from gossipjax.exchanges.model import add, debias, numerators, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan, Plan
from gossipjax.serialization import register_with_flax, written_by_flax
from gossipjax.sharding import Specs, on_shards
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire

OnResize = Literal["average", "max", "first", "restart"]


class Exchanging(abc.ABC):
    """Says what the library asks the state of a transform that exchanges.

    Register the type of such a state here: `@Exchanging.register`.

    A state that mixes models contains one `GossipState`. A transform that wraps a chain without
    gossip ends it by `move_locally`, whose state keeps what 16-bit parameters round away.

    Attributes:
      plan: the `Plan` of the exchange.
      mixes_models: whether models are exchanged; False for an average of gradients.
      inner: the state of the chain that the transform wraps; None if it wraps none.
    """

    plan: Plan
    mixes_models: bool
    inner: Any

    @abc.abstractmethod
    def start_exchange(
        self, step: StepLike, params: Any, specs: Specs | None, axis_name: str | None
    ) -> Any:
        """Runs the exchange that `update(..., step=step, received=)` takes; see `gx.exchange`.

        `specs` say how arrays are sharded inside a node.
        """

    @abc.abstractmethod
    def take_local_step(self, params: Any, updates: Any) -> Any:
        """Returns the model after `updates`, the local half of a step, before any exchange."""

    @abc.abstractmethod
    def weigh(self, shares: np.ndarray) -> Any:
        """Multiplies each model that the state keeps, `[N, ...]`, by the share of its node.

        If a run goes on with another number of nodes, they start from the mean of the results.
        """


class PushSum(NamedTuple):
    """A push-sum pair: the weight `w`, None for an algorithm without one, and the numerator `x`."""

    weight: Any
    x: Any


@written_by_flax
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["on_resize", "is_mass"]
)
@dataclasses.dataclass(frozen=True)
class Extra:
    """A part of the state that only one algorithm keeps."""

    value: Any  # a pytree `[...]`
    # What a new number of nodes starts with; with "restart", what `init` makes of the new model.
    on_resize: OnResize = "average"
    is_mass: bool = False  # whether `gx.total_mass` adds `value`, the same on all nodes, once


@Exchanging.register
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
        """Shows the shapes of scalars, the bytes of other arrays, and the schedule, in one line."""
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
        """The number of steps between sending a message and using it."""
        return self.plan.overlap

    @property
    def wire(self) -> Wire:
        """The axes and the form of messages."""
        return self.plan.wire

    def kept(self, name: str) -> Any:
        """Returns the value of the part of `extra` with this name."""
        return self.extra[name].value

    def keep(self, **values: Any) -> GossipState:
        """Returns the state with new values of the parts of `extra` with these names."""
        parts = {
            name: dataclasses.replace(self.extra[name], value=value)
            for name, value in values.items()
        }
        return self._replace(extra=self.extra | parts)

    inner = None
    mixes_models = True

    def start_exchange(
        self, step: StepLike, params: Any, specs: Specs | None = None, axis_name: str | None = None
    ) -> PushSum:
        """Runs the exchange whose result `update` takes as `received`.

        The exchange needs nothing that `step` computes, so gradients can be computed meanwhile.
        Under overlap it delivers messages that were sent before; otherwise it mixes the models. If
        `specs` are given, each device of a node exchanges its shards.
        """
        axis_name = axis_name or self.wire.axis_name
        wire = self.wire._replace(axis_name=axis_name)
        plan = dataclasses.replace(self.plan, wire=wire)
        require_step(step, axis_name)
        if not plan.overlap and params is None:
            raise ValueError(
                "params must be given to the exchange of an algorithm that mixes them, got None: "
                "call gx.exchange(opt_state, step, params=params)."
            )
        params = None if plan.overlap else gossiped(params, self)
        # The rest of the state, which may be large, does not become an argument of `run`.
        residual = None if plan.overlap else self.residual
        state = self._replace(residual=residual, extra=None, plan=plan)
        run = partial(GossipState._exchange_shards, pieces=self._split_messages())
        if specs is None:
            return run(state, params, step)
        like = self.in_flight.x if params is None else params  # a tree that `specs` are for
        args = (state, params, step)
        weight = None if self.weight is None else PartitionSpec()
        out_specs = PushSum(weight, specs.of(like, like))
        return on_shards(run, specs, axis_name, specs.of(args, like), out_specs)(*args)

    def _split_messages(self) -> list[Fragment]:
        """Cuts a message into pieces of about as many bytes, one for each step of the overlap.

        A piece consists of whole leaves, so it is made before devices see only shards of them.
        """
        if not self.overlap:
            return []
        leaves = jax.tree.leaves(self.in_flight.x)
        return split_leaves(leaves, max(1, min(self.overlap, len(leaves))))

    def _exchange_shards(self, params: Any, step: StepLike, pieces: list[Fragment]) -> PushSum:
        """Runs `start_exchange` on one device of a node, which may have shards of the arrays.

        Mixes the models; with overlap, delivers a piece of the messages that are in flight.
        """
        if not self.overlap:
            x, weight = mix_once(numerators(params, self), self.weight, self, step)
            return PushSum(weight, x)

        wire = self.wire
        schedule: Any = self.schedule
        # The messages of a round are delivered piece by piece, in the steps after it.
        last_round = (step - 1) // self.overlap
        piece_number = (step - 1) % self.overlap

        def deliver_piece(leaves: Fragment, mass: PushSum) -> PushSum:
            """Replaces one piece of what was sent by what was received."""
            # The weight travels with the first leaf.
            part = PushSum(mass.weight if 0 in leaves else None, pick(mass.x, leaves))
            received = deliver(part, schedule, last_round, wire, wire.make_key(self.count))
            weight = received.weight if 0 in leaves else mass.weight
            return PushSum(weight, merge(mass.x, received.x, leaves))

        mass = vary(self.in_flight, wire.axis_name)
        # If a model has fewer leaves than there are steps, nothing travels in the last steps.
        branches = [partial(deliver_piece, leaves) for leaves in pieces]
        branches += [lambda mass: mass] * (self.overlap - len(pieces))
        if len(branches) == 1:
            return branches[0](mass)
        if isinstance(piece_number, int | np.integer):
            return branches[piece_number](mass)
        return jax.lax.switch(piece_number, branches, mass)

    def take_local_step(self, params: Any, updates: Any) -> Any:
        """Returns the model `(x + u) / w`, with the state's numerators `x` and weight `w`."""
        return debias(add(numerators(params, self), updates), self.weight)

    def weigh(self, shares: np.ndarray) -> GossipState:
        """Returns the state unchanged: numerators `x = w z` contain the weight already."""
        del shares
        return self


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
    # The weight is made from a parameter, so JAX's type of it says that it varies over the nodes if
    # the parameters' types say so: a scan needs a type that stays the same.
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


def mix_once(tree: Any, weight: Any, state: GossipState, step: StepLike) -> tuple[Any, Any]:
    """Mixes once, by the round of `step` in the plan of `state`: returns `P x` and `P w`.

    `tree` is `x`, and `weight` is the push-sum weight `w`; if it is None, so is the second result.
    """
    key = state.wire.make_key(state.count)
    return mix(tree, weight, state.plan.schedule, step, **state.wire.arguments(), key=key)


def mass_in_flight(params: optax.Params, state: GossipState | None) -> PushSum:
    """Returns the weight and the numerators `x` of the messages of this node that are in flight.

    `x` is like `params`, float32 at least; zeros if nothing is in flight. The weight is None if
    nothing is in flight, or messages carry no weight.
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


def _show(leaf: Any) -> str:
    """Returns a short text for `repr`: the shape of an array, and other values as they are."""
    return str(list(leaf.shape)) if hasattr(leaf, "shape") else reprlib.repr(leaf)
