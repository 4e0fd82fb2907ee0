"""Process 0's part of the rendezvous: collect all other processes, then answer each.

Anybody who reaches the port can connect. So whatever arrives is checked before it is used, the
connections are read concurrently, and there is a bounded number of them and one deadline for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import socket
import time
from collections import Counter

from gossipjax.launch._listening import describe_listening, listen
from gossipjax.launch._messages import (
    MAX_HELLO_BYTES,
    Answer,
    Hello,
    MessageError,
    decode_hello,
    encode_answer,
)
from gossipjax.launch._process_info import ProcessInfo

MAX_STRANGERS = 64  # silent connections, beside one of each process; then the oldest is dropped
MAX_SHOWN = 8  # missing processes, and events, in an error


def describe_process() -> str:
    """Host and process id, for errors."""
    return f"{socket.gethostname()} pid {os.getpid()}"


@dataclasses.dataclass(eq=False)
class _Connection:
    """A connection to process 0.

    Attributes:
      socket: its end here.
      peer: IP address of the other end.
      received: what it has sent so far, until it has introduced itself.
      process_id: number of its process, None before it is known.
    """

    socket: socket.socket
    peer: str
    received: bytes = b""
    process_id: int | None = None


class Coordinator:
    """Collects the processes of a job at process 0.

    Who signs with the job's secret is trusted: two processes with the same number, or another
    `num_processes`, are an error for the whole job at once. Without a secret anybody could send
    that: it is an error for this connection only, which the job's error names if processes are
    missing at the deadline.

    Args:
      address: `HOST:PORT` of process 0.
      info: process 0.
      timeout: seconds to wait for the others.
      secret: that of the job, or None.
    """

    def __init__(self, address: str, info: ProcessInfo, timeout: float, secret: str | None):
        self._address = address
        self._num_processes = info.num_processes
        self._timeout = timeout
        self._secret = secret
        self._hosts = {0: describe_process()}  # by process_id
        self._introduced: list[_Connection] = []  # they get an answer
        self._strangers: list[_Connection] = []  # oldest first
        self._events: Counter[str] = Counter()
        self._error: str | None = None

    def run(self) -> str | None:
        """Wait for all processes, and answer them. Return the error, or None.

        Raises:
          ConnectionError: if process 0 cannot listen at its address.
        """
        deadline = time.monotonic() + self._timeout
        try:
            with contextlib.ExitStack() as stack:
                servers = listen(self._address, self._num_processes, deadline)
                self._selector = stack.enter_context(selectors.DefaultSelector())
                for server in servers:
                    stack.enter_context(server)
                    self._selector.register(server, selectors.EVENT_READ, server)
                self._collect(deadline, describe_listening(self._address, servers))
            # Nobody listens any more: JAX may do so as soon as the others have their answers.
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
            self._drop(self._strangers[0], "nothing")

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.process_id is not None:
            if not data:
                self._forget(connection)
            return
        connection.received += data
        line, newline, _ = connection.received.partition(b"\n")
        if newline:
            self._introduce(connection, line)
        elif not data or len(connection.received) > MAX_HELLO_BYTES:
            self._drop(connection, "no whole message" if connection.received else "nothing")

    def _introduce(self, connection: _Connection, line: bytes) -> None:
        """Handle the message of a connection."""
        try:
            hello = decode_hello(line, self._secret)
        except MessageError as error:
            self._drop(connection, str(error))
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
                f"{self._hosts[process_id]} and {host}: give each process another process_id, from "
                f"0 to {num_processes - 1}"
            )
        return None

    def _forget(self, connection: _Connection) -> None:
        """Forget a process that has left; it may be started again."""
        assert connection.process_id is not None
        host = self._hosts.pop(connection.process_id)
        self._close(connection, f"process {connection.process_id} ({host}) connected and left")

    def _drop(self, connection: _Connection, sent: str) -> None:
        self._close(connection, f"{connection.peer} sent {sent}")

    def _close(self, connection: _Connection, event: str) -> None:
        """Close a connection, and keep the reason for the error."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        is_stranger = connection.process_id is None
        (self._strangers if is_stranger else self._introduced).remove(connection)
        is_listed = event in self._events or len(self._events) < MAX_SHOWN
        self._events[event if is_listed else "others"] += 1

    def _answer(self, connection: _Connection, error: str | None) -> None:
        with contextlib.suppress(OSError):
            connection.socket.send(encode_answer(Answer(error), self._secret))

    def _describe_missing(self, listening: str) -> str:
        missing = [str(i) for i in range(self._num_processes) if i not in self._hosts]
        ellipsis = ["..."] if len(missing) > MAX_SHOWN else []
        shown = ", ".join(missing[:MAX_SHOWN] + ellipsis)
        events = [f"{event} ({n} times)" if n > 1 else event for event, n in self._events.items()]
        return (
            f"process{'es' if len(missing) > 1 else ''} {shown} of {self._num_processes} did not "
            f"connect to {self._address} within {self._timeout:g} s. Were they started, did they "
            f"fail, can they reach this address?{listening}"
            f"{' Dropped: ' if events else ''}{'; '.join(events)}{'.' if events else ''}"
        )
