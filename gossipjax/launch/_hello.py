"""All processes meet at process 0's port, before JAX uses that port.

JAX aborts a process that cannot reach its coordinator, and does not say which process is missing.
So each process first says in a line of JSON who it is. When all have come, process 0 answers them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Iterator
from selectors import EVENT_READ, BaseSelector, DefaultSelector
from typing import Any, NamedTuple

from gossipjax.launch._process_info import ProcessInfo, find_job, parse_address
from gossipjax.launch.peers import Connections

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's coordinator uses it, too
NOTICE_SECONDS = 10.0  # after this wait, or half of it all, process 0 says who is missing
RETRY_SECONDS = 0.05  # between two attempts to reach process 0, or to resolve a name
WAIT_SECONDS = 1.0  # between two attempts to join it, while it is in an earlier attempt of the job
LINE_SECONDS = 2.0  # for whoever connects to say who it is
MAX_SHOWN = 8  # missing processes that a message names


class _Hello(NamedTuple):
    """What a process says about itself when it connects to process 0."""

    process_id: int
    num_processes: int
    host: str
    job: str  # and the number of its restart: processes of an earlier attempt are refused by it

    @property
    def name(self) -> str:
        return f"process {self.process_id} ({self.host})"


Others = dict[int, tuple[socket.socket, _Hello]]  # by process_id, at process 0


def meet(address: str, info: ProcessInfo, timeout: float) -> Connections:
    """Waits until all processes have connected to process 0 at `address`.

    Returns the connections, which stay open: process 0 has one to each other process, and these
    have one to process 0.

    Raises:
      ConnectionError: in all processes, if one is missing or was started twice.
    """
    job = f"{find_job()!r}, restart {os.environ.get('GOSSIPJAX_RESTART') or 0}"
    hello = _Hello(*info, f"{socket.gethostname()} pid {os.getpid()}", job)
    if info.process_id == 0:
        return _host(address, hello, timeout)
    return _join(address, hello, timeout)


def _join(address: str, hello: _Hello, timeout: float) -> Connections:
    """Connects to process 0, says who this process is, and waits until process 0 has met all."""
    deadline = time.monotonic() + timeout
    start = f"process {hello.process_id} of {hello.num_processes}"
    while True:
        connection = reach(address, start, max(0.0, deadline - time.monotonic()))
        # A little longer than process 0 itself waits, which then says who is missing.
        connection.settimeout(max(0.0, deadline - time.monotonic()) + 2 * LINE_SECONDS)
        # What went wrong, unless process 0 says something else.
        error = (
            f"{start} connected to {address}, but what listens there does not expect it: process 0 "
            "has started without it, in an attempt that has not ended yet (or was another process "
            "given this process_id?), or the port is another program's."
        )
        is_final = False
        with contextlib.suppress(OSError, ValueError, TypeError):
            _say(connection, *hello)
            name, error, is_final = _hear(connection)
            if error is None:
                connection.settimeout(None)
                return {0: (connection, name)}
        connection.close()
        if is_final or time.monotonic() + WAIT_SECONDS >= deadline:
            raise ConnectionError(error)
        time.sleep(WAIT_SECONDS)  # an earlier attempt ends by itself, so waiting costs no restart


def reach(address: str, who: str, timeout: float) -> socket.socket:
    """Connects to process 0 as soon as it listens; `who` names this process in an error."""
    deadline = time.monotonic() + timeout
    while True:
        seconds = max(RETRY_SECONDS, deadline - time.monotonic())
        try:
            connection = socket.create_connection(parse_address(address), seconds)
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # where nobody listens, TCP may connect a socket to itself
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise ConnectionError(
                    f"{who} could not reach process 0 at {address} within {timeout:.1f} s "
                    f"({error}): is it running, and does a firewall allow its port?"
                ) from error
        time.sleep(RETRY_SECONDS)


def _host(address: str, own: _Hello, timeout: float) -> Connections:
    """Waits, as process 0, for all others to connect; tells them that all have, or an error."""
    others: Others = {}
    error = None
    try:
        _wait_for_all(address, own, others, timeout)
    except ConnectionError as found:
        error = str(found)
    # The port is free again before anybody is answered: JAX may listen there at once.
    for connection, _ in others.values():
        _answer(connection, own, error, is_final=True)
        if error is not None:
            connection.close()
    if error is not None:
        raise ConnectionError(error)
    return {number: (other, hello.name) for number, (other, hello) in others.items()}


def _wait_for_all(address: str, own: _Hello, others: Others, timeout: float) -> None:
    """Adds all processes to `others`; raises `ConnectionError` if one is late or does not fit."""
    count = own.num_processes
    start = time.monotonic()
    problem = None
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(address, count, start + timeout))
        waiting = stack.enter_context(DefaultSelector())
        waiting.register(server, EVENT_READ)
        stack.callback(_close_silent, waiting, math.inf)
        # Prints who is missing after a while, and gives up after the timeout.
        for seconds in (min(NOTICE_SECONDS, timeout / 2), timeout):
            while time.monotonic() < start + seconds:
                for connection in _find_speakers(waiting):
                    _welcome(connection, own, others)
                if len(others) + 1 == count and not _forget_left(others):
                    return
            _forget_left(others)
            missing = [str(i) for i in range(1, count) if i not in others]
            shown = ", ".join(missing[:MAX_SHOWN] + ["..."] * (len(missing) > MAX_SHOWN))
            problem = (
                f"process{'es' if len(missing) > 1 else ''} {shown} of {count} did not "
                f"connect to {address} within {seconds:g} s. Were they started, did they "
                f"fail, can they reach {server.getsockname()[0]}, where process 0 listens? "
                "If not, give coordinator_address the address of its machine in the "
                f"network, or set {BIND_VARIABLE}=0.0.0.0:{parse_address(address)[1]}."
            )
            if seconds < timeout:
                print(f"gossipjax: {problem}", file=sys.stderr, flush=True)
    raise ConnectionError(problem)


def _forget_left(others: Others) -> bool:
    """Removes processes that have ended, as they may be started again; returns whether any has."""
    left = [number for number, (connection, _) in others.items() if _has_left(connection)]
    for number in left:
        others.pop(number)[0].close()
    return bool(left)


def _find_speakers(waiting: BaseSelector) -> Iterator[socket.socket]:
    """Accepts new connections, yields those that have said something, closes those long silent."""
    for key, _ in waiting.select(RETRY_SECONDS):
        connection: Any = key.fileobj
        if key.data is None:  # the server
            since = time.monotonic()
            waiting.register(connection.accept()[0], EVENT_READ, since)
        else:
            waiting.unregister(connection)
            yield connection
    _close_silent(waiting, time.monotonic() - LINE_SECONDS)


def _close_silent(waiting: BaseSelector, before: float) -> None:
    """Closes those connections in `waiting`, which have not spoken, that were made `before`."""
    for connection, since in [(key.fileobj, key.data) for key in waiting.get_map().values()]:
        # `since` is None for the server.
        if since is not None and since < before and isinstance(connection, socket.socket):
            waiting.unregister(connection)
            connection.close()


def _welcome(connection: socket.socket, own: _Hello, others: Others) -> None:
    """Adds a process that says hello; raises `ConnectionError` if the job cannot start with it."""
    connection.settimeout(LINE_SECONDS)
    hello = _hear_hello(connection)
    if hello is None:
        connection.close()
        return
    connection.settimeout(None)
    if hello.job != own.job:
        # A process of an earlier attempt may be left over. It must not end this attempt.
        error = (
            f"{hello.name} is of job {hello.job}, and not {own.job}, as process 0: give all "
            "processes the same GOSSIPJAX_JOB and GOSSIPJAX_RESTART."
        )
        _answer(connection, own, error, is_final=False)
        connection.close()
        return
    former, rival = others.get(hello.process_id, (None, own))
    others[hello.process_id] = connection, hello
    if hello.num_processes != own.num_processes:
        raise ConnectionError(
            "num_processes must be the same for all processes, got "
            f"{own.num_processes} in {own.name} and {hello.num_processes} in {hello.name}"
        )
    if former is not None and _has_left(former):  # and was started again
        former.close()
    elif former is not None:
        error = (
            f"there are two processes {hello.process_id} of {own.num_processes}, {rival.host} "
            f"and {hello.host}: give each another process_id"
        )
        _answer(former, own, error, is_final=True)
        former.close()
        raise ConnectionError(error)


def _answer(connection: socket.socket, own: _Hello, error: str | None, *, is_final: bool) -> None:
    """Tells a process that all have come, or an error; it tries again unless that is final."""
    _say(connection, own.name, error, is_final)


def _say(connection: socket.socket, *values: Any) -> None:
    """Sends values as a line of JSON."""
    with contextlib.suppress(OSError):  # the other end notices that nothing came
        connection.sendall(json.dumps(values).encode() + b"\n")


def _hear(connection: socket.socket) -> list[Any]:
    """Waits for a line of JSON, and returns its values."""
    with connection.makefile("rb", buffering=0) as lines:  # a buffer would swallow what follows
        return json.loads(lines.readline(1 << 14))


def _hear_hello(connection: socket.socket) -> _Hello | None:
    """Returns the hello of a process; None for anything else, as anybody can connect."""
    with contextlib.suppress(OSError, ValueError):
        match _hear(connection):
            case [int(number), int(count), str(host), str(job)]:
                if 0 < number < count and f"{host}{job}".isprintable():
                    return _Hello(number, count, host, job)
    return None


def _has_left(connection: socket.socket) -> bool:
    """Says whether a process has ended: after its hello, only its end makes something to read."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def bind_address(address: str) -> str:
    """Returns where process 0 listens: `address`, unless `BIND_VARIABLE` names another."""
    return os.environ.get(BIND_VARIABLE) or address


def listen(address: str, num_processes: int, deadline: float) -> socket.socket:
    """Listens, as process 0, at the coordinator's address.

    Tries again until `deadline` while this machine does not know its own name yet: in Kubernetes
    that takes some seconds.
    """
    where = bind_address(address)
    host, port = parse_address(where)
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, *_, place = min(found, key=lambda each: each[0])  # IPv4 if it has both
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # of "::"
            return socket.create_server(place, family=family, backlog=128, dualstack_ipv6=is_dual)
        except OSError as error:
            is_known = not isinstance(error, socket.gaierror)
            if is_known or time.monotonic() + RETRY_SECONDS >= deadline:
                raise ConnectionError(
                    f"process 0 of {num_processes} cannot listen at {where}, got {error.strerror}. "
                    "Is this the host of process 0, and does no other job or second process 0 use "
                    "the port? If the address is forwarded to this machine, set "
                    f"{BIND_VARIABLE}=HOST:{port} with an address of this machine, or with 0.0.0.0 "
                    "for all of them."
                ) from error
        time.sleep(RETRY_SECONDS)
