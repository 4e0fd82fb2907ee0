"""Where a process finds its job: its place in it, and the roll call at process 0's port.

JAX ends a process with an abort, which no program can catch, where the coordinator cannot be
reached, and where a process is missing or was started twice, without saying which. So all meet at
that port first, before JAX takes it over.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from typing import Any, NamedTuple

PAUSE_SECONDS = 0.05  # between two attempts to reach process 0
READ_SECONDS = 10.0  # that a connection has for saying who it is
MARGIN_SECONDS = 5.0  # that process 0's answer may be late

# Where schedulers say how many processes there are, which one this is, and which one on its host.
SCHEDULERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}


class Place(NamedTuple):
    """This process' number, from 0, and how many processes there are."""

    process: int
    processes: int


def given_place(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[str, Place | None]:
    """The coordinator and the place that arguments and environment give; None if they give none.

    Raises:
      ValueError: for half a place, or one that cannot be.
    """
    address = coordinator or os.environ.get("GOSSIPJAX_COORDINATOR", "")
    size = whole_number(processes, "GOSSIPJAX_PROCESSES")
    rank = whole_number(process, "GOSSIPJAX_PROCESS")
    _, place = scheduled_place()
    if place and (address or place.processes == 1) and size is None and rank is None:
        rank, size = place
    if not address and size is None and rank is None:
        return "", None
    if size == 1 and rank is None:
        rank = 0
    absent = {
        "coordinator": not address and size != 1,
        "processes": size is None,
        "process": rank is None,
    }
    missing = [name for name, is_absent in absent.items() if is_absent]
    if missing or size is None or rank is None:
        names = " and ".join(f"{name} (GOSSIPJAX_{name.upper()})" for name in missing)
        raise ValueError(
            f"half a place in a job, without {names}: give coordinator, processes and process, or "
            "none of them."
        )
    if not 0 <= rank < size:
        raise ValueError(
            f"process is a number from 0 to processes - 1; given {rank}, of processes={size}."
        )
    if address:
        parse_address(address)
    return address, Place(rank, size)


def scheduled_place() -> tuple[str, Place | None]:
    """A scheduler's name, and what it says of this job step; None if there is none."""
    for name, (size, rank, _) in SCHEDULERS.items():
        if size in os.environ and rank in os.environ:
            return name, Place(int(os.environ[rank]), int(os.environ[size]))
    return "", None


def scheduled_device(place: Place) -> int | None:
    """This process' number on its host, if a scheduler gave the place: JAX takes the GPU of that
    number where it finds the place itself. `JAX_LOCAL_DEVICE_IDS` goes before it."""
    name, scheduled = scheduled_place()
    local = os.environ.get(SCHEDULERS[name][2]) if scheduled == place else None
    return int(local) if local and "JAX_LOCAL_DEVICE_IDS" not in os.environ else None


def whole_number(given: int | None, variable: str) -> int | None:
    """A number that was given, else that of an environment variable, else None."""
    value = os.environ.get(variable) if given is None else given
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        name = variable.removeprefix("GOSSIPJAX_").lower()
        raise ValueError(f"{name} ({variable}) is a whole number; given {value!r}.")
    return value


def patience(given: float | None) -> float:
    """The seconds that were given, else those of `GOSSIPJAX_TIMEOUT`, else 60."""
    value = os.environ.get("GOSSIPJAX_TIMEOUT", 60) if given is None else given
    with contextlib.suppress(ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    raise ValueError(
        f"timeout (GOSSIPJAX_TIMEOUT) is a number of seconds above 0; given {value!r}."
    )


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPv6]:PORT`.

    Raises:
      ValueError: if it is neither.

    >>> parse_address("node-7:1234"), parse_address("[::1]:80")
    (('node-7', 1234), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not bare or (":" in bare) != bracketed or not 0 < number < 65536:
        raise ValueError(
            "the coordinator is HOST:PORT, as in node-7:1234 or [::1]:1234, with a port from 1 to "
            f"65535; given {address!r}."
        )
    return bare, number


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach the address."""
    host, _ = parse_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def meet(address: str, place: Place, timeout: float) -> None:
    """Returns when all processes have come to `address`, where process 0 waits for them.

    In the others, it returns when something listens there again: JAX's client would wait for a
    second before it looks again.

    Args:
      address: `HOST:PORT` of process 0.
      timeout: seconds that process 0 waits for the others, and the others for process 0.

    Raises:
      ConnectionError: in every process that can be told, if process 0 cannot listen or be reached,
        processes are missing or came twice, or they disagree on how many they are.
    """
    if place.process == 0:
        complaint = _call_the_roll(address, place, timeout)
    else:
        complaint = _answer_the_roll(address, place, timeout)
    if complaint:
        raise ConnectionError(complaint)


def _call_the_roll(address: str, place: Place, timeout: float) -> str:
    deadline, came, complaint = time.monotonic() + timeout, {0: _who()}, ""
    with contextlib.ExitStack() as stack:
        waiting = []
        with _listen(address, place) as server:
            while len(came) < place.processes and not complaint:
                server.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    connection = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    complaint = _missing(came, place, address, timeout)
                    break
                said = _read(connection, READ_SECONDS)
                if said.keys() >= {"process", "processes", "who"}:
                    waiting.append(connection)
                    complaint = _complaint(said, came, place)
                    came[said["process"]] = said["who"]
        for connection in waiting:
            with contextlib.suppress(OSError):
                _write(connection, {"complaint": complaint})
    return complaint


def _complaint(said: dict[str, Any], came: dict[int, str], place: Place) -> str:
    process, processes, who = said["process"], said["processes"], said["who"]
    if processes != place.processes:
        return (
            f"process 0 ({came[0]}) was told of {place.processes} processes, and process {process} "
            f"({who}) of {processes}: give all of them the same number."
        )
    if process in came:
        return (
            f"there are two processes {process} of {processes}, {came[process]} and {who}: every "
            f"process has a number of its own, from 0 to {processes - 1}."
        )
    return ""


def _missing(came: dict[int, str], place: Place, address: str, timeout: float) -> str:
    missing = [str(i) for i in range(place.processes) if i not in came]
    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"process{'es' if len(missing) > 1 else ''} {shown} of {place.processes} did not come to "
        f"{address} within {timeout:g} s: were they started, did they fail, can they reach it?"
    )


def _answer_the_roll(address: str, place: Place, timeout: float) -> str:
    with _reach(address, place, timeout) as connection:
        with contextlib.suppress(OSError):
            _write(connection, {**place._asdict(), "who": _who()})
        answer = _read(connection, timeout + MARGIN_SECONDS)
    if answer.get("complaint") == "":
        _reach(address, place, timeout).close()
    return answer.get(
        "complaint",
        f"process {place.process} of {place.processes} asked at {address}, and what listens there "
        "does not wait for it: process 0 has begun without it (is there a second one of this "
        "number?) or has ended, or the port is another program's.",
    )


def _reach(address: str, place: Place, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _connect(address, max(PAUSE_SECONDS, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + PAUSE_SECONDS >= deadline:
                raise ConnectionError(
                    f"process {place.process} of {place.processes} could not reach process 0 at "
                    f"{address} within {timeout:g} s ({error}). Does it run there, and does a "
                    "firewall let its port through?"
                ) from error
        time.sleep(PAUSE_SECONDS)


def _listen(address: str, place: Place) -> socket.socket:
    host, port = parse_address(address)
    six = ":" in host if is_loopback(address) else socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host if is_loopback(address) else "", port),
            family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and not is_loopback(address),
            backlog=place.processes,
        )
    except OSError as error:
        raise ConnectionError(
            f"process 0 of {place.processes} cannot listen at {address} ({error.strerror}): is it "
            "another job's, or is there a second process 0? Give the coordinator another port."
        ) from error


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.create_connection(parse_address(address), timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()  # where nobody listens, TCP may connect a socket to itself
        raise ConnectionRefusedError("nobody listens there")
    return connection


def _who() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """A message; empty if what comes is none."""
    connection.settimeout(timeout)
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
        message = json.loads(stream.readline(4096))
        return message if isinstance(message, dict) else {}
    return {}
