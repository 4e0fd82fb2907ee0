"""Messages of the rendezvous: lines of JSON, signed if the job has a secret.

A line is `JSON`, or `HMAC JSON` with the hexadecimal HMAC-SHA256 of the JSON. Whatever arrives may
come from a stranger: everything is checked before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import reprlib
import socket
import time
from typing import Any, NamedTuple, TypeGuard

from gossipjax.launch._process_info import MAX_PROCESSES, ProcessInfo

MAX_HELLO_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 16
MAX_HOST_LENGTH = 300


class MessageError(Exception):
    """A message is not one of the job; the text describes it."""


class Hello(NamedTuple):
    """Introduction of a process to process 0. `host` describes the process for errors."""

    info: ProcessInfo
    host: str


class Answer(NamedTuple):
    """Process 0's answer: an error, or None if all processes have connected."""

    error: str | None


def encode_hello(hello: Hello, secret: str | None) -> bytes:
    return _encode({**hello.info._asdict(), "host": hello.host}, secret)


def decode_hello(line: bytes, secret: str | None) -> Hello:
    """Check and return the introduction of a process other than 0.

    Raises:
      MessageError: if it is not signed with `secret`, or malformed.
    """
    message = _decode(line, secret)
    process_id = message.get("process_id")
    num_processes = message.get("num_processes")
    host = message.get("host")
    if not (
        _is_int(process_id)
        and _is_int(num_processes)
        and 0 < process_id < num_processes <= MAX_PROCESSES
    ):
        raise MessageError(
            f"a message from process {reprlib.repr(process_id)} of {reprlib.repr(num_processes)}, "
            "which cannot be"
        )
    if not isinstance(host, str) or len(host) > MAX_HOST_LENGTH or not host.isprintable():
        raise MessageError(f"a message with the host {reprlib.repr(host)}")
    return Hello(ProcessInfo(process_id, num_processes), host)


def encode_answer(answer: Answer, secret: str | None) -> bytes:
    return _encode(answer._asdict(), secret)


def decode_answer(line: bytes, secret: str | None) -> Answer:
    """Check and return process 0's answer.

    Raises:
      MessageError: if it is not signed with `secret`, or malformed.
    """
    message = _decode(line, secret)
    error = message.get("error", False)
    if error is not None and not isinstance(error, str):
        raise MessageError("a message that is no answer of process 0")
    return Answer(error)


def receive_line(connection: socket.socket, timeout: float) -> bytes:
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


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _sign(text: bytes, secret: str) -> bytes:
    key = secret.encode(errors="surrogateescape")
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode()
