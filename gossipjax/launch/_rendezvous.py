"""Rendezvous of all processes at process 0's port, before JAX uses that port.

If the coordinator is unreachable, or a process is missing or was started twice, JAX aborts the
process: the program cannot catch it, and the message does not name the process. So the processes
first meet at the coordinator's address themselves. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any

from gossipjax.launch._process_info import ProcessInfo, is_loopback, parse_address

RETRY_SECONDS = 0.05  # between two attempts to reach process 0
READ_SECONDS = 10.0  # for a process that has connected to introduce itself
MARGIN_SECONDS = 5.0  # for process 0's answer to arrive after its timeout
MAX_MESSAGE_BYTES = 4096
MAX_MISSING_SHOWN = 8
HELLO_KEYS = {"process_id", "num_processes", "host"}


def rendezvous(address: str, info: ProcessInfo, timeout: float) -> None:
    """Wait until all processes have connected to process 0 at `address`.

    Processes other than 0 return when something listens at `address` again, which is JAX's
    coordinator: JAX's client would sleep for a second after a failed attempt.

    Args:
      address: `HOST:PORT` of process 0.
      info: this process.
      timeout: seconds for which process 0 waits for the others, and the others for process 0.

    Raises:
      ConnectionError: if process 0 cannot listen or cannot be reached, if processes are missing or
        were started twice, or if they disagree on `num_processes`. All processes that have
        connected raise the same error.
    """
    error = (
        _serve(address, info, timeout) if info.process_id == 0 else _join(address, info, timeout)
    )
    if error is not None:
        raise ConnectionError(error)


def _serve(address: str, info: ProcessInfo, timeout: float) -> str | None:
    """Run process 0's part: collect all others, then answer each. Return the error, or None."""
    deadline = time.monotonic() + timeout
    hosts = {0: _describe_host()}
    error = None
    with contextlib.ExitStack() as stack:
        connections = []
        with _listen(address, info) as server:
            while error is None and len(hosts) < info.num_processes:
                server.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    connection = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    error = _describe_missing(hosts, address, info, timeout)
                    break
                hello = _read(connection, READ_SECONDS)
                if hello.keys() >= HELLO_KEYS:
                    connections.append(connection)
                    error = _check_hello(hello, hosts, info)
                    hosts[hello["process_id"]] = hello["host"]
        for connection in connections:
            with contextlib.suppress(OSError):
                _write(connection, {"error": error})
    return error


def _check_hello(hello: dict[str, Any], hosts: dict[int, str], info: ProcessInfo) -> str | None:
    """Compare a process with process 0 and the `hosts` that have connected. Return the error."""
    process_id, num_processes, host = (
        hello[key] for key in ("process_id", "num_processes", "host")
    )
    if num_processes != info.num_processes:
        return (
            f"num_processes must be the same for all processes, got {info.num_processes} in "
            f"process 0 ({hosts[0]}) and {num_processes} in process {process_id} ({host})."
        )
    if process_id in hosts:
        return (
            f"there are two processes {process_id} of {num_processes}, {hosts[process_id]} and "
            f"{host}: give each process another process_id, from 0 to {num_processes - 1}."
        )
    return None


def _describe_missing(
    hosts: dict[int, str], address: str, info: ProcessInfo, timeout: float
) -> str:
    missing = [str(i) for i in range(info.num_processes) if i not in hosts]
    ellipsis = ["..."] if len(missing) > MAX_MISSING_SHOWN else []
    shown = ", ".join(missing[:MAX_MISSING_SHOWN] + ellipsis)
    return (
        f"process{'es' if len(missing) > 1 else ''} {shown} of {info.num_processes} did not "
        f"connect to {address} within {timeout:g} s. Were they started, did they fail, can they "
        "reach this address?"
    )


def _join(address: str, info: ProcessInfo, timeout: float) -> str | None:
    """Run the part of the other processes: introduce this one. Return process 0's error."""
    with _reach(address, info, timeout) as connection:
        with contextlib.suppress(OSError):
            _write(connection, {**info._asdict(), "host": _describe_host()})
        answer = _read(connection, timeout + MARGIN_SECONDS)
    if "error" not in answer:
        return (
            f"process {info.process_id} of {info.num_processes} connected to {address}, but what "
            "listens there does not expect it: process 0 has started without it (was another "
            "process given this process_id?) or has exited, or the port is another program's."
        )
    if answer["error"] is None:
        _reach(address, info, timeout).close()
    return answer["error"]


def _reach(address: str, info: ProcessInfo, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _connect(address, max(RETRY_SECONDS, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise ConnectionError(
                    f"process {info.process_id} of {info.num_processes} could not reach process 0 "
                    f"at {address} within {timeout:g} s ({error}). Is process 0 running there, and "
                    "does a firewall allow its port?"
                ) from error
        time.sleep(RETRY_SECONDS)


def _listen(address: str, info: ProcessInfo) -> socket.socket:
    host, port = parse_address(address)
    local_only = is_loopback(address)
    is_ipv6 = ":" in host if local_only else socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host if local_only else "", port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            dualstack_ipv6=is_ipv6 and not local_only,
            backlog=info.num_processes,
        )
    except OSError as error:
        raise ConnectionError(
            f"process 0 of {info.num_processes} cannot listen at {address} ({error.strerror}): "
            "another job or a second process 0 may use it. Choose another port for "
            "coordinator_address."
        ) from error


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.create_connection(parse_address(address), timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()  # where nobody listens, TCP may connect a socket to itself
        raise ConnectionRefusedError("nobody listens there")
    return connection


def _describe_host() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """The next message; empty if none arrives within `timeout` seconds, or if it is malformed."""
    connection.settimeout(timeout)
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
        message = json.loads(stream.readline(MAX_MESSAGE_BYTES))
        return message if isinstance(message, dict) else {}
    return {}
