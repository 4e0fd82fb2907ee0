"""The place of a process in a job whose nodes are programs of their own."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from gossipjax.launch._process_info import (
    int_from_env,
    parse_address,
    process_from_arguments,
    process_from_scheduler,
)
from gossipjax.launch.supervisor import ADDRESSES, PLACE


class NodeInfo(NamedTuple):
    """Where a node is, and where the others may be.

    Attributes:
      place: its number, from 0.
      num_nodes: number of nodes at the start of the job.
      listen: where it is to listen, `host:port`; port 0 is any.
      contacts: addresses at which others listen.
      is_restart: whether it was started again, and joins a job that goes on.
      job: the name of the job, the same after restarts of a process; empty where nothing gives one.
    """

    place: int
    num_nodes: int
    listen: str
    contacts: tuple[str, ...]
    is_restart: bool
    job: str


def find_node() -> NodeInfo | None:
    """Returns the place of this process in a job of nodes that wait for nobody; None without one.

    `python -m gossipjax.launch --asynchronous` says it by `GOSSIPJAX_NODE_ADDRESSES` (where each
    node listens) and `GOSSIPJAX_NODE`. Elsewhere, `GOSSIPJAX_COORDINATOR_ADDRESS` says where node 0
    listens, and `GOSSIPJAX_PROCESS_ID` and `GOSSIPJAX_NUM_PROCESSES`, Slurm or Open MPI which node
    this is; the others listen at the address by which this machine reaches node 0.

    Raises:
      ValueError: if the variables are incomplete or contradict each other.
      ConnectionError: if the machine of node 0 is not known here.

    >>> find_node() is None
    True
    """
    is_restart = bool(int_from_env(None, "GOSSIPJAX_RESTART"))
    job = _find_job()
    given = os.environ.get(ADDRESSES)
    if given:
        place, addresses = _parse_places(given)
        others = tuple(a for number, a in enumerate(addresses) if number != place)
        return NodeInfo(place, len(addresses), addresses[place], others, is_restart, job)
    if PLACE in os.environ:
        raise ValueError(
            f"{PLACE} must come with {ADDRESSES}, got {os.environ[PLACE]} alone: set both, or none."
        )
    requested = process_from_arguments(None, None, None)
    if requested is None:
        _require_no_other_process()
    if requested is None or requested.coordinator_address is None:
        return None
    place, num_nodes = requested.info
    coordinator = requested.coordinator_address
    if place == 0:
        return NodeInfo(0, num_nodes, coordinator, (), is_restart, job)
    listen = f"{_find_own_host(coordinator)}:0"
    return NodeInfo(place, num_nodes, listen, (coordinator,), is_restart, job)


def _parse_places(given: str) -> tuple[int, list[str]]:
    """The place of this process, and where each node listens."""
    addresses = given.split(",")
    for number, address in enumerate(addresses):
        parse_address(address, ADDRESSES)
        if address in addresses[:number]:
            raise ValueError(f"{ADDRESSES} must be different, got {address} twice.")
    place = int_from_env(None, PLACE)
    if place is None or place >= len(addresses):
        raise ValueError(
            f"{PLACE} must be from 0 to {len(addresses) - 1}, a number for each of {ADDRESSES}, "
            f"got {place}."
        )
    return place, addresses


def _require_no_other_process() -> None:
    """Raises `ValueError` if a scheduler runs several processes, which do not know each other."""
    scheduled = process_from_scheduler()
    if scheduled is not None and scheduled.info.num_processes > 1:
        raise ValueError(
            f"{scheduled.scheduler} runs {scheduled.info.num_processes} processes, so one of them "
            "must be known to all, got no address: set GOSSIPJAX_COORDINATOR_ADDRESS=HOST:PORT for "
            "all of them, with the host of process 0."
        )


def _find_job() -> str:
    """The name of the job: the launcher's, or the scheduler's, another one when it is requeued."""
    variables = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    parts = [value for name in variables if (value := os.environ.get(name))]
    return os.environ.get("GOSSIPJAX_JOB") or "-".join(parts)


def _find_own_host(address: str) -> str:
    """The address of this machine on the way to another; nothing is sent."""
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConnectionError(
            f"the machine of node 0, {address}, must be known here, got: {error}."
        ) from error
    return f"[{own}]" if ":" in own else own
