"""The wrapper of all gossip transforms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.frame.chain import require_updates_numbered_here
from gossipjax.algorithms.frame.exchange import Received, exchange
from gossipjax.algorithms.frame.parts import exchange_on_parts
from gossipjax.algorithms.frame.rounding import as_update, predict, residuals
from gossipjax.algorithms.frame.state import (
    ExchangePlan,
    Extra,
    GossipState,
    InFlight,
    PushSum,
    add,
    debias,
    numerators,
)
from gossipjax.collectives import StepLike, cond, default_step, vary
from gossipjax.last import DESCENDED, PARAMS, UPDATES, mark
from gossipjax.sharding import require_whole


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
    in their types, counts, and keeps residuals if `init` made some. `update(skip_exchange=True)`
    only adds the updates to the numerators: for an outer optimizer that averages over all nodes.

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
        skip_exchange: bool = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        params = mark(params, PARAMS)
        if params is None:
            raise ValueError(
                f"the params of {name} must be given, as it mixes them, got None: call "
                "tx.update(updates, state, params)."
            )
        own_state = require_own_state(name, plan, state)
        require_updates_numbered_here(plan, step)
        require_whole(name, plan.wire.axis_name)
        step = default_step(step, own_state.count, plan.wire.axis_name)
        require_state_of_params(name, init, params, own_state)
        require_like(params, updates, f"the updates of {name}")
        x = numerators(params, own_state)
        if plan.takes_gradients:
            updates = mark(updates, DESCENDED)
        if skip_exchange:
            result = Combined(add(x, updates), own_state)
        else:
            if plan.exchanges_early and received is None:
                received = exchange(own_state, step, params=params)
            require_received(name, plan, received)
            result = Combined(*combine(x, updates, own_state, step, received))
        updates, new_state = _finish(name, params, own_state, x, result)
        return mark(updates, UPDATES), new_state

    return exchange_on_parts(init, update, plan.wire.axis_name)


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


def update_if(
    accept: bool | jax.Array, update: Callable[[], Any], inner_state: Any, axis_name: str
) -> Any:
    """`update()`, or zeros in its types and the old state; decided when traced where it can be."""

    def reject() -> Any:
        expected = jax.eval_shape(update)
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), expected[0])
        return vary((zeros, inner_state), axis_name)

    return cond(accept, lambda: vary(update(), axis_name), reject)


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


def _specs(tree: Any, name: str = "") -> list[str]:
    """The types and shapes of the leaves, with their names where they have some."""
    if isinstance(tree, dict) and all(isinstance(part, Extra) for part in tree.values()):
        return [spec for key, part in sorted(tree.items()) for spec in _specs(part, f"{key} ")]
    leaves = jax.tree.leaves(tree)
    return [f"{name}{jnp.result_type(leaf)} {list(jnp.shape(leaf))}" for leaf in leaves]


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
