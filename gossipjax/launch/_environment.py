"""The job that the launcher runs, and the environment of its processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from gossipjax.launch._process_info import ADDRESSES, PLACE
from gossipjax.launch._progress import PROGRESS
from gossipjax.launch._signals import GRACE
from gossipjax.launch._stall import StallLimits

# For glibc: keep the memory that XLA frees, instead of fetching it from the kernel again, page by
# page, for the buffers of the next step. A step with 20 MB of parameters on CPU: 45 ms instead of
# 64. More than 1 GiB at the end of the heap goes back; no limit would make no step faster.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A command, and the options of the launcher that say how to run it."""

    command: Sequence[str]
    num_processes: int
    local_devices: int  # devices of each process
    gpu_variables: Sequence[Mapping[str, str]]  # variables of each process, from `divide_gpus`
    grace_seconds: float  # from SIGTERM to SIGKILL
    keep_memory: bool  # whether processes have `MALLOC_ENVIRONMENT`
    stall: StallLimits | None  # None does not watch
    max_restarts: int  # restarts of the job, or of each asynchronous node
    delay_seconds: float  # before the first restart; see `Backoff`
    asynchronous: bool  # whether each process is a node that is started again without the others


def make_environment(
    job: JobSpec, job_id: str, secret: str, addresses: Sequence[str], rank: int, restarts: int
) -> dict[str, str]:
    """Makes a process's environment: the launcher's, with defaults and fixed values.

    `addresses`: where each node of an asynchronous job listens, or where process 0 does.
    """
    # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the devices
    # that wait in a collective would leave no thread for the computations of others.
    defaults = {
        "NPROC": str(max(2 * job.local_devices, (os.cpu_count() or 1) // job.num_processes)),
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": "lo",  # else it listens at this machine's address in the network
        **(MALLOC_ENVIRONMENT if job.keep_memory else {}),
    }
    lockstep = {
        "GOSSIPJAX_COORDINATOR_ADDRESS": addresses[0],
        "GOSSIPJAX_NUM_PROCESSES": str(job.num_processes),
        "GOSSIPJAX_PROCESS_ID": str(rank),
    }
    required = {
        "JAX_NUM_CPU_DEVICES": str(job.local_devices),
        "GOSSIPJAX_RESTART": str(restarts),
        "GOSSIPJAX_JOB": job_id,
        GRACE: f"{job.grace_seconds:g}",
        PROGRESS: "",  # not that of a job in which the launcher runs
        **job.gpu_variables[rank],
    }
    if not job.asynchronous:
        return {**defaults, **os.environ, **required, **lockstep}
    # The nodes do not take part in a job in lockstep in which the launcher may run.
    inherited = {name: value for name, value in os.environ.items() if name not in lockstep}
    places = {PLACE: str(rank), ADDRESSES: ",".join(addresses)}
    return {**defaults, "GOSSIPJAX_SECRET": secret, **inherited, **required, **places}
