"""What algorithms that take the place of an optimizer share: their numbers, and sums of trees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.frame.state import ExchangePlan, add, require_axis_names
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike, make_wire


def require_rate(rate: Any, name: str) -> None:
    """Raises `ValueError` unless `rate` is a positive number, a scalar of JAX or a function."""
    if not callable(rate):
        require_positive(rate, f"rate of {name}, unless it is a function of the update,")


def require_positive(value: Any, what: str) -> None:
    """Raises `ValueError` unless `value` is a positive number or a scalar of JAX."""
    if not _is_traced(value) and not (_is_number(value) and 0 < value < np.inf):
        raise ValueError(f"{what} must be a positive number, got {value!r}.")


def require_fraction(value: Any, what: str) -> None:
    """Raises `ValueError` unless `value` is a number from 0 to below 1 or a scalar of JAX."""
    if not _is_traced(value) and not (_is_number(value) and 0 <= value < 1):
        raise ValueError(f"{what} must be a number from 0 to below 1, got {value!r}.")


def require_nesterov(value: Any, name: str) -> None:
    """Raises `ValueError` unless `value` is a boolean."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"nesterov of {name} must be True or False, got {value!r}.")


def _is_traced(value: Any) -> bool:
    """Whether it is a scalar of JAX, whose value may not be known yet."""
    return isinstance(value, jax.Array) and value.shape == ()


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return is_real and not isinstance(value, bool)


def make_plan(
    name: str,
    schedule: Schedule,
    axis_name: str,
    local_axis_name: str | None,
    wire: WireLike | None,
    models: int = 1,
) -> ExchangePlan:
    """The plan of a factory's arguments; raises `ValueError` as `gx.dpsgd` does."""
    require_doubly_stochastic(schedule, name)
    require_axis_names(name, axis_name, local_axis_name)
    route = make_wire(axis_name, local_axis_name, wire)
    return ExchangePlan(
        schedule, wire=route, models=models, takes_gradients=True, moves_by_zeros=True
    )


def rate_at(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
    """The learning rate after `count` updates."""
    return jnp.asarray(rate(count) if callable(rate) else rate)


def scale(tree: Any, factor: Any) -> Any:
    """Returns `factor x`, leaf by leaf, in the type of `x`."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, tree)


def add_scaled(gradients: optax.Updates, factor: Any, tree: Any) -> Any:
    """Returns `g + factor x`, leaf by leaf, in the type of `x`."""
    return add(scale(tree, factor), gradients)
