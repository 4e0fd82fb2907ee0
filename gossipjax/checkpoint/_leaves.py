"""The arrays of a state: their paths, shapes and types."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from gossipjax.exchanges.state import Exchanging
from gossipjax.sharding import ShardedState


def as_arrays(tree: Any, shared: bool) -> list[Any]:
    """Returns the leaves of a state as arrays: those of JAX unchanged, all others as copies.

    With `shared=False`, each process writes its own part of each array. So an array of this process
    alone raises `ValueError`, as does a leaf that is neither an array nor a number.
    """
    arrays = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = f"state{jax.tree_util.keystr(path)}"
        if not shared and not spans_processes(leaf):
            raise ValueError(
                f"{name} must be an array on the devices of all processes where their folders are "
                "not shared, got one of this process alone: make it by gx.Nodes.put, or save it as "
                "metadata."
            )
        array = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
        if isinstance(array, np.ndarray) and array.dtype.kind in "OSU":  # objects and texts
            raise ValueError(f"{name} must be an array or a number, got {leaf!r}.")
        arrays.append(array)
    return arrays


def leaf_specs(tree: Any) -> list[list[Any]]:
    """Returns `[path, shape, type]` of every leaf, and `[path, [], value]` of static settings.

    The settings are the codecs of wires, and the arguments of `gx.outer`. The arrays of a state do
    not show static settings, so a run could otherwise go on with other settings unnoticed.
    """
    specs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        specs.append([jax.tree_util.keystr(path), list(array.shape), str(array.dtype)])
    states = _find_exchanging(tree)
    # Older checkpoints have this order: first the states that wrap no other, then the others.
    for path, state in sorted(states, key=lambda item: item[1].inner is not None):
        path = jax.tree_util.keystr(path)
        specs += [[f"{path}{name}", [], value] for name, value in state.plan.settings().items()]
    return specs


def _find_exchanging(tree: Any, prefix: Any = ()) -> list[tuple[Any, Any]]:
    """Returns path and state of every `Exchanging` in a tree at path `prefix`, nested ones, too."""

    def is_inside(part: Any) -> bool:
        return part is not tree and isinstance(part, Exchanging)

    found = [(prefix, tree)] if isinstance(tree, Exchanging) else []
    for path, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_inside):
        if is_inside(part):
            found += _find_exchanging(part, (*prefix, *path))
    return found


def unwrap(tree: Any) -> Any:
    """Replaces each `ShardedState` and each Variable in a tree by what it contains.

    So the structures of two states can be compared: `nnx.Optimizer` puts each array of a state in a
    Variable, and `tx.init` does not.
    """

    def is_wrapper(part: Any) -> bool:
        return isinstance(part, ShardedState) or hasattr(part, "get_raw_value")

    def replace(part: Any) -> Any:
        if not is_wrapper(part):
            return part
        return unwrap(part.inner if isinstance(part, ShardedState) else part.get_raw_value())

    return jax.tree.map(replace, tree, is_leaf=is_wrapper)


def arrange_like(structure: Any, tree: Any) -> Any:
    """Returns the leaves of `tree` in the structure of another tree."""
    return jax.tree.unflatten(jax.tree.structure(structure), jax.tree.leaves(tree))


def require_same_specs(saved: list[list[Any]], current: list[list[Any]], name: str) -> None:
    """Raises `ValueError` at the first leaf whose saved and current specs differ."""
    for old, new in itertools.zip_longest(saved, current):
        if old == new or (old and new and _without_variable(old) == _without_variable(new)):
            continue
        expected, actual = map(_describe, (new, old))
        raise ValueError(
            f"{name} must have {expected}, as this run, got {actual}. It is of another model, "
            "optimizer, algorithm, setting or number of nodes. Checkpoints.resume takes other "
            "nodes, and gossipjax.checkpoint.change_nodes another algorithm or setting, too."
        )


def _without_variable(spec: list[Any]) -> list[Any]:
    """Returns the spec that an array would have if `nnx.Optimizer` put no Variable around it."""
    return [spec[0].removesuffix(".value"), *spec[1:]]


def _describe(spec: list[Any] | None) -> str:
    """Returns the text of a spec for an error; None is the end of the list."""
    if spec is None:
        return "nothing more"
    path, shape, kind = spec
    return f"{path}: {shape} {kind}" if shape else f"{path}: {kind}"


def spans_processes(leaf: Any) -> bool:
    """Says whether an array is on devices of several processes, and not of this one alone."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def held_nodes(leaves: list[Any], only_whole: bool = False) -> list[int]:
    """Returns the nodes (rows of the first array) of which this process has at least a part.

    With `only_whole`, returns only the nodes of which no other process has a part.
    """
    first = next((leaf for leaf in leaves if leaf.shape), None)
    if first is None:
        return []
    here: set[int] = set()
    elsewhere: set[int] = set()
    for device, index in first.sharding.devices_indices_map(first.shape).items():
        nodes = here if device.process_index == jax.process_index() else elsewhere
        nodes.update(range(first.shape[0])[index[0]])
    return sorted(here - elsewhere if only_whole else here)
