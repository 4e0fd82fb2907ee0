"""Process information from arguments, environment variables and schedulers."""

from __future__ import annotations

import contextlib
import math
import os
from typing import NamedTuple


class ProcessInfo(NamedTuple):
    """Number of this process, from 0, and number of processes in its job."""

    process_id: int
    num_processes: int


class RequestedProcess(NamedTuple):
    """Process information with the coordinator's address, None only in a job of one process."""

    info: ProcessInfo
    coordinator_address: str | None


class ScheduledProcess(NamedTuple):
    """Process information in a scheduler's job step, and the number of the process on its host."""

    scheduler: str
    info: ProcessInfo
    local_rank: int | None


class SchedulerVariables(NamedTuple):
    """Names of the environment variables in which a scheduler describes a process."""

    num_processes: str
    process_id: str
    local_rank: str


SCHEDULERS = {
    "Open MPI": SchedulerVariables(
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    "Slurm": SchedulerVariables("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}
MAX_PORT = 65535


def process_from_arguments(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> RequestedProcess | None:
    """Process information from arguments, else from `GOSSIPJAX_*` variables; None without any.

    Under a scheduler that numbers the processes, the coordinator's address alone is enough.

    Raises:
      ValueError: if the information is incomplete or contradicts itself.
    """
    address = coordinator_address or os.environ.get("GOSSIPJAX_COORDINATOR_ADDRESS") or None
    num_processes = int_from_env(num_processes, "GOSSIPJAX_NUM_PROCESSES")
    process_id = int_from_env(process_id, "GOSSIPJAX_PROCESS_ID")
    scheduled = process_from_scheduler()
    if num_processes is None and process_id is None:
        if scheduled is not None and (address or scheduled.info.num_processes == 1):
            process_id, num_processes = scheduled.info
        elif address is None:
            return None
    if num_processes == 1 and process_id is None:
        process_id = 0
    if (address is None and num_processes != 1) or num_processes is None or process_id is None:
        raise ValueError(_describe_missing(address, num_processes, process_id))
    if not 0 <= process_id < num_processes:
        raise ValueError(
            "process_id must be an integer from 0 to num_processes - 1, got "
            f"process_id={process_id} and num_processes={num_processes}."
        )
    if address is not None:
        parse_address(address)
    return RequestedProcess(ProcessInfo(process_id, num_processes), address)


def _describe_missing(
    address: str | None, num_processes: int | None, process_id: int | None
) -> str:
    values = {
        "coordinator_address": address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [f"{k} (GOSSIPJAX_{k.upper()})" for k, value in values.items() if value is None]
    return (
        f"coordinator_address, num_processes and process_id must be given together, got no "
        f"{' and no '.join(missing)}. Give all three, or none of them for a single process."
    )


def process_from_scheduler() -> ScheduledProcess | None:
    """Process information from Open MPI or Slurm; None outside of their job steps."""
    for scheduler, variables in SCHEDULERS.items():
        num_processes = os.environ.get(variables.num_processes)
        process_id = os.environ.get(variables.process_id)
        if num_processes is not None and process_id is not None:
            local_rank = os.environ.get(variables.local_rank)
            return ScheduledProcess(
                scheduler,
                ProcessInfo(int(process_id), int(num_processes)),
                int(local_rank) if local_rank else None,
            )
    return None


def local_rank_from_scheduler(info: ProcessInfo) -> int | None:
    """Number of this process on its host, if a scheduler gave `info`: the number of its GPU.

    This is the GPU that JAX chooses where JAX detects the scheduler. None where
    `JAX_LOCAL_DEVICE_IDS` chooses.
    """
    scheduled = process_from_scheduler()
    if scheduled is None or scheduled.info != info or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    return scheduled.local_rank


def int_from_env(value: int | None, variable: str) -> int | None:
    """`value`, else the integer in an environment variable, else None.

    Raises:
      ValueError: if it is not an integer.
    """
    given = os.environ.get(variable) if value is None else value
    if isinstance(given, str) and given.isascii() and given.isdigit():
        return int(given)
    if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
        name = variable.removeprefix("GOSSIPJAX_").lower()
        raise ValueError(f"{name} ({variable}) must be an integer >= 0, got {given!r}.")
    return given


def timeout_seconds(value: float | None) -> float:
    """`value`, else the seconds in `GOSSIPJAX_INITIALIZATION_TIMEOUT`, else 60.

    Raises:
      ValueError: if it is not a positive finite number.
    """
    variable = "GOSSIPJAX_INITIALIZATION_TIMEOUT"
    given = os.environ.get(variable, 60) if value is None else value
    with contextlib.suppress(ValueError):
        if 0 < float(given) < math.inf:
            return float(given)
    raise ValueError(
        f"initialization_timeout ({variable}) must be a finite number of seconds > 0, "
        f"got {given!r}."
    )


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`.

    Raises:
      ValueError: if `address` has neither form.

    >>> parse_address("node-7:1234"), parse_address("[::1]:80")
    (('node-7', 1234), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare_host = host[1:-1] if is_bracketed else host
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not bare_host or (":" in bare_host) != is_bracketed or not 0 < number <= MAX_PORT:
        raise ValueError(
            f"coordinator_address must be HOST:PORT with a port from 1 to {MAX_PORT}, got "
            f"{address!r}. Write it as in node-7:1234 or [::1]:1234."
        )
    return bare_host, number


def is_loopback(address: str) -> bool:
    """Whether only processes on this machine can reach the address."""
    host, _ = parse_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")
