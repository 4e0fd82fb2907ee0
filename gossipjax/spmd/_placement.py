"""Where the arguments of a program belong, and how they get there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax import meshes, processes
from gossipjax.sharding import axes_of

if TYPE_CHECKING:
    from gossipjax.spmd import Nodes


def is_put(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array is where it belongs; tracers are."""
    return isinstance(x, Tracer) or getattr(x, "sharding", None) == sharding


def keep_inside(x: Any, sharding: NamedSharding, nodes: Nodes) -> NamedSharding:
    """`sharding`, and inside the nodes that of an array which is on these devices."""
    actual = getattr(x, "sharding", None)
    if nodes.mesh is None or not nodes.inner_axes or not isinstance(actual, NamedSharding):
        return sharding
    inside = actual.spec[len(sharding.spec) :]
    is_here = is_mesh_of(nodes, actual.mesh)
    if not is_here or not set(axes_of(P(*inside))) <= set(nodes.inner_axes):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec, *inside))


def is_mesh_of(nodes: Nodes, mesh: Any) -> bool:
    """Whether a mesh is that of the nodes, whatever the kinds of its axes."""
    return isinstance(mesh, Mesh) and meshes.auto_mesh(mesh) == nodes.mesh


def put_leaf(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array of one process, or of all, where it belongs."""
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.device_put(x, sharding) if is_global or is_key else processes.put_global(x, sharding)
