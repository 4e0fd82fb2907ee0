"""Checks of the arguments of `spmd`, `Nodes` and `TrainStep`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

if TYPE_CHECKING:
    from gossipjax.nodes import Nodes

Argnums = int | Sequence[int]


@dataclasses.dataclass(frozen=True)
class ArgumentKinds:
    """Says which arguments are static, shared by all nodes, or split over local devices."""

    static: frozenset[int]
    shared: frozenset[int]
    local: frozenset[int]

    @classmethod
    def make(cls, static: Argnums, shared: Argnums, local: Argnums) -> ArgumentKinds:
        """Makes the kinds from one number, or several, for each."""
        return cls(*(frozenset(argument_numbers(given)) for given in (static, shared, local)))

    def dynamic(self, args: Sequence[Any]) -> dict[int, Any]:
        """Returns the arguments that are not static, by their numbers."""
        return {i: arg for i, arg in enumerate(args) if i not in self.static}

    def merge(self, args: Sequence[Any], dynamic: dict[int, Any]) -> list[Any]:
        """Replaces arguments by the values of `dynamic`, such as one node's part of them."""
        return [dynamic.get(i, arg) for i, arg in enumerate(args)]


def argument_numbers(argnums: Argnums) -> tuple[int, ...]:
    """Returns the numbers of arguments as a tuple, for one number or several."""
    return tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)


def is_function(tree: Any) -> bool:
    """Says whether `tree` is a function, and not a pytree that can be called, such as a module."""
    # A `jax.tree_util.Partial`, which is a `functools.partial`, is a pytree and yet a function.
    is_no_module = isinstance(tree, functools.partial) or jax.tree_util.all_leaves([tree])
    return callable(tree) and is_no_module


def require_no_arguments(make: Callable[..., Any], name: str) -> None:
    """Raises `ValueError` if a function that makes parameters or a state needs arguments."""
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"{name} must be a pytree of arrays, or a function without arguments that returns one, "
            f"got {type(make).__name__}, which needs arguments: of a flax.linen module give "
            "module.init(key, x)['params']."
        ) from error


def require_transform(tx: Any) -> None:
    """Raises `ValueError` unless `tx` has the functions of an optax transform."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"tx must be an optax transform, with init and update, got {type(tx).__name__}: as "
            "optax.chain(optax.sgd(0.1), gx.sgp(schedule))."
        )


def require_numbers(tree: Any, name: str) -> None:
    """Raises `ValueError` unless every leaf is an array, or a number that an array can hold."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            dtype = jnp.result_type(leaf)
            if not isinstance(leaf, jax.Array | np.ndarray):  # a number may be too large
                np.asarray(leaf, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be an array or a number, got {leaf!r}: "
                "split a model that holds anything else, as eqx.partition(model, "
                "eqx.is_inexact_array) does."
            ) from error


def is_int(value: Any) -> bool:
    """Says whether a value is an integer, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require_size_of_mesh(size: int | None, mesh: Mesh, axis_name: str) -> int:
    """Returns `size`, by default that of the axis; raises `ValueError` if it does not fit."""
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh must have an axis named {axis_name!r}, got the axes {mesh.axis_names}: name "
            "one so, or pass axis_name."
        )
    devices = mesh.shape[axis_name]
    if size is None:
        return devices
    if size < 1 or size % devices:
        raise ValueError(
            f"nodes must be the size of the mesh's axis {axis_name!r}, {devices}, or a multiple of "
            f"it, for several nodes per device, got {size}: give a multiple of {devices}, a mesh "
            "of fewer devices, or no mesh."
        )
    if size > devices and len(mesh.axis_names) > 1:
        raise ValueError(
            f"a mesh for several nodes per device must have no axis but {axis_name!r}, got "
            f"{dict(mesh.shape)} for {size} nodes: give {devices} nodes of "
            f"{mesh.size // devices} devices each, or a mesh without other axes."
        )
    return int(size)


def require_all_stacked(kinds: ArgumentKinds, args: Sequence[Any], nodes: Nodes) -> dict[int, Any]:
    """Returns the arguments that are not static, by number, after `require_stacked` of each."""
    dynamic = kinds.dynamic(args)
    for number, arg in dynamic.items():
        require_stacked(number, arg, kinds, nodes)
    return dynamic


def require_stacked(number: int, arg: Any, kinds: ArgumentKinds, nodes: Nodes) -> None:
    """Raises `ValueError` unless the leaves of an argument that is not shared are `[N, ...]`.

    Leaves that are split over the L devices of a node need a second axis that L divides.
    """
    if number in kinds.shared:
        return
    local = nodes.local_devices if number in kinds.local else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
        shape = jnp.shape(leaf)
        name = f"argument {number}{jax.tree_util.keystr(path)}"
        if not shape or shape[0] != nodes.size:
            raise ValueError(
                f"{name} must be node-stacked, with a leading axis of {nodes.size} nodes, got "
                f"shape {list(shape)}: gx.Nodes.replicate stacks one value for all nodes, "
                "gx.Nodes.split divides a batch of examples; or list "
                "the argument in shared_argnums or static_argnums, and keep numbers out of a "
                "module, as eqx.partition(model, eqx.is_array) does."
            )
        if local is not None and (len(shape) < 2 or shape[1] % local):
            raise ValueError(
                f"{name} must have a second axis that {local} local devices divide, got shape "
                f"{list(shape)}: give batches of a multiple of {local} examples."
            )
