"""Keeps the connections that `meet` has made, so that processes can agree without a collective.

All other processes are connected to process 0. Any thread can use the connections, with a time-out,
and learns which process is missing. That a process has died is for JAX's heartbeat to notice.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from gossipjax.launch._process_info import ProcessInfo

NOTICE_SECONDS = 30.0  # after this wait, a line says who is waited for
ANSWER_SECONDS = 5.0  # time for process 0 to say who is missing
PACKAGE = str(Path(__file__).parent.parent)
Connections = dict[int, tuple[socket.socket, str]]  # by process: the socket, and a description


class Peers:
    """The connections of process 0 to all other processes, or of another process to process 0."""

    def __init__(self, info: ProcessInfo, connections: Connections):
        self._info = info
        self._connections = connections
        self._changed = threading.Condition()
        self._lost: str | None = None  # the name of the first process that has ended
        self._is_over = False  # whether the program has ended, so that only JAX waits for others
        self._counts = collections.Counter[str]()  # number of calls of `gather`, by name
        self._values: dict[str, dict[int, Any]] = {}  # at process 0, the values that have arrived
        self._answers: dict[str, Any] = {}  # key of a call -> what process 0 has answered
        for number in connections:
            threading.Thread(target=self._read, args=(number,), daemon=True).start()
        atexit.register(self.leave)

    def gather(self, name: str, value: Any, timeout: float) -> list[Any]:
        """Returns the values that all processes give, in the order of their numbers.

        All processes must make the same calls, with the same names, in the same order.

        Raises:
          TimeoutError: if a process has not called within `timeout` seconds.
          ConnectionError: if a process has ended.
        """
        with self._changed:
            key = f"{name} {self._counts[name]}"
            self._counts[name] += 1
        self._tell({"key": key, "value": value})
        start = time.monotonic()
        notice = ""
        for limit in (min(NOTICE_SECONDS, timeout), timeout):
            # After the first limit, a line says who is missing; after the second, an error does.
            if not self._wait_for(key, start + limit - time.monotonic()):
                self._tell({"key": key})  # a message without a value asks who is missing
                self._wait_for(f"missing in {key}", ANSWER_SECONDS)
                missing = self._answers.pop(f"missing in {key}", "process 0")
                notice = (
                    f"process {self._info.process_id} has waited for {limit:g} s at {_find_line()} "
                    f"for {missing}"
                )
                if limit < timeout:
                    print(f"gossipjax: {notice}", file=sys.stderr, flush=True)
        with self._changed:
            if key in self._answers:
                return self._answers.pop(key)
        if self._lost is not None:
            raise ConnectionError(self.describe_loss())
        raise TimeoutError(
            f"{notice}: look why it does not come, or give it more time. All processes must make "
            "the same calls in the same order."
        )

    def leave(self) -> None:
        """Notes that this program has ended: other processes that end now do not count as lost."""
        self._is_over = True

    def has_lost(self, seconds: float) -> bool:
        """Waits for at most `seconds` until a process has ended; returns whether one has."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._lost, seconds))

    def describe_loss(self) -> str:
        """Says which process has ended, and what to do."""
        return (
            f"process {self._info.process_id} of {self._info.num_processes} ends: {self._lost} has "
            "ended or cannot be reached. Start all processes again; Checkpoints.resume continues "
            "from the newest checkpoint."
        )

    def _read(self, number: int) -> None:
        """Receives the messages of a process, in a thread; when they end, the process is lost."""
        connection, name = self._connections[number]
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                self._receive(number, json.loads(line))
        self._lose(name)

    def _receive(self, number: int, message: dict[str, Any]) -> None:
        """Acts on a loss or answer from process 0, or (at process 0) on a value or question."""
        with self._changed:
            match message:
                case {"lost": str(name)}:
                    self._lose(name)
                case {"key": str(key), "answer": answer}:
                    self._answers[key] = answer
                    self._changed.notify_all()
                case {"key": str(key), "value": value}:
                    values = self._values.setdefault(key, {})
                    values[number] = value
                    if len(values) == self._info.num_processes:
                        del self._values[key]
                        self._answer(key, [values[i] for i in sorted(values)])
                case {"key": str(key)}:  # the question who is missing
                    arrived = self._values.get(key, {})
                    missing = [i for i in range(self._info.num_processes) if i not in arrived]
                    names = [self._connections[i][1] if i else "process 0" for i in missing]
                    self._answer(f"missing in {key}", ", ".join(names))

    def _answer(self, key: str, answer: Any) -> None:
        """Gives all processes, this one (process 0) included, the answer to a call."""
        self._answers[key] = answer
        self._changed.notify_all()
        self._send({"key": key, "answer": answer})

    def _tell(self, message: dict[str, Any]) -> None:
        """Sends a message to process 0, which may be this one."""
        if self._info.process_id == 0:
            self._receive(0, message)
        else:
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        """Sends a message over all connections."""
        line = json.dumps(message).encode() + b"\n"
        for connection, _ in self._connections.values():
            with self._changed, contextlib.suppress(OSError):  # the reading thread finds the loss
                connection.sendall(line)

    def _wait_for(self, key: str, seconds: float) -> bool:
        """Waits until a call is answered or a process is lost; returns False if neither comes."""
        with self._changed:
            return bool(
                self._changed.wait_for(lambda: key in self._answers or self._lost, max(0, seconds))
            )

    def _lose(self, name: str) -> None:
        """Notes and prints that a process has ended, unless this program has ended, too."""
        with self._changed:
            if self._lost is not None or self._is_over:
                return
            self._lost = name
            # A collective of JAX may wait for that process, and Python cannot raise meanwhile. So
            # this is printed now.
            print(f"gossipjax: {self.describe_loss()}", file=sys.stderr, flush=True)
            self._changed.notify_all()
        if self._info.process_id == 0:
            self._send({"lost": name})


kept: Peers | None = None  # the connections of this process, once `initialize` has made them


def _find_line() -> str:
    """Returns the line of the program, outside of gossipjax, at which this thread is."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(PACKAGE):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown line"
