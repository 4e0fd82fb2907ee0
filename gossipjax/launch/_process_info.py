"""Finds the number of this process from arguments, environment variables and schedulers."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from typing import NamedTuple

PLACE = "GOSSIPJAX_NODE"  # of an asynchronous job: the place of the process, and where all listen
ADDRESSES = "GOSSIPJAX_NODE_ADDRESSES"
# The variables in which a scheduler gives the number of processes, the number of this one, its
# number on its host, and the number of processes on the first host (Slurm: `8(x2)`).
SLURM = ("STEP_NUM_TASKS", "PROCID", "LOCALID", "STEP_TASKS_PER_NODE")
SCHEDULERS = {
    "Open MPI": [f"OMPI_COMM_WORLD_{x}" for x in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    "Slurm": [f"SLURM_{x}" for x in SLURM],
}
# Slurm counts how often it has requeued a job. A requeued job counts as another job.
JOBS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
VARIABLES = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")  # after GOSSIPJAX_ or JAX_
MAX_PORT = 65535
MAX_PROCESSES = 10**6
MAX_TIMEOUT = 10**6  # seconds


class ProcessInfo(NamedTuple):
    """The number of this process, from 0, and the number of processes in its job.

    >>> ProcessInfo(process_id=0, num_processes=4).num_processes
    4
    """

    process_id: int
    num_processes: int


class ScheduledProcess(NamedTuple):
    """The number of a process in a scheduler's job step, and among the processes of its host."""

    scheduler: str
    info: ProcessInfo
    local_rank: int | None
    local_size: int | None  # number of processes on process 0's host


def process_from_arguments(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> tuple[ProcessInfo, str | None] | None:
    """Finds the process information in arguments, else in variables; None if there is none.

    Also returns the coordinator's address, which is None only in a job of one process. The
    variables are `GOSSIPJAX_*`, or `JAX_*` if no `GOSSIPJAX_*` is set. Under a scheduler that
    numbers the processes, the coordinator's address alone is enough.
    """
    ours = any(os.environ.get(f"GOSSIPJAX_{name}") for name in VARIABLES)
    prefix = "GOSSIPJAX" if ours else "JAX"
    num_processes = int_from_env(f"{prefix}_NUM_PROCESSES", num_processes)
    process_id = int_from_env(f"{prefix}_PROCESS_ID", process_id)
    address = coordinator_address or None
    # JAX_COORDINATOR_ADDRESS alone is meant for JAX's own detection.
    if address is None and (ours or (num_processes, process_id) != (None, None)):
        address = os.environ.get(f"{prefix}_COORDINATOR_ADDRESS") or None
    if address is not None:
        parse_address(address)
    scheduled = process_from_scheduler()
    if num_processes is None and process_id is None:
        if scheduled is not None and (address or scheduled.info.num_processes == 1):
            process_id, num_processes = scheduled.info
        elif address is None:
            return None
    if num_processes == 1 and process_id is None:
        process_id = 0
    if (address is None and num_processes != 1) or num_processes is None or process_id is None:
        raise ValueError(
            f"coordinator_address, num_processes and process_id ({prefix}_COORDINATOR_ADDRESS and "
            f"so on) must be given together, got {address}, {num_processes} and {process_id}: give "
            "all three, or none of them for a single process."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            "process_id must be an integer from 0 to num_processes - 1, got "
            f"process_id={process_id} and num_processes={num_processes}."
        )
    return ProcessInfo(process_id, num_processes), address


def require_address_with_numbers() -> None:
    """Raises `ValueError` if only an address is given, or only numbers of processes."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    scheduled = process_from_scheduler()
    if scheduled is not None and scheduled.info.num_processes > 1:
        raise ValueError(
            f"{scheduled.scheduler} runs {scheduled.info.num_processes} processes, and nothing "
            "says where the first of them is. Set GOSSIPJAX_COORDINATOR_ADDRESS=HOST:PORT for all "
            "of them, with the host of process 0."
        )
    if address and scheduled is None:
        raise ValueError(
            "JAX_COORDINATOR_ADDRESS must come with JAX_NUM_PROCESSES and JAX_PROCESS_ID where no "
            f"scheduler numbers the processes, got {address} alone: set all three, or none."
        )


def process_from_scheduler() -> ScheduledProcess | None:
    """Finds the process information of Open MPI or Slurm; None outside of their job steps."""
    for scheduler, (*numbers, on_host) in SCHEDULERS.items():
        num_processes, process_id, local_rank = map(int_from_env, numbers)
        if num_processes is not None and process_id is not None:
            info = ProcessInfo(process_id, num_processes)
            size = re.match(r"\d+", os.environ.get(on_host, ""))
            return ScheduledProcess(scheduler, info, local_rank, int(size[0]) if size else None)
    return None


class NodeInfo(NamedTuple):
    """Says where a node of an asynchronous job listens, and where it may find other nodes.

    >>> NodeInfo(0, 2, "127.0.0.1:0", ("127.0.0.1:5601",), is_restart=False, job="a").num_nodes
    2
    """

    place: int  # the number of this node, from 0
    num_nodes: int  # number of nodes at the start of the job
    listen: str  # where this node listens, `host:port`; port 0 is any free port
    contacts: tuple[str, ...]  # addresses at which other nodes listen
    is_restart: bool  # whether this node was started again and joins a running job
    job: str  # name of the job, the same after restarts of a process, or empty


def find_node() -> NodeInfo | None:
    """Says which node of an asynchronous job this process is; None outside of such a job.

    `GOSSIPJAX_NODE_ADDRESSES` says where each node listens, and `GOSSIPJAX_NODE` which node this
    is. Without these variables, `GOSSIPJAX_COORDINATOR_ADDRESS` says where node 0 listens, and the
    variables of `initialize`, Slurm or Open MPI say which node this is. A node other than node 0
    then listens at the address by which its machine reaches node 0.

    Raises:
      ValueError: if the variables are incomplete or contradict each other.
      ConnectionError: if this machine cannot resolve the name of node 0's machine.

    >>> find_node() is None
    True
    """
    is_restart = bool(int_from_env("GOSSIPJAX_RESTART"))
    job = find_job()
    if os.environ.get(ADDRESSES):
        addresses = os.environ[ADDRESSES].split(",")
        place = int_from_env(PLACE)
        if place is None or place >= len(addresses):
            raise ValueError(
                f"{PLACE} must be the place of this node in {ADDRESSES}, from 0 to "
                f"{len(addresses) - 1}, got {place}: each node needs another."
            )
        others = tuple(a for number, a in enumerate(addresses) if number != place)
        return NodeInfo(place, len(addresses), addresses[place], others, is_restart, job)
    requested = process_from_arguments(None, None, None)
    if requested is None:
        require_address_with_numbers()
        return None
    (place, num_nodes), coordinator = requested
    if coordinator is None:
        return None
    if place == 0:
        return NodeInfo(0, num_nodes, coordinator, (), is_restart, job)
    listen = f"{find_own_host(coordinator)}:0"
    return NodeInfo(place, num_nodes, listen, (coordinator,), is_restart, job)


def find_job() -> str:
    """Returns the name of the job, the same in all its processes; empty if nothing names it."""
    parts = [value for name in JOBS if (value := os.environ.get(name))]
    return os.environ.get("GOSSIPJAX_JOB") or "-".join(parts)


def find_own_host(address: str) -> str:
    """Returns the address by which this machine would reach `address`; sends nothing."""
    host, port = parse_address(address)
    try:
        family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConnectionError(
            f"the machine of node 0, {address}, must be known here, got: {error}."
        ) from error
    return f"[{own}]" if ":" in own else own


def describe_gloo(connection: socket.socket, process_id: int) -> str | None:
    """Says why others could not reach Gloo of this process, which has a connection to one of them.

    Gloo listens at the address of the machine's name, and JAX has no option for another.
    """
    own, other = (
        place[0].removeprefix("::ffff:")
        for place in (connection.getsockname(), connection.getpeername())
    )
    name = socket.gethostname()
    gloo = "no address"
    with contextlib.suppress(OSError):
        gloo = str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    # An IPv4 and an IPv6 address do not show whether they are in one network.
    is_there = gloo == own or (":" in gloo) != (":" in own)
    if is_there or own == other or own.startswith("127."):
        return None
    return (
        f"Gloo of process {process_id} would listen at {gloo}, to which the name of its machine, "
        f"{name}, resolves, and not at {own}, where it is in the network of the coordinator: the "
        f"others would not reach it there, or around a tunnel. Let `{own} {name}` be the only line "
        f"with {name} in /etc/hosts of that machine, or take a coordinator_address in the other "
        "network."
    )


def int_from_env(variable: str, value: int | None = None) -> int | None:
    """Returns the value if there is one, else the integer in an environment variable, or None."""
    name = variable
    given: object = value
    if value is not None:
        name = f"{variable.partition('JAX_')[2].lower()} ({variable})"
    elif (text := os.environ.get(variable)) is not None:
        given = int(text) if text.isdecimal() else text
    else:
        return None
    if type(given) is not int or not 0 <= given <= MAX_PROCESSES:
        raise ValueError(f"{name} must be an integer from 0 to {MAX_PROCESSES}, got {given!r}.")
    return given


def seconds_from(value: float | None, name: str, default: float) -> float:
    """Returns `value`, else the seconds in the variable of this name, else the default."""
    variable = f"GOSSIPJAX_{name.upper()}"
    given = os.environ.get(variable, default) if value is None else value
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:  # also for nan
        raise ValueError(
            f"{name} ({variable}) must be a number of seconds > 0 and <= "
            f"{MAX_TIMEOUT}, got {given!r}."
        )
    return seconds


def parse_address(address: str, name: str = "coordinator_address") -> tuple[str, int]:
    """Splits `HOST:PORT` or `[IPv6]:PORT` into host and port.

    >>> parse_address("node-7:1234"), parse_address("[::1]:80")
    (('node-7', 1234), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare_host = host[1:-1] if is_bracketed else host
    number = int(port) if port.isdecimal() else 0
    is_host = bare_host.isprintable() and " " not in bare_host and bare_host != ""
    if is_host and (":" in bare_host) == is_bracketed and 0 < number <= MAX_PORT:
        return bare_host, number
    raise ValueError(
        f"{name} must be HOST:PORT with a port from 1 to {MAX_PORT}, got "
        f"{address!r}. Write it as in node-7:1234 or [::1]:1234."
    )
