"""The parameters that the user holds: those of 16 bits, and the part of them that is gossiped.

The model is `z + r`: parameters `z` and a residual `r` in float32. `as_update` leads from `z` to
another model, `predict` says which parameters the user will then hold, and `residuals` what they
lack. Inside `optax.masked` a transform sees the part of the parameters that its `Mask` has. A
model may travel in fragments: consecutive leaves of a tree, the others left out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import accumulation_dtype, upcast
from gossipjax.serialization import written_by_flax


def zeros_like_model(params: Any) -> Any:
    """Zeros like the leaves, float32 at least; `jax.ShapeDtypeStruct` will do."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, dtype=accumulation_dtype(jnp.result_type(leaf))), params
    )


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x`, rounded to the values of `dtype`, in its own type.

    XLA may drop a conversion to a narrow type and back (`xla_allow_excess_precision`), but not
    this. It flushes subnormal values, which float16 has from 6e-5 downwards: they are rounded to
    multiples of the smallest.
    """
    info = jnp.finfo(dtype)
    if x.dtype == dtype:
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(x.dtype).nexp:
        return rounded
    smallest = float(info.smallest_subnormal)
    subnormal = jax.lax.round(
        x * jnp.asarray(1 / smallest, x.dtype), jax.lax.RoundingMethod.TO_NEAREST_EVEN
    ) * jnp.asarray(smallest, x.dtype)
    return jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)


def widen(params: optax.Params) -> Any:
    """The parameters that the user holds, float32 at least, rounded as their types are."""
    return jax.tree.map(lambda wide, z: round_to(wide, jnp.result_type(z)), upcast(params), params)


def as_update(params: optax.Params, target: Any) -> optax.Updates:
    """Returns the update, in the types of `params`, from `params` to the rounded `target`.

    In full precision it is `target - params`, rounded once. In a narrower type it is rounded to
    that type as well, and what that leaves over is a residual.
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

    0 where `z` is not finite, so that what is not finite is in the parameters alone.
    """
    return jax.tree.map(
        lambda leaf, z: jnp.where(jnp.isfinite(z), leaf - z, jnp.zeros_like(leaf)), model, z
    )


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mask:
    """The parameters that a masked transform sees: static data of its state.

    Attributes:
      structure: of these parameters, with an `optax.MaskedNode` at each part that is left out.
    """

    structure: Any

    @functools.cached_property
    def tree(self) -> Any:
        """The structure as a tree: True at each parameter."""
        return jax.tree.unflatten(self.structure, [True] * self.structure.num_leaves)


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def make_mask(params: Any) -> Mask | None:
    """The mask of parameters of which `optax.masked` left some out; None where all are there."""
    parts = jax.tree.leaves(params, is_leaf=_is_masked)
    return Mask(jax.tree.structure(params)) if any(map(_is_masked, parts)) else None


def gossiped(params: Any, state: Any) -> Any:
    """The part of the user's parameters that the transform sees: all where it is not masked.

    Parameters of which the caller took that part himself are returned as they are.

    Raises:
      ValueError: if a mask does not fit `params`.
    """
    if state is None or state.mask is None:
        return params
    mask = state.mask
    if jax.tree.structure(params) == mask.structure:
        return params
    try:
        return jax.tree.map(
            lambda keep, part: keep if _is_masked(keep) else part,
            mask.tree,
            params,
            is_leaf=_is_masked,
        )
    except (ValueError, TypeError) as error:
        if jax.tree.structure(params).num_leaves == mask.structure.num_leaves:
            return params
        raise ValueError(
            "params must be the parameters that the masked transform was given, or the part of "
            f"them that it gossips, {mask.structure}, got {jax.tree.structure(params)}."
        ) from error


def merge_gossiped(params: Any, part: Any, state: Any) -> Any:
    """Returns `params` with `part`, in the form of `gossiped(params, state)`, put in its place."""
    if state is None or state.mask is None:
        return part
    if jax.tree.structure(params) == jax.tree.structure(part):
        return part
    return jax.tree.map(
        lambda new, old: old if _is_masked(new) else new, part, params, is_leaf=_is_masked
    )


def split_leaves(tree: Any, fragments: int) -> list[range]:
    """The leaves of each fragment, in the order of the tree; all of about the same size.

    It depends on the shapes alone, so that all nodes split their models in the same way.

    Raises:
      ValueError: if there are more fragments than leaves.

    >>> split_leaves({"a": np.ones(3), "b": np.ones(1), "c": np.ones(2)}, 2)
    [range(0, 1), range(1, 3)]
    """
    sizes = [np.size(leaf) for leaf in jax.tree.leaves(tree)]
    if not sizes:  # the placeholder of optax.tree_map_params
        return [range(0)] * fragments
    if fragments > len(sizes):
        raise ValueError(
            f"fragments of outer must be at most the number of leaves, {len(sizes)}, got "
            f"{fragments}: a leaf is in one fragment."
        )
    ends = np.cumsum(sizes)
    stops = []
    for number in range(1, fragments):
        nearest = int(np.abs(ends - ends[-1] * number / fragments).argmin()) + 1
        least = stops[-1] + 1 if stops else 1
        stops.append(min(max(nearest, least), len(sizes) - (fragments - number)))
    return [range(*bounds) for bounds in zip([0, *stops], [*stops, len(sizes)], strict=True)]


def pick(tree: Any, leaves: range) -> Any:
    """The tree with an `optax.MaskedNode` at every leaf that is not one of `leaves`."""
    parts, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [leaf if number in leaves else optax.MaskedNode() for number, leaf in enumerate(parts)],
    )


def merge(tree: Any, part: Any, leaves: range) -> Any:
    """Returns `tree` with the leaves of `part`, which `pick(..., leaves)` has made."""
    parts, structure = jax.tree.flatten(tree)
    parts[leaves.start : leaves.stop] = jax.tree.leaves(part)
    return jax.tree.unflatten(structure, parts)
