"""The sockets at which process 0 listens: at the coordinator's address, and at no other."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time

from gossipjax.launch._process_info import parse_address

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's coordinator uses it, too
RESOLVE_SECONDS = 0.5  # between two attempts to resolve a name
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bind_address(address: str) -> str:
    """`HOST:PORT` at which process 0 listens: `address`, unless `BIND_VARIABLE` has another.

    Raises:
      ValueError: if that is malformed.
    """
    given = os.environ.get(BIND_VARIABLE)
    if not given:
        return address
    parse_address(given, BIND_VARIABLE)
    return given


def listen(address: str, num_processes: int, deadline: float) -> list[socket.socket]:
    """Listen at the IP addresses of the coordinator that this machine has, without blocking.

    A name that is not known is tried again until the `deadline`, by `time.monotonic()`: in
    Kubernetes it is known some seconds after the start.

    Raises:
      ConnectionError: if this machine has none of them, or the port is in use.
    """
    where = bind_address(address)
    start = f"process 0 of {num_processes} cannot listen at {where}"
    try:
        resolved = _resolve(where, deadline)
    except OSError as error:
        raise ConnectionError(
            f"{start}: the name is not known here ({error.strerror}). Give coordinator_address the "
            f"name or the address of this machine, or set {BIND_VARIABLE}."
        ) from error
    servers: list[socket.socket] = []
    for family, ip_address in resolved:
        try:
            servers.append(_create_server(family, ip_address))
        except OSError as error:
            if error.errno in NOT_HERE:
                continue
            for server in servers:
                server.close()
            raise ConnectionError(
                f"{start} ({error.strerror}): another job or a second process 0 may use it. Choose "
                "another port for coordinator_address."
            ) from error
    if not servers:
        port = parse_address(where)[1]
        raise ConnectionError(
            f"{start}: it is {', '.join(ip_address[0] for _, ip_address in resolved)} here, which "
            "is no address of this machine. Is this the host of process 0? Give "
            "coordinator_address a name or an address of this machine. If it is forwarded to this "
            f"machine, set {BIND_VARIABLE}=HOST:{port} with an address of this machine, or with "
            "0.0.0.0 for all of them."
        )
    return servers


def describe_listening(address: str, servers: list[socket.socket]) -> str:
    """A sentence for errors if other machines cannot reach `servers`, though `address` allows it.

    Debian, for example, gives the name of a machine the address 127.0.1.1 on this machine.
    """
    host, port = parse_address(address)
    listening = [server.getsockname()[0] for server in servers]
    if host == "localhost" or _is_loopback(host) or not all(map(_is_loopback, listening)):
        return ""
    return (
        f" Process 0 listens at {', '.join(listening)}, the address of {host} there, which other "
        "machines cannot reach: give coordinator_address the address of its machine in the "
        f"network, or set {BIND_VARIABLE}=0.0.0.0:{port}."
    )


def _resolve(address: str, deadline: float) -> list[tuple[socket.AddressFamily, tuple]]:
    """Families and addresses (as for `bind`) of `HOST:PORT`.

    Raises:
      OSError: if the name is not known at the deadline.
    """
    host, port = parse_address(address)
    while True:
        try:
            results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            if time.monotonic() + RESOLVE_SECONDS >= deadline:
                raise
            time.sleep(RESOLVE_SECONDS)
        else:
            return list(dict.fromkeys((family, ip_address) for family, *_, ip_address in results))


def _create_server(family: socket.AddressFamily, ip_address: tuple) -> socket.socket:
    is_dualstack = ip_address[0] == "::" and socket.has_dualstack_ipv6()
    server = socket.create_server(
        ip_address, family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=is_dualstack
    )
    server.setblocking(False)
    return server


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # of names
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False
