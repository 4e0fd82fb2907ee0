"""Process information from arguments, environment variables and schedulers."""

from __future__ import annotations

import contextlib
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
MAX_PROCESSES = 10**6
MAX_TIMEOUT = 10**6  # seconds


def process_from_arguments(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> RequestedProcess | None:
    """Process information from arguments, else from `GOSSIPJAX_*` variables; None without any.

    Under a scheduler that numbers the processes, the coordinator's address alone is enough.

    Raises:
      ValueError: if the information is incomplete or contradicts itself.
    """
    address = coordinator_address or os.environ.get("GOSSIPJAX_COORDINATOR_ADDRESS") or None
    if address is not None:
        parse_address(address)
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
                ProcessInfo(
                    _parse_int(process_id, variables.process_id),
                    _parse_int(num_processes, variables.num_processes),
                ),
                _parse_int(local_rank, variables.local_rank) if local_rank else None,
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
      ValueError: if it is not an integer from 0 to `MAX_PROCESSES`.
    """
    given = os.environ.get(variable) if value is None else value
    if given is None:
        return None
    return _parse_int(given, f"{variable.removeprefix('GOSSIPJAX_').lower()} ({variable})")


def _parse_int(given: object, name: str) -> int:
    number = None
    if isinstance(given, str):
        if given.isascii() and given.isdigit() and len(given) <= len(str(MAX_PROCESSES)):
            number = int(given)
    elif isinstance(given, int) and not isinstance(given, bool):
        number = given
    if number is None or not 0 <= number <= MAX_PROCESSES:
        raise ValueError(f"{name} must be an integer from 0 to {MAX_PROCESSES}, got {given!r}.")
    return number


def timeout_seconds(value: float | None) -> float:
    """`value`, else the seconds in `GOSSIPJAX_INITIALIZATION_TIMEOUT`, else 60.

    Raises:
      ValueError: if it is not a number > 0 and <= `MAX_TIMEOUT`.
    """
    variable = "GOSSIPJAX_INITIALIZATION_TIMEOUT"
    given = os.environ.get(variable, "60") if value is None else value
    seconds = 0.0
    if not isinstance(value, str | bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            seconds = float(given)
    if not 0 < seconds <= MAX_TIMEOUT:  # also for nan
        raise ValueError(
            f"initialization_timeout ({variable}) must be a number of seconds > 0 and <= "
            f"{MAX_TIMEOUT}, got {given!r}."
        )
    return seconds


def secret_from_env() -> str | None:
    """The secret by which the processes of a job know each other, in `GOSSIPJAX_SECRET`, or None.

    Raises:
      ValueError: if it is empty.
    """
    secret = os.environ.get("GOSSIPJAX_SECRET")
    if secret == "":
        raise ValueError(
            "GOSSIPJAX_SECRET must not be empty. Set it to the same text for all processes of the "
            "job, or unset it."
        )
    return secret


def parse_address(address: str, name: str = "coordinator_address") -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`.

    Raises:
      ValueError: if `address` has neither form. `name` is its name in the message.

    >>> parse_address("node-7:1234"), parse_address("[::1]:80")
    (('node-7', 1234), ('::1', 80))
    """
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        bare_host = host[1:-1] if is_bracketed else host
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if _is_host(bare_host) and (":" in bare_host) == is_bracketed and 0 < number <= MAX_PORT:
            return bare_host, number
    raise ValueError(
        f"{name} must be HOST:PORT with a port from 1 to {MAX_PORT}, got "
        f"{address!r}. Write it as in node-7:1234 or [::1]:1234."
    )


def _is_host(text: str) -> bool:
    """Whether `text` may be a name or an address, as the functions of `socket` require."""
    if not text.isprintable() or " " in text:
        return False
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False
