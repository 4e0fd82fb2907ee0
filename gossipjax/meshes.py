"""Arrays and programs under `jax.set_mesh`, which may set a mesh of Explicit axes.

The type of an array names its Explicit axes, and under a mesh with such axes JAX refuses arrays
and programs of any other mesh. The library's meshes have Auto axes. Its programs therefore run
while no mesh is set, and their results move to the set mesh without a copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

HOST_MEMORY = "pinned_host"  # devices copy from and to it while they compute

Function = TypeVar("Function", bound=Callable[..., Any])


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices and axes, in which all axes are Auto."""
    return Mesh(mesh.devices, mesh.axis_names)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Says whether an axis of the mesh is Explicit, so that it appears in the types of arrays."""
    return AxisType.Explicit in mesh.axis_types


def current_mesh() -> Mesh | None:
    """Returns the mesh that `jax.set_mesh` has set; None without one, and inside of `jax.jit`."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside of jax.jit
        return None
    return None if mesh.empty else mesh


def unset_mesh() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which no mesh is set; inside of `jax.jit` it changes nothing."""
    return contextlib.nullcontext() if current_mesh() is None else jax.set_mesh(None)


def apart_from_set_mesh(fn: Function) -> Function:
    """Decorates `fn`: it runs while no mesh is set, and its result moves to the caller's mesh."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Unsets the mesh of the caller while `fn` runs, and moves the result to this mesh."""
        mesh = current_mesh()
        if mesh is None:
            return fn(*args, **kwargs)
        with jax.set_mesh(None):
            result = fn(*args, **kwargs)
        return on_mesh(result, mesh)

    return run  # pyright: ignore[reportReturnType]


def on_auto_axes(tree: Any) -> Any:
    """Returns arrays of Explicit axes as arrays of Auto axes; other leaves stay as they are.

    Arrays that wait in the host's memory move to the devices.
    """

    def convert(x: Any) -> Any:
        """Returns an array on the devices, with Auto axes; other leaves stay as they are."""
        is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        sharding = x.sharding if is_array else None
        if isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh):
            assert isinstance(sharding.mesh, Mesh)
            return jax.device_put(x, NamedSharding(auto_mesh(sharding.mesh), sharding.spec))
        if sharding is not None and sharding.memory_kind == HOST_MEMORY:
            return jax.device_put(x, sharding.with_memory_kind("device"))
        return x

    return jax.tree.map(convert, tree)


def on_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """Undoes `on_auto_axes` for arrays on the devices of `mesh`, if it has Explicit axes."""
    if mesh is None or not has_explicit_axes(mesh):
        return tree
    auto = auto_mesh(mesh)

    def convert(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == auto:
            return jax.device_put(x, NamedSharding(mesh, sharding.spec))
        return x

    return jax.tree.map(convert, tree)
