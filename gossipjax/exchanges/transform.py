"""The wrapper of all gossip transforms, and the checks of their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import StepLike, default_step
from gossipjax.exchanges.model import (
    add,
    as_update,
    debias,
    numerators,
    predict,
    residuals,
    scale,
    subtract,
)
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, OnResize, PushSum, init_state, mix_once
from gossipjax.sharding import inner_axes, on_shards, require_whole, specs_here
from gossipjax.wire import Wire

State = TypeVar("State")


class Combined(NamedTuple):
    """The result of a `combine` function."""

    x: Any  # the new numerators, like the parameters, float32 at least
    state: GossipState  # with its new weight and the other values that the algorithm keeps
    # The user's new parameters, if these are not the latest model `x / w`. `init` keeps a residual.
    params: Any = None


Combine = Callable[..., Combined | tuple[Any, GossipState]]


def gossip_transform(
    name: str, plan: ExchangePlan, init: optax.TransformInitFn, combine: Combine
) -> optax.GradientTransformationExtraArgs:
    """Wraps `combine` as an optax transform that goes last in a chain.

    `combine(x, updates, state, step)` gets the numerators and returns a `Combined`. If the plan
    exchanges early, the fifth argument is the result of `exchange`. The wrapper returns the update
    from the old to the new parameters, counts, and keeps residuals if `init` made some. For an
    outer average over all nodes, `update(skip_exchange=True)` only adds the updates.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        received: PushSum | None = None,
        skip_exchange: bool = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Calls `combine` on the numerators; returns the update to its result, and the new state.

        `received` is the result of the exchange, if it was a separate program (`gx.exchange`).
        """
        del extra_args
        z = require_params(params, name)
        own_state = require_state(state, GossipState, name)
        require_plan(plan, own_state.plan, name)
        require_whole(name, plan.wire.axis_name)
        require_state_of_params(name, init, z, own_state)
        require_like(z, updates, f"the updates of {name}")
        step = default_step(step, own_state.count, plan.wire.axis_name)
        # Numerators are made from the user's parameters, so changes from outside the chain count.
        x = numerators(z, own_state)
        if skip_exchange:  # an outer average replaces all models after this update
            result = Combined(add(x, updates), own_state)
        else:
            if plan.exchanges_early and received is None:
                received = own_state.start_exchange(step, z)
            fifth_argument = (received,) if plan.exchanges_early else ()
            result = Combined(*combine(x, updates, own_state, step, *fifth_argument))
        # Gradients are taken at the user's parameters, so the parameters are de-biased.
        model = debias(result.x, result.state.weight, plan.wire.axis_name)
        updates = as_update(z, model if result.params is None else result.params)
        # The residual: what `optax.apply_updates` will lose by rounding, but the model contains.
        has_residual = own_state.residual is not None
        residual = residuals(model, predict(z, updates)) if has_residual else None
        count = optax.safe_increment(own_state.count)
        return updates, result.state._replace(count=count, residual=residual)

    return exchange_on_parts(init, update, plan.wire.axis_name)


def mix_updated(
    name: str, plan: ExchangePlan, *, push_sum: bool, damped: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Makes a transform that mixes by the plan's order, `x <- P (x + u)` or `x <- P x + u`.

    With `push_sum` it mixes the weight too. With `damped`, a node of a weight below 1 uses only a
    part of its updates, and holds back the rest.
    """

    def combine(
        x: Any, updates: Any, state: GossipState, step: StepLike, received: Any = None
    ) -> Combined:
        """Adds the updates to the numerators `x`, before or after the exchange."""
        weight = received.weight if plan.exchanges_early else state.weight
        if damped:
            # `u` is added to the numerator, so at weight w the model moves by u / w: a weight near
            # 0 would throw it far. The next update contains what is held back, so none is lost.
            waiting = add(state.kept("held_back"), updates)
            updates = scale(waiting, jnp.minimum(1, weight))
            state = state.keep(held_back=subtract(waiting, updates))
        if plan.exchanges_early:  # `received` is `P x, P w`: this exchange needs no update
            x = add(received.x, updates)
        else:
            x, weight = mix_once(add(x, updates), weight, state, step)
        return Combined(x, state._replace(weight=weight))

    zeros: dict[str, OnResize] = {"held_back": "average"} if damped else {}
    init = partial(init_state, plan=plan, push_sum=push_sum, zeros=zeros)
    return gossip_transform(name, plan, init, combine)


def move_locally(name: str, wire: Wire) -> optax.GradientTransformationExtraArgs:
    """Returns a transform that only adds the updates, `x <- x + u`, and exchanges nothing.

    `gx.outer` puts it at the end of a chain without gossip: its `GossipState` keeps what 16-bit
    parameters round away.
    """
    plan = ExchangePlan(wire=wire)

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        del step
        return Combined(add(x, updates), state)

    return gossip_transform(name, plan, partial(init_state, plan=plan), combine)


def exchange_on_parts(
    init: optax.TransformInitFn, update: Callable[..., Any], axis_name: str
) -> optax.GradientTransformationExtraArgs:
    """Makes a transform from `init` and `update`, which exchange over `axis_name`.

    Inside `gx.sharded` each device of a node runs both on its shards of the arrays, while the rest
    of the chain sees whole arrays, which XLA partitions. Elsewhere both run unchanged.
    """

    def init_shards(params: optax.Params) -> optax.OptState:
        """Runs `init` on each device with its shards of the parameters."""
        specs = specs_here()
        if specs is None:
            return init(params)
        specs.require(params, inner_axes(axis_name), may_repeat=True)
        in_specs = (specs.of(params, params),)
        out_specs = specs.of(jax.eval_shape(init, params), params)
        return on_shards(init, specs, axis_name, in_specs, out_specs)(params)

    def update_shards(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Runs `update` on each device with its shards of all arrays."""
        specs = specs_here()
        if specs is None:
            return update(updates, state, params, **extra_args)
        specs.require(updates, inner_axes(axis_name), may_repeat=True)
        step, received = (extra_args.get(name) for name in ("step", "received"))
        skips = bool(extra_args.get("skip_exchange"))
        if isinstance(state, GossipState) and state.overlap and received is None and not skips:
            # Messages are cut into pieces of whole leaves, of which devices see only shards.
            step = default_step(step, state.count, axis_name)
            received = state.start_exchange(step, params, specs)

        def update_device(updates: Any, state: Any, params: Any, step: Any, received: Any) -> Any:
            options = {"step": step, "received": received, "skip_exchange": skips}
            return update(updates, state, params, **options)

        args = (updates, state, params, step, received)
        in_specs = specs.of(args, updates)
        return on_shards(update_device, specs, axis_name, in_specs, in_specs[:2])(*args)

    return optax.GradientTransformationExtraArgs(init_shards, update_shards)


def require_choice(value: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raises `ValueError` if `value` is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.")


def require_number(
    value: Any, name: str, allowed: str, is_allowed: Callable[[float], bool]
) -> float:
    """Returns `value` as a float; raises `ValueError` unless it is real and `is_allowed`."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number or not is_allowed(float(value)):
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}.")
    return float(value)


def require_transform(
    tx: optax.GradientTransformation, name: str
) -> optax.GradientTransformationExtraArgs:
    """Returns `tx`, made to take extra arguments; raises `ValueError` if it is no transform."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation, got {type(tx).__name__}."
        )
    return optax.with_extra_args_support(tx)


def require_params(params: Any, name: str) -> Any:
    """Returns the parameters; raises `ValueError` if there are none."""
    if params is None:
        raise ValueError(
            f"the params of {name} must be given, as it averages models, got None: call "
            "tx.update(updates, state, params)."
        )
    return params


def require_state(state: Any, kind: type[State], name: str) -> State:
    """Returns `state`; raises `ValueError` unless it is of this kind."""
    if not isinstance(state, kind):
        raise ValueError(
            f"the state of {name} must be of type {kind.__name__}, got {type(state).__name__}, the "
            "state of another transform: make it by tx.init(params) of the same chain."
        )
    return state


def require_plan(expected: Any, actual: Any, name: str) -> None:
    """Raises `ValueError` if the plan in a state differs from the plan of the transform."""
    for field in (f for f in dataclasses.fields(expected) if f.compare):
        wanted = getattr(expected, field.name)
        given = getattr(actual, field.name)
        if wanted != given:
            raise ValueError(
                f"the state of {name} must have been made with its {field.name}, {wanted}, got one "
                f"of {given}: messages and rounds would not match. Switch schedules by "
                "gx.topology.piecewise, or go on from the average model by "
                "gossipjax.checkpoint.change_nodes."
            )


def require_like(
    expected: Any, tree: Any, name: str, dtypes: bool = False, like: str = "the parameters"
) -> None:
    """Raises `ValueError` unless `tree` and `expected` have equal structure and shapes.

    With `dtypes`, types must be equal, too. The error calls the trees `name` and `like`.
    """

    def describe_leaf(leaf: Any) -> str:
        shape = list(jnp.shape(leaf))
        return f"{jnp.result_type(leaf)} {shape}" if dtypes else f"shape {shape}"

    def require_equal(path: Any, wanted: Any, leaf: Any) -> None:
        if describe_leaf(wanted) != describe_leaf(leaf):
            raise ValueError(
                f"{name} must be like {like}, {describe_leaf(wanted)} at "
                f"{jax.tree_util.keystr(path) or 'their only leaf'}, got {describe_leaf(leaf)}."
            )

    structure = jax.tree.structure(tree)
    try:
        is_like = structure.num_leaves == jax.tree.structure(expected).num_leaves
        jax.tree.map(lambda wanted, part: None, expected, tree)  # raises if structures differ
    except (ValueError, TypeError):
        is_like = False
    if not is_like:
        raise ValueError(
            f"{name} must have the structure of {like}, "
            f"{str(jax.tree.structure(expected))[:300]}, got {str(structure)[:300]}."
        )
    jax.tree_util.tree_map_with_path(require_equal, expected, tree)


def require_state_of_params(
    name: str, init: optax.TransformInitFn, params: Any, state: GossipState
) -> None:
    """Raises `ValueError` unless `state` has the shapes and types of the state `init(params)`."""
    expected = jax.eval_shape(init, params)
    assert isinstance(expected, GossipState)
    for field in ("weight", "residual", "in_flight", "extra"):
        wanted = _describe_leaves(getattr(expected, field))
        given = _describe_leaves(getattr(state, field))
        if wanted != given:
            raise ValueError(
                f"the state of {name} must be made for these parameters by this algorithm, with "
                f"{field} {_summarize(wanted)}, got {_summarize(given)}: make it by "
                "tx.init(params) of the same chain; from other parameters or another algorithm, "
                "go on by gossipjax.checkpoint.change_nodes."
            )


def _describe_leaves(tree: Any, name: str = "") -> list[str]:
    """Returns the type and shape of each leaf, as text that begins with `name`.

    If `tree` is the `extra` of a state, the text begins with the name of the part instead.
    """
    if isinstance(tree, dict) and all(isinstance(part, Extra) for part in tree.values()):
        return [
            text for key, part in sorted(tree.items()) for text in _describe_leaves(part, f"{key} ")
        ]
    leaves = jax.tree.leaves(tree)
    return [f"{name}{jnp.result_type(leaf)} {list(jnp.shape(leaf))}" for leaf in leaves]


def _summarize(texts: list[str]) -> str:
    """Returns the first three texts, for an error message."""
    return ", ".join(texts[:3] + ["..."] * (len(texts) > 3)) or "None"
