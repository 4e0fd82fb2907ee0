"""Chooses the GPUs of each process, as the table in docs/guides/launcher.md says."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import warnings
from glob import glob

from gossipjax.launch._process_info import ProcessInfo, process_from_scheduler

JAX_FRACTION = 0.75  # of a GPU's memory, which a process of JAX takes at its start
MEMORY_VARIABLES = {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"}  # at most one


def divide_gpus(
    num_processes: int, local_devices: int, *, asynchronous: bool
) -> tuple[list[dict[str, str]], str]:
    """Returns the variables that give each process of the launcher its GPUs, and a warning."""
    needed = num_processes * local_devices
    parts = [range(first, first + local_devices) for first in range(0, needed, local_devices)]
    variables = [{"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, part))} for part in parts]
    gpus = visible_gpus(os.environ.get("JAX_PLATFORMS"))
    if not gpus or num_processes == 1:  # a single process uses all GPUs
        return variables, ""
    if (local_devices if asynchronous else needed) > len(gpus):
        raise ValueError(
            f"{'' if asynchronous else '--processes times '}--local-devices must be at most "
            f"{len(gpus)}, the number of {_describe(gpus)}, got {num_processes} and "
            f"{local_devices}: NCCL refuses two processes on one GPU, only nodes of --asynchronous "
            f"may share one. Simulate the nodes in one process, by gx.Nodes({needed}) and without "
            "the launcher, or set JAX_PLATFORMS=cpu."
        )
    warning = ""
    if needed < len(gpus):
        warning = (
            f"{needed} of {len(gpus)} GPUs are used: give more --processes or --local-devices, or "
            f"set CUDA_VISIBLE_DEVICES={','.join(gpus[:needed])} if this is meant"
        )
    if not asynchronous:
        return variables, warning
    # JAX reads JAX_LOCAL_DEVICE_IDS only when it joins processes, and it does not join nodes.
    names = [",".join(gpus[number % len(gpus)] for number in part) for part in parts]
    variables = [{"CUDA_VISIBLE_DEVICES": name} for name in names]
    if needed > len(gpus) and not MEMORY_VARIABLES & os.environ.keys():
        fraction = f"{JAX_FRACTION / -(-needed // len(gpus)):.3f}"
        variables = [{**given, "XLA_PYTHON_CLIENT_MEM_FRACTION": fraction} for given in variables]
        warning = (
            f"{num_processes} nodes share the {_describe(gpus)}: each takes {fraction} of the "
            "memory of one, unless you set XLA_PYTHON_CLIENT_MEM_FRACTION"
        )
    return variables, warning


def choose_gpu(info: ProcessInfo | None) -> int | None:
    """Returns JAX's `local_device_ids` for a process of Slurm or Open MPI; if None, JAX chooses.

    `info` is None if JAX shall find the process information itself.
    """
    scheduled = process_from_scheduler()
    if scheduled is None or scheduled.local_rank is None or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if info not in (None, scheduled.info):  # the user gave other numbers inside a job step
        return None
    import jax  # the launcher starts without JAX

    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    gpus = visible_gpus(platforms)
    if not gpus:
        return scheduled.local_rank
    if len(gpus) == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0  # with --gpus-per-task=1 each process sees its own GPU, under the number 0
    is_first = scheduled.info.process_id == 0  # only this process warns
    on_host = (scheduled.local_size or len(gpus)) if is_first else scheduled.local_rank + 1
    all_ids = ",".join(map(str, range(len(gpus))))
    if on_host > len(gpus):
        raise ValueError(
            f"the processes of {scheduled.scheduler} on a host must be at most {len(gpus)}, the "
            f"number of {_describe(gpus)}, got {on_host}: NCCL refuses two processes on one GPU. "
            "Start fewer, with several nodes on each GPU by gx.Nodes(N, mesh=gx.launch.mesh()), or "
            f"set JAX_PLATFORMS=cpu. If each sees other GPUs, set JAX_LOCAL_DEVICE_IDS={all_ids}."
        )
    if is_first and on_host < len(gpus):
        warnings.warn(
            f"{on_host} of {len(gpus)} GPUs of a host are used: start {len(gpus)} processes on "
            f"each, or one with JAX_LOCAL_DEVICE_IDS={all_ids}. If this is meant, set "
            f"CUDA_VISIBLE_DEVICES={','.join(gpus[:on_host])}.",
            stacklevel=3,
        )
    return scheduled.local_rank


def visible_gpus(platforms: str | None) -> list[str]:
    """Returns the NVIDIA GPUs that JAX finds here, named as in CUDA_VISIBLE_DEVICES.

    CUDA is not started, because a process that starts CUDA takes memory of each GPU.
    """
    is_asked = not platforms or {"cuda", "gpu"} & set(platforms.split(","))
    count = _count_gpus() if is_asked and _has_plugin() else 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not count:
        return [str(number) for number in range(count)]
    # CUDA reads the list up to the first name that it does not know.
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), given.split(",")))


def _has_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def _count_gpus() -> int:
    # A container may have only some GPUs as devices, but see all GPUs in /proc.
    found = glob("/dev/nvidia[0-9]*") or glob("/proc/driver/nvidia/gpus/*")
    if found or not shutil.which("nvidia-smi"):
        return len(found)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)  # on Windows
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _describe(gpus: list[str]) -> str:
    return f"visible GPUs ({','.join(gpus)})"
