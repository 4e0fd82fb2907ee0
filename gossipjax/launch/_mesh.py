"""Makes meshes over the devices of all processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def mesh(
    nodes: int | None = None,
    *,
    local: int | None = None,
    devices: Sequence[Any] | None = None,
    **axes: int,
) -> Mesh:
    """Makes a mesh, with Auto axes, of N nodes with L devices each from all processes' devices.

    Devices are sorted by TPU slice, then by process, so that a node has neighboring devices. Each
    process must contain whole nodes, or each node whole processes, and the same of slices. Only a
    job of a single process may leave devices idle.

    Args:
      nodes: N, the number of nodes. The default is the largest N for the given devices.
      local: the number of devices of a node that hold the same model. Without it, one device holds
        the model, and the mesh has no axis `local`.
      devices: the devices of the mesh. By default all of `jax.devices()`.
      **axes: further axes inside a node, for example `fsdp=2, tensor=4`. Your program says how the
        model is sharded over these axes. L is the product of their sizes and `local`.

    Returns:
      A mesh `[N, ...]` for `gx.spmd`, with the axes `nodes`, `local` if given, and `axes` in their
      order. Along the last axis, devices have consecutive numbers in their process.

    Raises:
      ValueError: if the numbers do not divide each other, if slices differ in size, or if there are
        fewer than N * L devices (in several processes also if there are more).

    >>> from gossipjax import launch
    >>> dict(launch.mesh(nodes=1).shape)
    {'nodes': 1}
    >>> dict(launch.mesh(1, fsdp=1, tensor=1).shape)
    {'nodes': 1, 'fsdp': 1, 'tensor': 1}
    """
    if isinstance(devices, int):
        raise ValueError(
            f"devices must be a list of devices, such as jax.devices(), got {devices}: a mesh with "
            f'an axis of this name is jax.make_mesh((N, {devices}), ("nodes", "devices")).'
        )
    inner = axes if local is None else {"local": local, **axes}
    available = sorted(
        jax.devices() if devices is None else devices,
        key=lambda device: (_slice_index(device), device.process_index, device.id),
    )
    per_node = math.prod(inner.values())
    count = len(available)
    shape = (max(1, count // per_node) if nodes is None else nodes, *inner.values())
    needed = math.prod(shape)
    num_processes = len({device.process_index for device in available})
    per_process = -(-needed // num_processes)  # rounded up, for the error
    if needed > count or (needed < count and (nodes is None or num_processes > 1)):
        raise ValueError(
            f"{' * '.join(('nodes', *inner))} must be the number of devices (or less, if a single "
            f"process has them), got {' * '.join(map(str, shape))} = {needed} and {count} devices "
            f"of {num_processes} processes. Take other numbers, or start with other devices: on "
            f"CPU with --local-devices {per_process} of gossipjax.launch, or "
            f'jax.config.update("jax_num_cpu_devices", {per_process}) before JAX\'s first use; '
            "under Slurm and Open MPI, where JAX uses one GPU per process, with "
            "JAX_LOCAL_DEVICE_IDS."
        )
    grid = np.array(available[:needed]).reshape(shape)
    for what, index in (("processes", attrgetter("process_index")), ("slices", _slice_index)):
        counts = Counter(map(index, available))
        # For each node, the processes (or slices) that have its devices.
        parts = [set(map(index, node)) for node in grid.reshape(shape[0], -1)]
        # Each node is inside one process (or slice), or no process is in more than one node.
        nodes_are_inside = all(len(part) == 1 for part in parts)
        nodes_are_whole = sum(map(len, parts)) == len(counts)
        if len(set(counts.values())) > 1 or not (nodes_are_inside or nodes_are_whole):
            raise ValueError(
                f"{what} must have the same number of devices, and contain whole nodes or be whole "
                f"in a node, got {shape[0]} nodes of {per_node} devices and, by number, "
                f"{dict(counts)} devices. Take other numbers, give devices= some of them, or start "
                f"all {what} with the same number of GPUs, TPUs or JAX_NUM_CPU_DEVICES."
            )
    return Mesh(grid, ("nodes", *inner))


def _slice_index(device: Any) -> int:
    """Returns the number of a TPU's slice, else 0.

    On GPUs, `slice_index` is the number of the host. It is ignored: hosts may differ in size.
    """
    is_tpu = getattr(device, "platform", None) == "tpu"
    return (getattr(device, "slice_index", None) or 0) if is_tpu else 0
