"""Makes meshes over the devices of all processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
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

    Devices are sorted by slice of a TPU job, and then by process. Each process must contain whole
    nodes, or each node whole processes. The same is true of slices. Only a single process may leave
    devices idle.

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
    inner = axes if local is None else {"local": local, **axes}
    for name, size in {"nodes": 1 if nodes is None else nodes, **inner}.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}.")
    available = sorted(
        jax.devices() if devices is None else devices,
        key=lambda device: (_slice_index(device), device.process_index, device.id),
    )
    per_process = _count_by(lambda device: device.process_index, available, "processes")
    per_slice = _count_by(_slice_index, available, "slices")
    per_node = math.prod(inner.values())
    if nodes is None and len(available) % per_node == 0:
        nodes = len(available) // per_node
    if nodes is None or nodes * per_node > len(available):
        needed = per_node if nodes is None else nodes * per_node
        product = " * ".join(inner if nodes is None else ("nodes", *inner))
        raise ValueError(
            f"{product} must {'divide' if nodes is None else 'be at most'} the number of devices, "
            f"got {needed} and {_describe(available)}. {_ways_out(needed, len(per_process))}"
        )
    _require_whole(nodes, per_node, available, len(per_process), per_slice)
    shape = (nodes, *inner.values())
    grid = np.array(available[: math.prod(shape)]).reshape(shape)
    return Mesh(grid, ("nodes", *inner))


def _slice_index(device: Any) -> int:
    """Returns the number of the TPU slice; 0 if there is only one.

    On GPUs, JAX numbers hosts in this way, and hosts may have different numbers of devices.
    """
    is_tpu = getattr(device, "platform", None) == "tpu"
    return (getattr(device, "slice_index", None) or 0) if is_tpu else 0


def _count_by(key: Callable[[Any], int], devices: list[Any], what: str) -> Counter[int]:
    """Counts the devices of each process or slice, which must all have the same number."""
    counts = Counter(map(key, devices))
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"all {what} must have the same number of devices, got {dict(counts)} by number. Start "
            "them with the same number of GPUs, TPUs or JAX_NUM_CPU_DEVICES, or give devices= some "
            "of them."
        )
    return counts


def _require_whole(
    nodes: int, per_node: int, devices: list[Any], num_processes: int, slices: Counter[int]
) -> None:
    """Raise `ValueError` unless nodes have whole processes and slices, or the other way round."""
    if nodes % num_processes and num_processes % nodes:
        raise ValueError(
            f"nodes must be a multiple or a divisor of the number of processes, got {nodes} nodes "
            f"and {num_processes} processes. Take a multiple of {num_processes} nodes, or another "
            "number of processes."
        )
    if num_processes > 1 and nodes * per_node < len(devices):
        raise ValueError(
            "the devices of all nodes must be those of several processes, got "
            f"{nodes} * {per_node} = {nodes * per_node} and {_describe(devices)}. Use all, with "
            f"nodes={len(devices) // per_node}, or start fewer processes or devices."
        )
    per_slice = slices[_slice_index(devices[0])]
    if len(slices) > 1 and per_slice % per_node and per_node % per_slice:
        raise ValueError(
            f"a node must have a divisor of a slice's devices, or whole slices, got {per_node} "
            f"devices per node and {per_slice} per slice: a node would straddle slices. Take "
            f"another number, as {math.gcd(per_node, per_slice)}."
        )


def _ways_out(needed: int, num_processes: int) -> str:
    """Says what to do if a mesh needs another number of devices than there are."""
    per_process = -(-needed // num_processes)
    return (
        "Take fewer nodes, or nodes of other sizes. Or start with more devices: on CPU with "
        f"--local-devices {per_process} of gossipjax.launch, or "
        f'jax.config.update("jax_num_cpu_devices", {per_process}) before JAX\'s first use; '
        "under Slurm and Open MPI, where JAX uses one GPU per process, with JAX_LOCAL_DEVICE_IDS."
    )


def _describe(devices: list[Any]) -> str:
    num_processes = len({device.process_index for device in devices})
    processes = "1 process" if num_processes == 1 else f"each of {num_processes} processes"
    return f"{len(devices)} devices ({len(devices) // num_processes} in {processes})"
