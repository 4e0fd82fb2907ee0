"""A named axis: its size, what varies over it, and what each of its nodes selects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

StepLike = int | np.integer | jax.Array


def axis_size(axis_name: str) -> int:
    """The number of nodes on `axis_name`; raises `ValueError` where no such axis is bound."""
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mapped axis, got {axis_name!r}, and no axis has this name here: "
            f"run it inside shard_map, pmap or vmap with axis_name={axis_name!r} (gx.spmd does), "
            "or pass the name of your axis as axis_name."
        ) from None


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes over which the type of `x` says that it varies; only check_vma=True has such."""
    return jax.typeof(x).manual_axis_type.varying


def varies(x: jax.Array, axis_name: str) -> bool:
    """False if the type of `x` says that it is the same all over the axis."""
    types_known = axis_name in varying_axes(jax.lax.axis_index(axis_name))
    return not types_known or axis_name in varying_axes(x)


def as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """`x` with the type of a value that differs between nodes, so that all rounds agree in type."""
    return x if varies(x, axis_name) else jax.lax.pcast(x, axis_name, to="varying")


def vary(tree: Any, axis_name: str) -> Any:
    """The leaves with the types of values that differ between nodes."""
    return jax.tree.map(lambda leaf: as_varying(jnp.asarray(leaf), axis_name), tree)


def vary_where_mapped(tree: Any, axis_name: str) -> Any:
    """`vary`, or `tree` where there is no such axis: types get it where the state enters one."""
    try:
        axis_size(axis_name)
    except ValueError:
        return tree
    return vary(tree, axis_name)


def require_step(step: Any, axis_name: str) -> None:
    """Raises `ValueError` unless `step` is an integer that is the same on every node."""
    if isinstance(step, int | np.integer) and not isinstance(step, bool):
        return
    is_scalar = isinstance(step, jax.Array | np.ndarray) and step.shape == ()
    if not is_scalar or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
        raise ValueError(
            f"step must be an integer or a traced integer scalar, got {step!r}: give the number "
            "of the update, from 0."
        )
    if axis_name in varying_axes(jnp.asarray(step)):
        raise ValueError(
            f"step must be the same on all nodes, got one that varies over {axis_name!r}, which "
            "would have nodes in different rounds: list it in shared_argnums of gx.spmd."
        )


def select_for_node(values: np.ndarray, dtype: DTypeLike, axis_name: str) -> Any:
    """This node's entry of `values` `[N, ...]`; a constant where all nodes have the same."""
    if (values == values[0]).all():
        return np.asarray(values[0], dtype)
    return jnp.asarray(values, dtype)[jax.lax.axis_index(axis_name)]
