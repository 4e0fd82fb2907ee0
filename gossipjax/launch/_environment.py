"""The environment of the processes that the launcher starts."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence

from gossipjax.launch._process_info import ADDRESSES, PLACE
from gossipjax.launch._progress import PROGRESS
from gossipjax.launch._signals import GRACE

# For glibc: keep the memory that XLA frees, instead of fetching it from the kernel again, page by
# page, for the buffers of the next step. A step with 20 MB of parameters on CPU: 45 ms instead of
# 64. More than 1 GiB at the end of the heap goes back; no limit would make no step faster.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def make_environment(
    options: Namespace, job: str, secret: str, addresses: Sequence[str], rank: int, restarts: int
) -> dict[str, str]:
    """Makes a process's environment: the launcher's, with defaults and fixed values.

    `addresses`: where each asynchronous node listens, or where process 0 does.
    """
    # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the devices
    # that wait in a collective would leave no thread for the computations of others.
    num_threads = max(2 * options.local_devices, (os.cpu_count() or 1) // options.processes)
    defaults = {
        "NPROC": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": "lo",  # else it listens at this machine's address in the network
        **(MALLOC_ENVIRONMENT if options.keep_memory else {}),
    }
    lockstep = {
        "GOSSIPJAX_COORDINATOR_ADDRESS": addresses[0],
        "GOSSIPJAX_NUM_PROCESSES": str(options.processes),
        "GOSSIPJAX_PROCESS_ID": str(rank),
    }
    required = {
        "JAX_NUM_CPU_DEVICES": str(options.local_devices),
        "GOSSIPJAX_RESTART": str(restarts),
        "GOSSIPJAX_JOB": job,
        GRACE: f"{options.grace:g}",
        PROGRESS: "",  # not that of a job in which the launcher runs
        **options.gpu_variables[rank],
    }
    if not options.asynchronous:
        return {**defaults, **os.environ, **required, **lockstep}
    # The nodes do not take part in a job in lockstep in which the launcher may run.
    inherited = {name: value for name, value in os.environ.items() if name not in lockstep}
    places = {PLACE: str(rank), ADDRESSES: ",".join(addresses)}
    return {**defaults, "GOSSIPJAX_SECRET": secret, **inherited, **required, **places}
