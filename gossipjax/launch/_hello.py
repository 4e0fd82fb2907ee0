"""All processes meet at process 0's port, before JAX uses that port.

JAX aborts a process that cannot reach its coordinator, and does not say which process is missing.
So each process first says in a line of JSON who it is. When all have come, process 0 answers them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any, NamedTuple

from gossipjax.launch._process_info import (
    MAX_PROCESSES,
    ProcessInfo,
    describe_gloo,
    find_job,
    parse_address,
)
from gossipjax.launch.peers import Connections

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's coordinator uses it, too
NOTICE_SECONDS = 10.0  # after this wait, and after half of all, process 0 says who is missing
RETRY_SECONDS = 0.05  # between two attempts to reach process 0, or to resolve a name
WAIT_SECONDS = 1.0  # between two attempts to join it, while it is in an earlier attempt of the job
LINE_SECONDS = 1.0  # for whoever connects to say who it is
MAX_SHOWN = 8  # missing processes that a message names
MAX_BYTES = 1 << 14  # of a line


class _Hello(NamedTuple):
    """What a process says of itself."""

    process_id: int
    num_processes: int
    host: str
    job: str  # and the attempt, so that no process of an earlier attempt takes part
    problem: str | None = None  # why other machines would not reach its Gloo

    @property
    def name(self) -> str:
        return f"process {self.process_id} ({self.host})"

    def is_valid(self) -> bool:
        """Whether it is of another process of a job; anybody can connect and say anything."""
        is_text = all(isinstance(text, str | None) for text in self[2:])
        is_number = all(type(number) is int for number in self[:2])  # a bool is an int, too
        is_other = is_number and 0 < self.process_id < self.num_processes <= MAX_PROCESSES
        return is_text and is_other and f"{self.host}{self.job}{self.problem}".isprintable()


def meet(address: str, info: ProcessInfo, timeout: float, *, by_gloo: bool = False) -> Connections:
    """Waits until all processes have connected to process 0 at `address`; connections stay open.

    Raises:
      ConnectionError: in all processes, if one is missing or was started twice, or if, `by_gloo`,
        other machines would not reach it.
    """
    job = f"{find_job()!r}, restart {os.environ.get('GOSSIPJAX_RESTART') or 0}"
    number, count = info
    hello = _Hello(number, count, f"{socket.gethostname()} pid {os.getpid()}", job)
    if number:
        return _join(address, hello, timeout, by_gloo)
    return _Host(address, hello, timeout, by_gloo).run()


def _join(address: str, hello: _Hello, timeout: float, by_gloo: bool) -> Connections:
    """Says who this process is to process 0, and waits for its answer."""
    deadline = time.monotonic() + timeout
    start = f"process {hello.process_id} of {hello.num_processes}"
    while True:
        connection = reach(address, start, max(0.0, deadline - time.monotonic()))
        connection.settimeout(max(0.0, deadline - time.monotonic()) + 2 * LINE_SECONDS)
        problem = describe_gloo(connection, hello.process_id) if by_gloo else None
        error = (
            f"{start} connected to {address}, but what listens there does not expect it: process 0 "
            "has started without it, in an attempt that has not ended yet (or was another process "
            "given this process_id?), or the port is another program's."
        )
        is_final = False
        with contextlib.suppress(OSError, ValueError, TypeError):
            _say(connection, *hello._replace(problem=problem))
            name, error, is_final = _hear(connection)
            if error is None:
                connection.settimeout(None)
                return {0: (connection, name)}
        connection.close()
        if is_final or time.monotonic() + WAIT_SECONDS >= deadline:
            raise ConnectionError(error)
        time.sleep(WAIT_SECONDS)  # an earlier attempt ends by itself, so waiting costs no restart


def reach(address: str, start: str, timeout: float) -> socket.socket:
    """Connects to process 0 as soon as it listens."""
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
                    f"{start} could not reach process 0 at {address} within {timeout:.1f} s "
                    f"({error}): is it running, and does a firewall allow its port?"
                ) from error
        time.sleep(RETRY_SECONDS)


class _Host:
    """Process 0, which waits for all others and answers them."""

    def __init__(self, address: str, own: _Hello, timeout: float, by_gloo: bool):
        self._address = address
        self._own = own
        self._timeout = timeout
        self._by_gloo = by_gloo
        self._others: dict[int, tuple[socket.socket, _Hello]] = {}  # by process_id

    def run(self) -> Connections:
        error = None
        try:
            self._collect()
        except ConnectionError as found:
            error = str(found)
        # The port is free again before anybody is answered: JAX may listen there at once.
        for connection, _ in self._others.values():
            self._answer(connection, error)
        if error is not None:
            raise ConnectionError(error)
        return {number: (other, hello.name) for number, (other, hello) in self._others.items()}

    def _collect(self) -> None:
        """Welcomes processes until all have come. Says twice who is missing, and then raises."""
        start, end = time.monotonic(), self._timeout
        with listen(self._address, self._own.num_processes, start + end) as server:
            for seconds in (min(NOTICE_SECONDS, end / 4), end / 2, end):
                while self._must_wait() and (left := start + seconds - time.monotonic()) > 0:
                    server.settimeout(left)
                    with contextlib.suppress(TimeoutError, ConnectionAbortedError):
                        self._welcome(server.accept()[0])
                if self._must_wait() and seconds == end:
                    raise ConnectionError(self._describe_missing(server, end))
                if self._must_wait():
                    missing = self._describe_missing(server, seconds)
                    print(f"gossipjax: {missing}", file=sys.stderr, flush=True)
        hellos = [self._own, *(hello for _, hello in self._others.values())]
        problems = [hello.problem for hello in hellos if hello.problem is not None]
        if problems:
            raise ConnectionError(" ".join(problems[:MAX_SHOWN]))

    def _must_wait(self) -> bool:
        return len(self._others) + 1 < self._own.num_processes

    def _welcome(self, connection: socket.socket) -> None:
        """Raises `ConnectionError` if this process shows that the job cannot be."""
        connection.settimeout(LINE_SECONDS)
        own = self._own
        hello = None
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            hello = _Hello(*_hear(connection))
        if hello is None or not hello.is_valid():
            connection.close()
            return
        if hello.job != own.job:
            # A process of an earlier attempt may be left over. It must not end this attempt.
            self._answer(
                connection,
                f"{hello.name} is of job {hello.job}, and not {own.job}, as process 0: give all "
                "processes the same GOSSIPJAX_JOB and GOSSIPJAX_RESTART.",
                is_final=False,
            )
            return
        former, named = self._others.get(hello.process_id, (None, own))
        self._others[hello.process_id] = connection, hello
        if hello.num_processes != own.num_processes:
            raise ConnectionError(
                "num_processes must be the same for all processes, got "
                f"{own.num_processes} in {own.name} and {hello.num_processes} in {hello.name}"
            )
        if former is not None and _has_left(former):  # and was started again
            former.close()
        elif former is not None:
            error = (
                f"there are two processes {hello.process_id} of {own.num_processes}, {named.host} "
                f"and {hello.host}: give each another process_id"
            )
            self._answer(former, error)
            raise ConnectionError(error)
        if self._by_gloo and own.problem is None:
            self._own = own._replace(problem=describe_gloo(connection, 0))

    def _answer(
        self, connection: socket.socket, error: str | None, *, is_final: bool = True
    ) -> None:
        with contextlib.suppress(OSError):
            _say(connection, self._own.name, error, is_final)
            connection.settimeout(None)
        if error is not None:
            connection.close()

    def _describe_missing(self, server: socket.socket, seconds: float) -> str:
        count = self._own.num_processes
        missing = [str(number) for number in range(1, count) if number not in self._others]
        shown = ", ".join(missing[:MAX_SHOWN] + ["..."] * (len(missing) > MAX_SHOWN))
        return (
            f"process{'es' if len(missing) > 1 else ''} {shown} of {count} did not connect to "
            f"{self._address} within {seconds:g} s. Were they started, did they fail, can they "
            f"reach {server.getsockname()[0]}, where process 0 listens? If not, give "
            "coordinator_address the address of its machine in the network, or set "
            f"{BIND_VARIABLE}=0.0.0.0:{parse_address(self._address)[1]}."
        )


def _say(connection: socket.socket, *values: Any) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _hear(connection: socket.socket) -> list[Any]:
    with connection.makefile("rb", buffering=0) as lines:  # not more than this line
        return json.loads(lines.readline(MAX_BYTES))


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def bind_address(address: str) -> str:
    """Returns where process 0 listens: `address`, unless `BIND_VARIABLE` names another."""
    given = os.environ.get(BIND_VARIABLE)
    if given:
        parse_address(given, BIND_VARIABLE)
    return given or address


def listen(address: str, num_processes: int, deadline: float) -> socket.socket:
    """Listens at the coordinator's address, once this machine knows its name.

    In Kubernetes that takes some seconds.
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
