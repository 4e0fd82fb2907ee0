"""Several processes that run one experiment: which nodes each holds, and what all of them see.

Every process makes the same calls in the same order. Only the first one, `is_first`, writes files.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LONGEST_TEXT = 1024  # bytes of UTF-8


def is_first() -> bool:
    """Whether this is the process that writes files and talks to people."""
    return jax.process_index() == 0


def own_nodes(mesh: Mesh | None, nodes: int) -> list[int]:
    """The nodes whose models this process holds: all of them if there is no mesh."""
    if mesh is None:
        return list(range(nodes))
    first_devices = mesh.devices.reshape(nodes, -1)[:, 0]
    me = jax.process_index()
    return [node for node, device in enumerate(first_devices) if device.process_index == me]


def put(own: Any, mesh: Mesh | None, nodes: int) -> Any:
    """Arrays `[own nodes, ...]` of each process, as node-stacked ones on the devices."""
    if mesh is None:
        return jax.device_put(own)
    sharding = NamedSharding(mesh, PartitionSpec("nodes"))
    if jax.process_count() == 1:
        return jax.device_put(own, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (nodes, *x.shape[1:])), own
    )


def put_everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays that all processes have, on every device."""
    if mesh is None:
        return jax.device_put(tree)
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree
    )


def fetch(tree: Any) -> Any:
    """Node-stacked arrays, whole, as NumPy arrays on every process."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    copied = _replicate(leaves[0].sharding.mesh)(leaves)
    return jax.tree.unflatten(structure, [np.asarray(x.addressable_data(0)) for x in copied])


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, PartitionSpec()))


def of_first(text: str) -> str:
    """The first process' text, on all of them.

    Raises:
      ValueError: if it is longer than 1,024 bytes.
    """
    if jax.process_count() == 1:
        return text
    encoded = text.encode()
    if len(encoded) > LONGEST_TEXT:
        raise ValueError(f"a text of {len(encoded)} bytes is too long: {text[:80]} ...")
    mesh = Mesh(np.array(jax.devices()), ("nodes",))
    own = np.zeros((len(own_nodes(mesh, mesh.size)), LONGEST_TEXT), np.uint8)
    own[:, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    return fetch(put(own, mesh, mesh.size))[0].tobytes().rstrip(b"\0").decode()
