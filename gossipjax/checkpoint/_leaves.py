"""The arrays of a state: their paths, shapes and types."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from gossipjax.exchanges.state import Exchanging
from gossipjax.processes import is_key
from gossipjax.sharding import ShardedState

# How an error calls a static setting, by the end of its path.
SETTINGS = {
    ".wire.codec": "codec: pass the one it was saved with as wire=",
    ".plan.": "setting of gx.outer: pass the one it was saved with",
}


def as_arrays(tree: Any, shared: bool) -> list[Any]:
    """Returns every leaf of a state as an array: JAX's unchanged, and copies of all others."""
    arrays = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = f"state{jax.tree_util.keystr(path)}"
        if not shared and not is_on_all_processes(leaf):
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

    The settings are the codecs of wires, and when an outer optimizer averages what. The arrays of a
    state do not show static settings, so a run could otherwise go on with other settings unnoticed.
    """
    specs = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        specs.append([jax.tree_util.keystr(path), list(array.shape), str(array.dtype)])
    nodes = _find_exchanging(tree)
    # As in every version: first the states that wrap nothing, then the others.
    for path, node in sorted(nodes, key=lambda item: item[1].inner is not None):
        path = jax.tree_util.keystr(path)
        specs += [[f"{path}{name}", [], value] for name, value in node.plan.settings().items()]
    return specs


def _find_exchanging(tree: Any, prefix: Any = ()) -> list[tuple[Any, Any]]:
    """Finds all states that exchange, those inside of others too; returns paths and states."""
    found: list[tuple[Any, Any]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda part: isinstance(part, Exchanging)
    ):
        if isinstance(node, Exchanging):
            path = (*prefix, *path)
            found.append((path, node))
            fields: Any = node
            for name, part in fields._asdict().items():
                found += _find_exchanging(part, (*path, jax.tree_util.GetAttrKey(name)))
    return found


def _is_wrapper(part: Any) -> bool:
    """Whether `part` is a `ShardedState` or a Variable of NNX."""
    return isinstance(part, ShardedState) or hasattr(part, "get_raw_value")


def unwrap(tree: Any) -> Any:
    """Replaces each `ShardedState` and each Variable in a tree by what it contains.

    `nnx.Optimizer` puts each array of a state in a Variable, and `tx.init` does not.
    """

    def replace(part: Any) -> Any:
        if not _is_wrapper(part):
            return part
        return unwrap(part.inner if isinstance(part, ShardedState) else part.get_raw_value())

    return jax.tree.map(replace, tree, is_leaf=_is_wrapper)


def arrange_like(structure: Any, tree: Any) -> Any:
    """Returns the leaves of `tree` in the structure of another tree."""
    return jax.tree.unflatten(jax.tree.structure(structure), jax.tree.leaves(tree))


def require_same_specs(saved: list[list[Any]], current: list[list[Any]], name: str) -> None:
    """Raises `ValueError` at the first leaf whose saved and current specs differ."""
    for old, new in itertools.zip_longest(saved, current):
        if old == new or (old and new and _without_variable(old) == _without_variable(new)):
            continue
        way_out = "It is of another model, optimizer or algorithm."
        if setting := _find_setting(old) or _find_setting(new):
            way_out = (
                f"It is of another {setting}, or go on from the average model by "
                "gossipjax.checkpoint.change_nodes."
            )
        elif old and new and _without_nodes(old) == _without_nodes(new):
            way_out = (
                "It is of another number of nodes: Checkpoints.resume takes it, or read it as it "
                "was saved and give it to gossipjax.checkpoint.change_nodes."
            )
        expected, actual = map(_describe, (new, old))
        raise ValueError(f"{name} must have {expected}, as this run, got {actual}. {way_out}")


def _without_variable(spec: list[Any]) -> list[Any]:
    """Returns the spec that an array would have if `nnx.Optimizer` put no Variable around it."""
    return [spec[0].removesuffix(".value"), *spec[1:]]


def _without_nodes(spec: list[Any]) -> list[Any]:
    return [spec[0], len(spec[1]), spec[1][1:], spec[2]]


def _find_setting(spec: list[Any] | None) -> str | None:
    path = spec[0] if spec else ""
    return next((setting for name, setting in SETTINGS.items() if name in path), None)


def _describe(spec: list[Any] | None) -> str:
    if spec is None:
        return "nothing more"
    path, shape, kind = spec
    return f"{path}: {kind}" if _find_setting(spec) else f"{path}: {shape} {kind}"


def is_on_all_processes(leaf: Any) -> bool:
    """Whether every process has, or may have, a part of an array on its devices."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def held_nodes(leaves: list[Any]) -> list[int]:
    """Returns the nodes (rows of the first array) of which this process has a part."""
    first = next((leaf for leaf in leaves if leaf.shape), None)
    if first is None:
        return []
    indices = first.sharding.addressable_devices_indices_map(first.shape).values()
    return sorted({row for index in indices for row in range(first.shape[0])[index[0]]})


def require_types_of_devices(like: Any, name: str) -> None:
    """Raises `ValueError` if an array for devices has 64 bits, of which JAX would keep 32."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        if is_key(leaf) or getattr(leaf, "sharding", None) is None:
            continue
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(
                f"{name} has {jax.tree_util.keystr(path)} of type {leaf.dtype}, which devices must "
                "be allowed to hold: set jax_enable_x64, as in the run that saved it."
            )
