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
COORDINATORS = ("GOSSIPJAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
# The variables in which an engine gives the number of this process and the number of processes.
OURS = ("GOSSIPJAX_PROCESS_ID", "GOSSIPJAX_NUM_PROCESSES")
JAX = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
# A scheduler also gives the number of the process on its host. Where Slurm starts the daemons of
# mpirun, it has numbered these.
SCHEDULERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
# Slurm counts how often it has requeued a job. A requeued job counts as another job.
JOBS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


class ProcessInfo(NamedTuple):
    """The number of this process, from 0, and the number of processes in its job.

    >>> ProcessInfo(process_id=0, num_processes=4).num_processes
    4
    """

    process_id: int
    num_processes: int


def process_from_arguments(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> tuple[ProcessInfo, str | None] | None:
    """Finds the number of this process and of all, and the coordinator's address.

    The address is that of the argument, else of our variable, else of JAX's. All numbers that are
    given must agree, except in a job of one process, which may be inside of a larger job and may
    have no address. Returns None if nothing gives a number, or if a scheduler gives one and nothing
    gives the address, which JAX may detect.
    """
    our_address = coordinator_address or os.environ.get(COORDINATORS[0])
    address = our_address or os.environ.get(COORDINATORS[1]) or None
    if address is not None:
        parse_address(address)
    ours = tuple(map(int_from_env, OURS))
    own_count = ours[1] if num_processes is None else num_processes
    own_number = ours[0] if process_id is None else process_id
    if own_count == 1 and not own_number:
        return ProcessInfo(0, 1), address  # a job by itself, even if a scheduler has a larger one
    sources = [(ProcessInfo._fields, (process_id, num_processes)), (OURS, ours)]
    sources.append((JAX, tuple(map(int_from_env, JAX))))
    scheduled = process_from_scheduler()
    if scheduled is not None:
        sources.append((SCHEDULERS[scheduled[0]], scheduled[1]))
    # All sources that give the number of this process, or of all processes, must agree.
    number, count = (
        _find_same({names[column]: values[column] for names, values in sources})
        for column in range(2)
    )
    if count == 1 and number in (None, 0):
        return ProcessInfo(0, 1), address
    # JAX_COORDINATOR_ADDRESS alone is meant for JAX's own detection, and a scheduler may know more.
    is_unnumbered = count is None and number is None
    lacks_address = scheduled is not None and not address
    if not our_address and (is_unnumbered or lacks_address):
        return None
    if address is None or count is None or number is None:
        raise ValueError(
            f"coordinator_address, num_processes and process_id ({COORDINATORS[0]} and so on, or "
            f"with JAX_) must be given together, got {address}, {count} and {number}: give all "
            "three, or none of them for a single process."
        )
    if not 0 <= number < count:
        raise ValueError(
            "process_id must be an integer from 0 to num_processes - 1, got "
            f"process_id={number} and num_processes={count}."
        )
    return ProcessInfo(number, count), address


def _find_same(values: dict[str, int | None]) -> int | None:
    """Returns the number on which all given values agree; None if none is given."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        first, *others = given
        other = next(name for name in others if given[name] != given[first])
        raise ValueError(
            f"{first} and {other} must be the same, got {first}={given[first]} and "
            f"{other}={given[other]}: one is of another job. Unset it, for example by "
            f"env -u {first if first.isupper() else other} python ..."
        )
    return next(iter(given.values()), None)


def require_address() -> None:
    """Raises `ValueError` if a scheduler runs several processes; call it if no address is known."""
    scheduler, info, _ = process_from_scheduler() or ("", ProcessInfo(0, 1), None)
    if info.num_processes > 1:
        raise ValueError(
            f"{scheduler} runs {info.num_processes} processes, and nothing says where the first of "
            f"them is. Set {COORDINATORS[0]}=HOST:PORT for all of them (mpirun passes it on with "
            "-x), with the host of process 0."
        )


def process_from_scheduler() -> tuple[str, ProcessInfo, int | None] | None:
    """Returns the scheduler that started this process, its numbers, and its number on the host."""
    for scheduler, variables in SCHEDULERS.items():
        process_id, num_processes, local_rank = map(int_from_env, variables)
        if num_processes is not None and process_id is not None:
            return scheduler, ProcessInfo(process_id, num_processes), local_rank
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
                f"{len(addresses) - 1}, got {place}: each node needs another. If this node joins "
                "others, add its own address, as they reach it, at the end, on this machine alone: "
                f"export {PLACE}={len(addresses)} {ADDRESSES}={','.join(addresses)},HOST:PORT"
            )
        others = tuple(a for number, a in enumerate(addresses) if number != place)
        return NodeInfo(place, len(addresses), addresses[place], others, is_restart, job)
    requested = process_from_arguments()
    if requested is None:
        if os.environ.get(PLACE):
            raise ValueError(
                f"{ADDRESSES} must say where each node listens if {PLACE} is set, got "
                f"{PLACE}={os.environ[PLACE]} alone: export {ADDRESSES}=HOST:PORT,HOST:PORT, or "
                f"unset {PLACE}."
            )
        require_address()
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


def find_gloo_problem(connection: socket.socket, process_id: int) -> str | None:
    """Says why other processes could not reach Gloo on this machine; returns None if they can.

    Gloo listens at the address to which the name of the machine resolves, and JAX has no option for
    another. `connection`, to another process, shows the address at which others reach it.
    """
    own, other = (
        place[0].removeprefix("::ffff:")
        for place in (connection.getsockname(), connection.getpeername())
    )
    name = socket.gethostname()
    gloo = "no address"  # where Gloo listens
    with contextlib.suppress(OSError):
        gloo = str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    # An IPv4 and an IPv6 address do not show whether they are in one network, so they pass.
    may_be_reached = gloo == own or (":" in gloo) != (":" in own)
    is_on_this_machine = own == other or own.startswith("127.")
    if may_be_reached or is_on_this_machine:
        return None
    return (
        f"Gloo of process {process_id} would listen at {gloo}, to which the name of its machine, "
        f"{name}, resolves, and not at {own}, where it is in the network of the coordinator: the "
        f"others would not reach it there, or around a tunnel. Let `{own} {name}` be the only line "
        f"with {name} in /etc/hosts of that machine, or take a coordinator_address in the other "
        "network."
    )


def int_from_env(variable: str) -> int | None:
    """Returns the integer in an environment variable, or None if it is not set."""
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{variable} must be an integer >= 0, got {text!r}.")
    return int(text)


def seconds_from(value: float | None, name: str, default: float) -> float:
    """Returns `value`, else the seconds in the variable `GOSSIPJAX_NAME`, else the default."""
    variable = f"GOSSIPJAX_{name.upper()}"
    given = os.environ.get(variable, default) if value is None else value
    with contextlib.suppress(ValueError):
        if 0 < float(given) < math.inf:
            return float(given)
    raise ValueError(f"{name} ({variable}) must be a number of seconds > 0, got {given!r}.")


def parse_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT` or `[IPv6]:PORT` into host and port.

    >>> parse_address("node-7:1234"), parse_address("[::1]:80")
    (('node-7', 1234), ('::1', 80))
    """
    found = re.fullmatch(r"(?:\[([^\[\]\s]+:[^\[\]\s]*)\]|([^:\[\]\s]+)):([0-9]{1,5})", address)
    if found is None or not 0 < int(found[3]) < 2**16:
        raise ValueError(
            "The address must be HOST:PORT with a port from 1 to 65535, got "
            f"{address!r}. Write it as in node-7:1234 or [::1]:1234."
        )
    return found[1] or found[2], int(found[3])
