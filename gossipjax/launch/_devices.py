"""Chooses the GPUs of each process, as the table in docs/guides/launcher.md says."""

from __future__ import annotations

import importlib.util
import itertools
import os
from glob import glob

from gossipjax.launch._process_info import process_from_scheduler

JAX_FRACTION = 0.75  # the part of a GPU's memory that a process of JAX takes at its start
# XLA reads either of them, and refuses both together.
MEMORY_VARIABLES = {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}


def divide_gpus(
    num_processes: int, local_devices: int, *, asynchronous: bool
) -> list[dict[str, str]]:
    """Returns, for each process that the launcher starts, the variables that give it its GPUs."""
    needed = num_processes * local_devices
    # For each process, the numbers of its devices.
    parts = [range(first, first + local_devices) for first in range(0, needed, local_devices)]
    gpus = visible_gpus(os.environ.get("JAX_PLATFORMS"))
    # The nodes of an asynchronous job may share GPUs, so only those of one node must be different.
    # A single process always uses all GPUs.
    num_distinct = local_devices if asynchronous else needed
    if gpus and num_processes > 1 and num_distinct > len(gpus):
        raise ValueError(
            f"{'' if asynchronous else '--processes times '}--local-devices must be at most "
            f"{len(gpus)}, the number of visible GPUs ({','.join(gpus)}), got {num_processes} and "
            f"{local_devices}: NCCL refuses two processes on one GPU, only nodes of --asynchronous "
            f"may share one. Simulate the nodes in one process, by gx.Nodes({needed}) and without "
            "the launcher, or set JAX_PLATFORMS=cpu."
        )
    if not gpus or num_processes == 1 or not asynchronous:
        return [{"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, part))} for part in parts]
    # Asynchronous nodes do not call `jax.distributed.initialize`, which is what reads
    # JAX_LOCAL_DEVICE_IDS. So CUDA itself must show each node only its own GPUs.
    names = [",".join(gpus[number % len(gpus)] for number in part) for part in parts]
    memory = {}
    if needed > len(gpus) and not MEMORY_VARIABLES & os.environ.keys():
        nodes_per_gpu = -(-needed // len(gpus))  # rounded up
        fraction = JAX_FRACTION / nodes_per_gpu
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.3f}"}
    return [{"CUDA_VISIBLE_DEVICES": name, **memory} for name in names]


def choose_gpu() -> int | None:
    """Returns JAX's `local_device_ids` for a process of Slurm or Open MPI; if None, JAX chooses."""
    scheduler, _, local_rank = process_from_scheduler() or ("", None, None)
    if local_rank is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    import jax  # the launcher starts without JAX

    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    gpus = visible_gpus(platforms)
    if not gpus:
        return local_rank
    if len(gpus) == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0  # with --gpus-per-task=1 each process sees its own GPU, under the number 0
    if local_rank >= len(gpus):
        raise ValueError(
            f"the processes of {scheduler} on a host must be at most {len(gpus)}, the number of "
            f"visible GPUs ({','.join(gpus)}), got {local_rank + 1} or more: NCCL refuses two "
            "processes on one GPU. Start fewer, with several nodes on each GPU by "
            "gx.Nodes(N, mesh=gx.launch.mesh()), or set JAX_PLATFORMS=cpu. If each sees other "
            f"GPUs, set JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(len(gpus))))}."
        )
    return local_rank


def visible_gpus(platforms: str | None) -> list[str]:
    """Returns the NVIDIA GPUs that JAX finds here, named as in CUDA_VISIBLE_DEVICES.

    CUDA is not started, because a process that starts CUDA takes memory of each GPU.
    """
    count = _count_gpus() if not platforms or {"cuda", "gpu"} & {*platforms.split(",")} else 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not count:
        return [str(number) for number in range(count)]
    # CUDA reads the list up to the first name that it does not know.
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), given.split(",")))


def _count_gpus() -> int:
    """Counts the GPUs, if JAX has its plugin for them."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return 0
    # A container may have only some GPUs as devices, but see all GPUs in /proc.
    return len(glob("/dev/nvidia[0-9]*") or glob("/proc/driver/nvidia/gpus/*"))
