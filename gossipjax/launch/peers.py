"""Keeps the connections of the rendezvous, to see who has ended and who is waited for.

Without the connections, a process whose peer has died waits up to 100 s, and JAX aborts with C++
traces. The kernel reports a peer's end on a connection at once, and a machine that has vanished
after `SILENT_SECONDS`. The same connections carry small values, so that processes can agree without
a collective. Any thread can use the connections, with a timeout, and learn which process is
missing.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossipjax.launch._process_info import ProcessInfo

SILENT_SECONDS = 20  # until a machine that no longer answers counts as lost
LET_GO_SECONDS = 3.0  # time for the program to end by itself after a peer is lost
NOTICE_SECONDS = 30.0  # after this wait, a line says who is waited for
OVER_SECONDS = 290.0  # for others, after the end of a program: JAX aborts it after 300
ANSWER_SECONDS = 5.0  # time for process 0 to say who is missing
MAX_LINE_BYTES = 1 << 26
PACKAGE = str(Path(__file__).parent.parent)

Connections = dict[int, tuple[socket.socket, str]]  # by process: the socket, and a description


class Peers:
    """Process 0 is connected to all other processes, and they are connected to process 0 only."""

    def __init__(self, info: ProcessInfo, connections: Connections):
        self._info = info
        self._connections = connections
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._over = set[int]()  # whose programs have ended, so that only JAX waits for the others
        self._counts = collections.Counter[str]()  # number of calls of `gather`, by name
        self._values: dict[str, dict[int, Any]] = {}  # at process 0, the values that have arrived
        self._answers: dict[str, Any] = {}
        for number, (connection, _) in connections.items():
            keep_alive(connection)
            threading.Thread(target=self._read, args=(number,), daemon=True).start()
        # A child made by fork would keep the connections of a process that has died.
        os.register_at_fork(after_in_child=self._close)
        atexit.register(self.leave)

    def gather(self, name: str, value: Any, timeout: float) -> list[Any]:
        """Returns the values of all processes by number. All must call it with the same names.

        Raises:
          TimeoutError: if a process has not called within `timeout` seconds.
          ConnectionError: if a process has ended.
        """
        with self._changed:
            key = f"{name} {self._counts[name]}"
            self._counts[name] += 1
        self._ask(key, value=value)
        start = time.monotonic()
        text = ""
        for limit in (min(NOTICE_SECONDS, timeout), timeout):
            if not self._wait_for(key, start + limit - time.monotonic()):
                text = (
                    f"process {self._info.process_id} has waited for {limit:g} s at {_find_line()} "
                    f"for {self._find_missing(key)}"
                )
                if limit < timeout:
                    print(f"gossipjax: {text}", file=sys.stderr, flush=True)
        with self._changed:
            if key in self._answers:
                return self._answers.pop(key)
        if self._lost is not None:
            raise ConnectionError(self.describe_loss())
        raise TimeoutError(
            f"{text}: look why it does not come, or give it more time. All processes must make the "
            "same calls in the same order."
        )

    def leave(self) -> None:
        """Says that this program has ended, so that the end of other processes is no loss."""
        with self._changed:
            self._over.add(self._info.process_id)
        self._send({"over": True})

    def find_loss(self, seconds: float) -> str | None:
        """Waits until a peer is lost or the time is over; says why this process must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, seconds)
        return self.describe_loss() if self._lost else None

    def describe_loss(self) -> str:
        number, count = self._info
        return (
            f"process {number} of {count} ends: {self._lost} has ended or cannot be reached. Start "
            "all processes again; Checkpoints.resume continues from the newest checkpoint."
        )

    def _read(self, number: int) -> None:
        connection, name = self._connections[number]
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                self._receive(number, json.loads(line))
        with self._changed:
            is_expected = {number, self._info.process_id} <= self._over
        if not is_expected:  # also one that has given up waiting for this one, in JAX's shutdown
            self._lose(name)

    def _receive(self, number: int, message: dict[str, Any]) -> None:
        match message:
            case {"lost": str(name)}:
                is_own = name.startswith(f"process {self._info.process_id} ")
                self._lose(self._connections[number][1] if is_own else name)
            case {"over": True}:
                self._notice_over(number)
            case {"key": str(key), "answer": answer}:
                with self._changed:
                    self._answers[key] = answer
                    self._changed.notify_all()
            case {"key": str(key), "value": value}:
                with self._changed:
                    values = self._values.setdefault(key, {})
                    values[number] = value
                    is_complete = len(values) == self._info.num_processes
                if is_complete:
                    del self._values[key]
                    self._answer(key, [values[i] for i in range(len(values))])
            case {"key": str(key)}:
                self._answer(f"missing in {key}", self._name_missing(key))

    def _name_missing(self, key: str) -> str:
        with self._changed:
            here = self._values.get(key, {})
            missing = [i for i in range(self._info.num_processes) if i not in here]
        return ", ".join(self._connections[i][1] if i else "process 0" for i in missing)

    def _answer(self, key: str, answer: Any) -> None:
        message = {"key": key, "answer": answer}
        self._receive(0, message)
        self._send(message)

    def _ask(self, key: str, **value: Any) -> None:
        message = {"key": key, **value}
        if self._info.process_id == 0:
            self._receive(0, message)
        else:
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for connection, _ in self._connections.values():
            with self._changed, contextlib.suppress(OSError):  # the reading thread finds the loss
                connection.sendall(line)

    def _wait_for(self, key: str, seconds: float) -> bool:
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: key in self._answers or self._lost, max(0, seconds))
            )

    def _find_missing(self, key: str) -> str:
        """Asks process 0 which processes have not called."""
        self._ask(key)
        self._wait_for(f"missing in {key}", ANSWER_SECONDS)
        return self._answers.pop(f"missing in {key}", "process 0, which does not answer")

    def _lose(self, name: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = name
            self._changed.notify_all()
        self._send({"lost": name})  # or other processes would name process 0 as lost
        # While a collective or a barrier of JAX waits, Python cannot raise.
        self._later(LET_GO_SECONDS, self._let_go)

    def _let_go(self) -> None:
        print(f"gossipjax: {self.describe_loss()}", file=sys.stderr, flush=True)
        os._exit(1)

    def _notice_over(self, number: int) -> None:
        with self._changed:
            self._over.add(number)
        self._later(NOTICE_SECONDS, self._warn_of_over, number)
        self._later(OVER_SECONDS, self._end_after, number)

    def _warn_of_over(self, number: int) -> None:
        if self._info.process_id in self._over:
            return
        print(
            f"gossipjax: {self._connections[number][1]} has ended its program, and process "
            f"{self._info.process_id} still runs. If it waits in a step, it had more batches: "
            "gx.prefetch(..., together=True) ends all loops together. It is ended after "
            f"{OVER_SECONDS:g} s.",
            file=sys.stderr,
            flush=True,
        )

    def _end_after(self, number: int) -> None:
        if self._info.process_id not in self._over:
            self._lose(self._connections[number][1])

    def _later(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        timer = threading.Timer(seconds, action, arguments)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # this process ends already: nothing is left to do
            timer.start()

    def _close(self) -> None:
        for connection, _ in self._connections.values():
            connection.close()


kept: Peers | None = None  # the connections of this process, after the rendezvous


def _find_line() -> str:
    """Finds the line of the program, outside of this package, that waits."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(PACKAGE):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown line"


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel close a connection to a machine that is silent for `SILENT_SECONDS`."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = SILENT_SECONDS // 4
    options = {"TCP_KEEPIDLE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 3}
    # If sent data are not confirmed, the kernel does not probe the connection.
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * SILENT_SECONDS}.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def forward(address: tuple[str, int]) -> str:
    """Opens a loopback address that forwards everything to `address`, and returns it.

    JAX aborts when the connection to its coordinator ends, and a connection to the loopback address
    stays open.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(address)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
