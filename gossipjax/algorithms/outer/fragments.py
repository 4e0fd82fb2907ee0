"""A model in fragments: consecutive leaves of a tree, the others left out of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax


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
