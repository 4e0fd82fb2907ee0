"""The model of a node, leaf by leaf, in float32 at least.

The model is `z + r`: parameters `z` and a residual `r` in float32. `as_update` makes the update
from `z` to another model, `predict` returns the parameters that the user will then hold, and
`residuals` returns what these parameters lack.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import accumulation_dtype, agree_on, copy_for_leaves, upcast
from gossipjax.wire import round_to


def zeros_like_model(params: Any) -> Any:
    """Makes zeros like leaves, float32 at least; leaves may be `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, dtype=accumulation_dtype(jnp.result_type(leaf))), params
    )


def widen(params: optax.Params) -> Any:
    """Returns the parameters in float32 at least, with exactly the values that the user holds."""
    # Without the second rounding, XLA could keep digits that a narrower type does not have.
    return jax.tree.map(lambda wide, z: round_to(wide, jnp.result_type(z)), upcast(params), params)


def as_update(params: optax.Params, target: Any) -> optax.Updates:
    """Returns the update, in the types of `params`, from `params` to the rounded `target`.

    In full precision the update is `target - params`, rounded once. In a narrower type the update
    is also rounded to this type, and the difference is a residual.
    """

    def subtract_rounded(z: Any, wide: jax.Array, leaf: jax.Array) -> jax.Array:
        """Returns the update from the parameter `z`, in float32 `wide`, to the target `leaf`."""
        dtype = jnp.result_type(z)
        return round_to(round_to(leaf, dtype) - wide, dtype).astype(dtype)

    return jax.tree.map(subtract_rounded, params, widen(params), target)


def predict(params: optax.Params, updates: optax.Updates) -> Any:
    """Returns the parameters that `optax.apply_updates` will make, float32 at least."""

    def add_rounded(z: Any, wide: jax.Array, u: jax.Array) -> jax.Array:
        """Returns the sum as `optax.apply_updates` rounds it to the type of `z`; `wide` is `z`."""
        dtype = jnp.result_type(z)
        return round_to(wide + round_to(u.astype(wide.dtype), dtype), dtype)

    return jax.tree.map(add_rounded, params, widen(params), updates)


def residuals(model: Any, z: Any) -> Any:
    """Returns `r = model - z`, leaf by leaf, of two trees of float32 at least.

    If `z` is not finite, `r` is 0, so only the parameters contain values that are not finite.
    """
    return jax.tree.map(
        lambda leaf, z: jnp.where(jnp.isfinite(z), leaf - z, jnp.zeros_like(leaf)), model, z
    )


def models(params: optax.Params, state: Any) -> Any:
    """Returns the models `z + r`: parameters, and what rounding to their type took, in float32."""
    z = widen(params)
    if state is None or state.residual is None:
        return z
    return jax.tree.map(jnp.add, z, state.residual)


def numerators(params: optax.Params, state: Any) -> Any:
    """Returns the push-sum numerators, the weight w times `models`; without a weight the models."""
    if state is None or state.weight is None:
        return models(params, state)
    return jax.tree.map(
        lambda leaf, w: w.astype(leaf.dtype) * leaf,
        models(params, state),
        copy_for_leaves(state.weight, params, state.plan.wire.axis_name),
    )


def debias(x: Any, weight: jax.Array | None, axis_name: str | None = None) -> Any:
    """Returns `z = x / w`, leaf by leaf, in the type of `x`; without a weight it returns `x`.

    Where the axis of the nodes is mapped, give its name: simulated nodes then divide faster than
    without it.
    """
    if weight is None:
        return x
    if axis_name is None:
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), x)
    weights = copy_for_leaves(weight, x, axis_name)
    return jax.tree.map(lambda leaf, w: leaf / w.astype(leaf.dtype), x, weights)


def push_sum_weight(state: Any) -> jax.Array:
    """Returns the weight `w`; 1 for algorithms without a weight."""
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


def interpolate(old: Any, new: Any, keep: Any) -> Any:
    """Returns `keep old + (1 - keep) new`, leaf by leaf."""

    def interpolate_leaf(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.asarray(keep, a.dtype) * a + jnp.asarray(1 - keep, a.dtype) * b

    return jax.tree.map(interpolate_leaf, old, new)


def add_scaled(gradients: optax.Updates, factor: Any, tree: Any) -> Any:
    """Returns `gradients + factor tree`, leaf by leaf, in the types of `tree`."""
    return add(scale(tree, factor), gradients)


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Calls `optax.apply_updates`; updates may be wider than parameters, even if JAX is strict.

    Gossip returns updates in the types of the parameters; a chain without gossip may not.
    """
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def common_model(params: Any, axis_name: str | None) -> Any:
    """Returns a copy of the parameters, float32 at least; over an axis, the same on all nodes.

    If the parameters of the nodes differ, the copy is their mean. Outside of the axis, and without
    `axis_name`, the copy has the values of the parameters.
    """

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = jnp.zeros_like(leaf)
        return jnp.array(leaf, accumulation_dtype(jnp.result_type(leaf)), copy=True)

    model = jax.tree.map(copy, params)
    if axis_name is not None:
        # `agree_on` raises outside of the axis, where all nodes have one set of parameters.
        with contextlib.suppress(ValueError):
            model = agree_on(model, axis_name)
    return model
