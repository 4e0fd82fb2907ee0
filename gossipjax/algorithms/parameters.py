"""The part of the parameters that a transform gossips, and the fragments in which they travel.

Inside `optax.masked` a transform sees the part of the parameters that its `Mask` has. A model may
travel in fragments: consecutive leaves of a tree, the others left out of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from gossipjax.serialization import written_by_flax


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
