"""The part of the parameters that a transform gossips; inside `optax.masked` the mask decides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import optax

from gossipjax.serialization import written_by_flax


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mask:
    """The parameters that a masked transform sees: static data of its state."""

    structure: Any  # of all parameters, with an `optax.MaskedNode` at each part that is left out

    @functools.cached_property
    def tree(self) -> Any:
        """A tree like the parameters that the transform sees, True at each of them."""
        return jax.tree.unflatten(self.structure, [True] * self.structure.num_leaves)


def _is_masked(part: Any) -> bool:
    return isinstance(part, optax.MaskedNode)


def make_mask(params: Any) -> Mask | None:
    """Returns the mask, if `optax.masked` left out some of the parameters; else None."""
    parts = jax.tree.leaves(params, is_leaf=_is_masked)
    return Mask(jax.tree.structure(params)) if any(map(_is_masked, parts)) else None


def gossiped(params: Any, state: Any) -> Any:
    """Returns the part of the user's parameters that a transform sees: all, if it is not masked.

    `state` is the `GossipState` of the transform. If `params` are already this part alone, they are
    returned unchanged.
    """
    if state is None or state.mask is None:
        return params
    mask = state.mask
    if jax.tree.structure(params).num_leaves == mask.structure.num_leaves:
        return params
    return jax.tree.map(
        lambda keep, part: keep if _is_masked(keep) else part, mask.tree, params, is_leaf=_is_masked
    )


def merge_gossiped(params: Any, part: Any, state: Any) -> Any:
    """Returns `params` with the leaves inside the mask taken from `part`; inverts `gossiped`.

    If there is no mask, or `params` have only the leaves inside it, the result is `part`.
    """
    if state is None or state.mask is None:
        return part
    if jax.tree.structure(params) == jax.tree.structure(part):
        return part
    return jax.tree.map(
        lambda new, old: old if _is_masked(new) else new, part, params, is_leaf=_is_masked
    )
