"""All processes meet at process 0's port, before JAX uses that port.

If the coordinator is unreachable, or a process is missing or was started twice, JAX aborts the
process: the program cannot catch it, and the message does not name the process. So the processes
first meet at the coordinator's address themselves.

Anybody who reaches the port can connect. So everything that arrives is checked before it is used,
connections are read concurrently, and there is a bounded number of them and one deadline for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import reprlib
import selectors
import socket
import time
from collections import Counter
from typing import Any, NamedTuple

from gossipjax.launch._process_info import MAX_PROCESSES, ProcessInfo, parse_address

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's coordinator uses it, too
RESOLVE_SECONDS = 0.5  # between two attempts to resolve a name
RETRY_SECONDS = 0.05  # between two attempts to reach process 0
MARGIN_SECONDS = 5.0  # for process 0's answer to arrive after its timeout
MAX_STRANGERS = 64  # silent connections, beside one of each process; then the oldest is dropped
MAX_SHOWN = 8  # missing processes, and events, in an error
MAX_HELLO_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 16
MAX_HOST_LENGTH = 300
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def rendezvous(address: str, info: ProcessInfo, timeout: float, secret: str | None = None) -> None:
    """Wait until all processes have connected to process 0 at `address`.

    Processes other than 0 return when something listens at `address` again, which is JAX's
    coordinator: JAX's client would sleep for a second after a failed attempt.
    """
    if info.process_id == 0:
        error = Coordinator(address, info, timeout, secret).run()
    else:
        error = _join(address, info, timeout, secret)
    if error is not None:
        raise ConnectionError(error)


# The messages: lines of `JSON`, or of `HMAC JSON` if the job has a secret.


class MessageError(Exception):
    """A message is not one of the job; the text describes it."""


class Hello(NamedTuple):
    """Introduction of a process to process 0. `host` describes the process for errors."""

    info: ProcessInfo
    host: str


def encode_hello(hello: Hello, secret: str | None) -> bytes:
    return _encode({**hello.info._asdict(), "host": hello.host}, secret)


def _decode_hello(line: bytes, secret: str | None) -> Hello:
    """Check and return the introduction of a process other than 0, or raise `MessageError`."""
    message = _decode(line, secret)
    process_id, num_processes, host = map(message.get, ("process_id", "num_processes", "host"))
    if not (
        type(process_id) is int  # not True
        and type(num_processes) is int
        and 0 < process_id < num_processes <= MAX_PROCESSES
    ):
        raise MessageError(
            f"a message from process {reprlib.repr(process_id)} of {reprlib.repr(num_processes)}"
        )
    if not isinstance(host, str) or len(host) > MAX_HOST_LENGTH or not host.isprintable():
        raise MessageError(f"a message with the host {reprlib.repr(host)}")
    return Hello(ProcessInfo(process_id, num_processes), host)


def _encode(message: dict[str, Any], secret: str | None) -> bytes:
    text = json.dumps(message).encode()
    return text + b"\n" if secret is None else b"%s %s\n" % (_sign(text, secret), text)


def _decode(line: bytes, secret: str | None) -> dict[str, Any]:
    text = line
    if secret is not None:
        signature, _, text = line.partition(b" ")
        if not hmac.compare_digest(signature, _sign(text, secret)):
            raise MessageError("a message that is not signed with this GOSSIPJAX_SECRET")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of opening brackets
        message = None
    if not isinstance(message, dict):
        raise MessageError("a message that this process does not understand")
    return message


def _sign(text: bytes, secret: str) -> bytes:
    key = secret.encode(errors="surrogateescape")
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()


# The part of the processes other than 0.


def _join(address: str, info: ProcessInfo, timeout: float, secret: str | None) -> str | None:
    """Introduce this process. Return process 0's error, or None if all have connected."""
    with _reach(address, info, timeout) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(encode_hello(Hello(info, _describe_process()), secret))
        line = _receive_line(connection, timeout + MARGIN_SECONDS)
    error: Any = False
    with contextlib.suppress(MessageError):
        error = _decode(line, secret).get("error", False)
    if error is None:
        _reach(address, info, timeout).close()
        return None
    if isinstance(error, str):
        return error
    return (
        f"process {info.process_id} of {info.num_processes} connected to {address}, but what "
        "listens there does not expect it: process 0 has started without it (was another process "
        "given this process_id?) or has exited, its GOSSIPJAX_SECRET differs, or the port is "
        "another program's."
    )


def _reach(address: str, info: ProcessInfo, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
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


def _receive_line(connection: socket.socket, timeout: float) -> bytes:
    """Return the next line, or what has arrived of it after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    received = b""
    with contextlib.suppress(OSError):
        while b"\n" not in received and len(received) < MAX_ANSWER_BYTES:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            data = connection.recv(MAX_ANSWER_BYTES)
            if not data or time.monotonic() > deadline:
                break
            received += data
    return received.partition(b"\n")[0]


def _describe_process() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


# The part of process 0.


@dataclasses.dataclass(eq=False)
class _Connection:
    """A connection to process 0."""

    socket: socket.socket
    peer: str  # IP address of the other end
    received: bytes = b""  # so far, until it has introduced itself
    process_id: int | None = None  # None before it is known


class Coordinator:
    """Collects the processes of a job at process 0.

    A process that signs with the job's secret is trusted: two processes with the same number, or
    another `num_processes`, are an error for the whole job at once. Without a secret anybody could
    send that: it is an error for this connection only, which the job's error names if processes are
    missing at the deadline.
    """

    def __init__(self, address: str, info: ProcessInfo, timeout: float, secret: str | None):
        self._address = address
        self._num_processes = info.num_processes
        self._timeout = timeout
        self._secret = secret
        self._hosts = {0: _describe_process()}  # by process_id
        self._introduced: list[_Connection] = []  # they get an answer
        self._strangers: list[_Connection] = []  # oldest first
        self._events: Counter[str] = Counter()
        self._error: str | None = None

    def run(self) -> str | None:
        """Wait for all processes, and answer them. Return the error, or None."""
        deadline = time.monotonic() + self._timeout
        try:
            with contextlib.ExitStack() as stack:
                servers = listen(self._address, self._num_processes, deadline)
                self._selector = stack.enter_context(selectors.DefaultSelector())
                for server in servers:
                    stack.enter_context(server)
                    self._selector.register(server, selectors.EVENT_READ, server)
                self._collect(deadline, _describe_listening(self._address, servers))
            # The port is free again before anybody is answered: JAX may listen there at once.
            for connection in self._introduced:
                self._answer(connection, self._error)
        finally:
            for connection in (*self._introduced, *self._strangers):
                connection.socket.close()
        return self._error

    def _collect(self, deadline: float, listening: str) -> None:
        """Handle connections until all processes are here, or there is an error."""
        while self._error is None and len(self._hosts) < self._num_processes:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                self._error = self._describe_missing(listening)
                return
            for key, _ in self._selector.select(seconds):
                if not isinstance(key.data, _Connection):
                    self._accept(key.data)
                elif key.data.socket.fileno() >= 0:  # not closed since the selector returned
                    self._receive(key.data)

    def _accept(self, server: socket.socket) -> None:
        try:
            accepted, (peer, *_) = server.accept()
        except OSError:  # the connection is gone already
            return
        accepted.setblocking(False)
        connection = _Connection(accepted, peer)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        self._strangers.append(connection)
        if len(self._strangers) > MAX_STRANGERS + self._num_processes:
            oldest = self._strangers[0]
            self._close(oldest, f"{oldest.peer} sent nothing")

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.process_id is not None:
            if not data:  # the process has left; it may be started again
                host = self._hosts.pop(connection.process_id)
                name = f"process {connection.process_id} ({host})"
                self._close(connection, f"{name} connected and left")
            return
        connection.received += data
        line, newline, _ = connection.received.partition(b"\n")
        if newline:
            self._introduce(connection, line)
        elif not data or len(connection.received) > MAX_HELLO_BYTES:
            sent = "no whole message" if connection.received else "nothing"
            self._close(connection, f"{connection.peer} sent {sent}")

    def _introduce(self, connection: _Connection, line: bytes) -> None:
        """Handle the message of a connection."""
        try:
            hello = _decode_hello(line, self._secret)
        except MessageError as error:
            self._close(connection, f"{connection.peer} sent {error}")
            return
        error = self._compare(hello)
        if error is not None and self._secret is None:
            self._answer(connection, error)
            self._close(connection, error)
            return
        self._strangers.remove(connection)
        self._introduced.append(connection)
        if error is None:
            connection.process_id = hello.info.process_id
            self._hosts[hello.info.process_id] = hello.host
        elif self._error is None:
            self._error = error

    def _compare(self, hello: Hello) -> str | None:
        """Compare a process with process 0 and those that have connected. Return the error."""
        (process_id, num_processes), host = hello
        if num_processes != self._num_processes:
            return (
                f"num_processes must be the same for all processes, got {self._num_processes} in "
                f"process 0 ({self._hosts[0]}) and {num_processes} in process {process_id} ({host})"
            )
        if process_id in self._hosts:
            return (
                f"there are two processes {process_id} of {num_processes}, "
                f"{self._hosts[process_id]} and {host}: give each process another process_id"
            )
        return None

    def _close(self, connection: _Connection, event: str) -> None:
        """Close a connection, and keep the reason for the error."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        is_stranger = connection.process_id is None
        (self._strangers if is_stranger else self._introduced).remove(connection)
        # Strangers cannot make the error, or the memory of this process, grow.
        if event in self._events or len(self._events) < MAX_SHOWN:
            self._events[event] += 1

    def _answer(self, connection: _Connection, error: str | None) -> None:
        with contextlib.suppress(OSError):
            connection.socket.send(_encode({"error": error}, self._secret))

    def _describe_missing(self, listening: str) -> str:
        missing = [str(i) for i in range(self._num_processes) if i not in self._hosts]
        shown = ", ".join(missing[:MAX_SHOWN] + ["..."] * (len(missing) > MAX_SHOWN))
        events = [f"{event} ({n} times)" if n > 1 else event for event, n in self._events.items()]
        dropped = f" Dropped: {'; '.join(events)}." if events else ""
        return (
            f"process{'es' if len(missing) > 1 else ''} {shown} of {self._num_processes} did not "
            f"connect to {self._address} within {self._timeout:g} s. Were they started, did they "
            f"fail, can they reach this address?{listening}{dropped}"
        )


# The sockets of process 0: at the coordinator's address, and at no other.


def bind_address(address: str) -> str:
    """`HOST:PORT` at which process 0 listens: `address`, unless `BIND_VARIABLE` has another."""
    given = os.environ.get(BIND_VARIABLE)
    if not given:
        return address
    parse_address(given, BIND_VARIABLE)
    return given


def listen(address: str, num_processes: int, deadline: float) -> list[socket.socket]:
    """Listen at the IP addresses of the coordinator that this machine has, without blocking.

    A name that is not known is tried again until the `deadline`, by `time.monotonic()`: in
    Kubernetes it is known some seconds after the start.
    """
    where = bind_address(address)
    start = f"process 0 of {num_processes} cannot listen at {where}"
    try:
        resolved = _resolve(where, deadline)
    except OSError as error:
        raise ConnectionError(
            f"{start}: the name is not known here ({error.strerror}). Give coordinator_address an "
            f"address of this machine, or set {BIND_VARIABLE}."
        ) from error
    servers: list[socket.socket] = []
    for family, ip_address in resolved:
        try:
            is_dualstack = ip_address[0] == "::" and socket.has_dualstack_ipv6()
            server = socket.create_server(
                ip_address,
                family=family,
                backlog=socket.SOMAXCONN,
                dualstack_ipv6=is_dualstack,
            )
            server.setblocking(False)
            servers.append(server)
        except OSError as error:
            if error.errno in NOT_HERE:
                continue
            for server in servers:
                server.close()
            raise ConnectionError(
                f"{start} ({error.strerror}): another job or a second process 0 may use this port."
            ) from error
    if not servers:
        port = parse_address(where)[1]
        raise ConnectionError(
            f"{start}: it is {', '.join(ip_address[0] for _, ip_address in resolved)} here, which "
            "is no address of this machine. Is this the host of process 0? If the address is "
            f"forwarded to it, set {BIND_VARIABLE}=HOST:{port} with an address of this machine, or "
            "with 0.0.0.0 for all of them."
        )
    return servers


def _describe_listening(address: str, servers: list[socket.socket]) -> str:
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
    """Families and addresses (as for `bind`) of `HOST:PORT`."""
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


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):  # of names
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False
