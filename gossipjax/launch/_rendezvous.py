"""All processes meet at process 0's port, before JAX uses that port.

If the coordinator is unreachable, or a process is missing or was started twice, JAX aborts the
process: the program cannot catch this, and the message does not name the process. So the processes
first meet at the coordinator's address. On each connection both ends begin with a nonce, in a line.
Each process then sends its number. When all processes have come, process 0 answers them. Lines
after the nonce are `JSON`, or `HMAC JSON` if the job has a secret.

Anybody who reaches the port can connect. So everything that arrives is checked before it is used,
connections are read concurrently, and there is one deadline for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import json
import os
import re
import reprlib
import secrets
import selectors
import socket
import sys
import time
from typing import Any

from gossipjax.launch._process_info import MAX_PROCESSES, ProcessInfo, find_job, parse_address
from gossipjax.launch.peers import Connections
from gossipjax.launch.secret import make_key

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's coordinator uses it, too
RESOLVE_SECONDS = 0.5  # between two attempts to resolve a name
RETRY_SECONDS = 0.05  # between two attempts to reach process 0
WAIT_SECONDS = 1.0  # between two attempts to join it, while it is in an earlier attempt of the job
MARGIN_SECONDS = 5.0  # time for process 0's answer to arrive after the timeout
MAX_SHOWN = 8  # missing processes, or dropped connections, that an error names
MAX_HELLO_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 16
MAX_TEXT = 300
NONCE = re.compile(rb"[0-9a-f]{32}")
NOT_UNDERSTOOD = "a message that this process does not understand"
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def rendezvous(
    address: str, info: ProcessInfo, timeout: float, secret: str | None = None
) -> Connections:
    """Wait until all processes have connected to process 0 at `address`; connections stay open."""
    key = None if secret is None else make_key(secret, "rendezvous")
    if info.process_id == 0:
        return Coordinator(address, info, timeout, key).run()
    return {0: _join(address, info, timeout, key)}


class MessageError(Exception):
    """A message is not of this job. The text of the error describes the message."""


def encode(message: dict[str, Any], key: bytes | None, nonces: bytes) -> bytes:
    text = json.dumps(message).encode()
    return text + b"\n" if key is None else b"%s %s\n" % (_sign(text, key, nonces), text)


def _decode(line: bytes, key: bytes | None, nonces: bytes) -> dict[str, Any]:
    text = line
    if key is not None:
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, _sign(text, key, nonces)):
            raise MessageError("a message that is not signed with this GOSSIPJAX_SECRET")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of opening brackets
        message = None
    if not isinstance(message, dict):
        raise MessageError(NOT_UNDERSTOOD)
    return message


def _sign(text: bytes, key: bytes, nonces: bytes) -> bytes:
    """Signs a text for one connection; on another connection the signature is not valid."""
    return hmac.new(key, nonces + text, hashlib.sha256).hexdigest().encode()


def _describe_process() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


def _describe_job() -> str:
    """Names the job and the attempt, so that no process of an earlier attempt takes part."""
    return f"{find_job()!r}, restart {os.environ.get('GOSSIPJAX_RESTART') or 0}"[:MAX_TEXT]


# What all processes but process 0 do.


def _join(
    address: str, info: ProcessInfo, timeout: float, key: bytes | None
) -> tuple[socket.socket, str]:
    """Introduce this process. Return the connection to process 0, and its answer."""
    deadline = time.monotonic() + timeout
    is_told = False
    while True:
        connection, answer = _introduce(address, info, timeout, deadline, key)
        match answer:
            case {"error": None, "host": str(host)}:
                return connection, f"process 0 ({host})"
            case {"error": str(error)}:
                pass
            case _:
                error = (
                    f"process {info.process_id} of {info.num_processes} connected to {address}, "
                    "but what listens there does not expect it: process 0 has started without it, "
                    "in an attempt that has not ended yet (or was another process given this "
                    "process_id?), its GOSSIPJAX_SECRET differs, or the port is another program's."
                )
        connection.close()
        if not answer.get("retry", True) or time.monotonic() + WAIT_SECONDS >= deadline:
            raise ConnectionError(error)
        # The previous attempt ends by itself, so waiting costs no restart.
        if not is_told:
            print(f"gossipjax: {error} It tries again for {timeout:g} s.", file=sys.stderr)
            is_told = True
        time.sleep(WAIT_SECONDS)


def _introduce(
    address: str, info: ProcessInfo, timeout: float, deadline: float, key: bytes | None
) -> tuple[socket.socket, dict[str, Any]]:
    """Connect once. Return the connection and the answer; nothing if another program answers."""
    hello = {**info._asdict(), "host": _describe_process(), "job": _describe_job()}
    mine = secrets.token_hex(16).encode()
    connection = reach(address, info, timeout, deadline)
    answer: dict[str, Any] = {}
    with contextlib.suppress(OSError, MessageError):
        connection.settimeout(max(0, deadline - time.monotonic()) + MARGIN_SECONDS)
        # Without waiting for process 0's: JAX's coordinator hangs up when it reads this.
        connection.sendall(mine + b"\n")
        with connection.makefile("rb", buffering=0) as answers:
            theirs = answers.readline(MAX_HELLO_BYTES).rstrip(b"\n")
            if NONCE.fullmatch(theirs):
                nonces = theirs + mine
                connection.sendall(encode(hello, key, nonces))
                line = answers.readline(MAX_ANSWER_BYTES)
                answer = _decode(line.rstrip(b"\n"), key, nonces)
    return connection, answer


def reach(address: str, info: ProcessInfo, timeout: float, deadline: float) -> socket.socket:
    """Connect to process 0 as soon as it listens."""
    while True:
        try:
            return _connect(address, max(RETRY_SECONDS, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise ConnectionError(
                    f"process {info.process_id} of {info.num_processes} could not reach process 0 "
                    f"at {address} within {timeout:g} s ({error}): is it running, and does a "
                    "firewall allow its port?"
                ) from error
        time.sleep(RETRY_SECONDS)


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.create_connection(parse_address(address), timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()  # where nobody listens, TCP may connect a socket to itself
        raise ConnectionRefusedError("nobody listens there")
    return connection


# What process 0 does.


@dataclasses.dataclass(eq=False)
class _Connection:
    """A connection to process 0."""

    socket: socket.socket
    peer: str  # IP address of the other end
    nonce: bytes  # the nonce that process 0 sent
    nonces: bytes = b""  # of both ends
    received: bytes = b""  # bytes so far, until the process has said who it is
    process_id: int | None = None  # None before it is known


class Coordinator:
    """Collects the processes of a job at process 0."""

    def __init__(self, address: str, info: ProcessInfo, timeout: float, key: bytes | None):
        self._address = address
        self._num_processes = info.num_processes
        self._timeout = timeout
        self._key = key
        self._job = _describe_job()
        self._hosts = {0: _describe_process()}  # by process_id
        self._connections: list[_Connection] = []
        self._dropped: dict[str, None] = {}  # why, in the order of time
        self._error: str | None = None

    def run(self) -> Connections:
        """Wait for all processes, and answer them. Return their connections."""
        deadline = time.monotonic() + self._timeout
        try:
            with contextlib.ExitStack() as stack:
                servers = listen(self._address, self._num_processes, deadline)
                self._selector = stack.enter_context(selectors.DefaultSelector())
                for server in servers:
                    stack.enter_context(server)
                    self._selector.register(server, selectors.EVENT_READ, server)
                self._collect(deadline, [server.getsockname()[0] for server in servers])
            # The port is free again before anybody is answered: JAX may listen there at once.
            for connection in self._connections:
                self._answer(connection, self._error, retry=False)
        finally:
            for connection in self._connections:
                if self._error is not None or connection.process_id is None:
                    connection.socket.close()
        if self._error is not None:
            raise ConnectionError(self._error)
        return {
            number: (connection.socket, f"process {number} ({self._hosts[number]})")
            for connection in self._connections
            if (number := connection.process_id) is not None
        }

    def _collect(self, deadline: float, listening: list[str]) -> None:
        """Handle connections until all processes have connected, or there is an error."""
        while self._error is None and len(self._hosts) < self._num_processes:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                self._error = self._describe_missing(listening)
                return
            for key, _ in self._selector.select(seconds):
                if isinstance(key.data, _Connection):
                    self._receive(key.data)
                else:
                    self._accept(key.data)

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the connection is gone already
            accepted, (peer, *_) = server.accept()
            accepted.setblocking(False)
            connection = _Connection(accepted, peer, secrets.token_hex(16).encode())
            accepted.send(connection.nonce + b"\n")
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._connections.append(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_HELLO_BYTES)
        except BlockingIOError:  # the selector may be wrong
            return
        except OSError:
            data = b""
        if connection.process_id is not None:
            if not data:  # the process has left; it may be started again
                host = self._hosts.pop(connection.process_id)
                name = f"process {connection.process_id} ({host})"
                self._drop(connection, f"{name} connected and left")
            return
        connection.received += data
        nonce, *lines = connection.received.split(b"\n", 2)
        if lines and not NONCE.fullmatch(nonce):
            self._drop(connection, f"{connection.peer} sent {NOT_UNDERSTOOD}")
        elif len(lines) == 2:
            connection.nonces = connection.nonce + nonce
            self._introduce(connection, lines[0])
        elif not data or len(connection.received) > MAX_HELLO_BYTES:
            self._drop(connection, f"{connection.peer} sent no whole message")

    def _introduce(self, connection: _Connection, line: bytes) -> None:
        """Handle the message that arrived on a connection."""
        try:
            message = _decode(line, self._key, connection.nonces)
            names = ("process_id", "num_processes", "host", "job")
            process_id, num_processes, host, job = map(message.get, names)
            if not (
                type(process_id) is int  # a bool is an int, too, but no process id
                and type(num_processes) is int
                and 0 < process_id < num_processes <= MAX_PROCESSES
                and isinstance(host, str)
                and isinstance(job, str)
                and max(len(host), len(job)) <= MAX_TEXT
                and (host + job).isprintable()
            ):
                raise MessageError(f"a message with {reprlib.repr(message)}")
        except MessageError as error:
            self._drop(connection, f"{connection.peer} sent {error}")
            return
        if job != self._job:
            # A process of an earlier attempt may be left over. It must not end this attempt.
            other = f"process {process_id} ({host}) is of job {job}, not {self._job}"
            error = f"{other}: give all processes the same GOSSIPJAX_JOB."
            self._answer(connection, error, retry=True)
            self._drop(connection, other)
            return
        error = None
        if num_processes != self._num_processes:
            error = (
                f"num_processes must be the same for all processes, got {self._num_processes} in "
                f"process 0 ({self._hosts[0]}) and {num_processes} in process {process_id} ({host})"
            )
        elif process_id in self._hosts:
            error = (
                f"there are two processes {process_id} of {num_processes}, "
                f"{self._hosts[process_id]} and {host}: give each process another process_id"
            )
        else:
            connection.process_id = process_id
            self._hosts[process_id] = host
        self._error = self._error or error

    def _answer(self, connection: _Connection, error: str | None, *, retry: bool) -> None:
        if connection.nonces:  # else the process has not said who it is
            with contextlib.suppress(OSError):
                answer = {"error": error, "retry": retry, "host": self._hosts[0]}
                connection.socket.send(encode(answer, self._key, connection.nonces))

    def _drop(self, connection: _Connection, reason: str) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)
        if len(self._dropped) < MAX_SHOWN:  # strangers cannot make the error grow
            self._dropped[reason] = None

    def _describe_missing(self, listening: list[str]) -> str:
        missing = [str(i) for i in range(self._num_processes) if i not in self._hosts]
        shown = ", ".join(missing[:MAX_SHOWN] + ["..."] * (len(missing) > MAX_SHOWN))
        dropped = f" Dropped: {'; '.join(self._dropped)}." if self._dropped else ""
        return (
            f"process{'es' if len(missing) > 1 else ''} {shown} of {self._num_processes} did not "
            f"connect to {self._address} within {self._timeout:g} s. Were they started, did they "
            f"fail, can they reach {', '.join(listening)}, where process 0 listens? If not, give "
            "coordinator_address the address of its machine in the network, or set "
            f"{BIND_VARIABLE}=0.0.0.0:{parse_address(self._address)[1]}.{dropped}"
        )


# The sockets of process 0: at the coordinator's address, and at no other.


def bind_address(address: str) -> str:
    """Returns where process 0 listens: `address`, unless `BIND_VARIABLE` names another."""
    given = os.environ.get(BIND_VARIABLE)
    if not given:
        return address
    parse_address(given, BIND_VARIABLE)
    return given


def listen(address: str, num_processes: int, deadline: float) -> list[socket.socket]:
    """Listen, without blocking, at those addresses of the coordinator that this machine has."""
    where = bind_address(address)
    start = f"process 0 of {num_processes} cannot listen at {where}"
    resolved = _resolve(where, deadline, start)
    servers: list[socket.socket] = []
    for family, place in resolved:
        dual = place[0] == "::" and socket.has_dualstack_ipv6()
        try:
            server = socket.create_server(place, family=family, backlog=128, dualstack_ipv6=dual)
        except OSError as error:
            if error.errno in NOT_HERE:
                continue
            for server in servers:
                server.close()
            raise ConnectionError(
                f"{start} ({error.strerror}): another job or a second process 0 may use this port."
            ) from error
        server.setblocking(False)
        servers.append(server)
    if not servers:
        port = parse_address(where)[1]
        raise ConnectionError(
            f"{start}: it is {', '.join(place[0] for _, place in resolved)} here, which is no "
            "address of this machine. Is this the host of process 0? If the address is forwarded "
            f"to it, set {BIND_VARIABLE}=HOST:{port} with an address of this machine, or with "
            "0.0.0.0 for all of them."
        )
    return servers


def _resolve(address: str, deadline: float, start: str) -> list[tuple[Any, Any]]:
    """Returns families and addresses (as for `bind`) of `HOST:PORT`.

    In Kubernetes a name resolves only some seconds after the start, so this tries until the
    deadline.
    """
    while True:
        try:
            results = socket.getaddrinfo(*parse_address(address), type=socket.SOCK_STREAM)
            return list(dict.fromkeys((family, place) for family, *_, place in results))
        except socket.gaierror as error:
            if time.monotonic() + RESOLVE_SECONDS >= deadline:
                raise ConnectionError(
                    f"{start}: the name is not known here ({error.strerror}). Give "
                    f"coordinator_address an address of this machine, or set {BIND_VARIABLE}."
                ) from error
            time.sleep(RESOLVE_SECONDS)
