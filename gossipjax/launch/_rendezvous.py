"""Rendezvous of all processes at process 0's port, before JAX uses that port.

If the coordinator is unreachable, or a process is missing or was started twice, JAX aborts the
process: the program cannot catch it, and the message does not name the process. So the processes
first meet at the coordinator's address themselves.
"""

from __future__ import annotations

import contextlib
import socket
import time

from gossipjax.launch._coordinator import Coordinator, describe_process
from gossipjax.launch._messages import (
    Hello,
    MessageError,
    decode_answer,
    encode_hello,
    receive_line,
)
from gossipjax.launch._process_info import ProcessInfo, parse_address

RETRY_SECONDS = 0.05  # between two attempts to reach process 0
MARGIN_SECONDS = 5.0  # for process 0's answer to arrive after its timeout


def rendezvous(address: str, info: ProcessInfo, timeout: float, secret: str | None = None) -> None:
    """Wait until all processes have connected to process 0 at `address`.

    Processes other than 0 return when something listens at `address` again, which is JAX's
    coordinator: JAX's client would sleep for a second after a failed attempt.

    Args:
      address: `HOST:PORT` of process 0.
      info: this process.
      timeout: seconds for which process 0 waits for the others, and the others for process 0.
      secret: that of the job, which signs all messages, or None.

    Raises:
      ConnectionError: if process 0 cannot listen or cannot be reached, if processes are missing or
        were started twice, or if they disagree on `num_processes`. With a secret all processes that
        have connected raise the same error.
    """
    if info.process_id == 0:
        error = Coordinator(address, info, timeout, secret).run()
    else:
        error = _join(address, info, timeout, secret)
    if error is not None:
        raise ConnectionError(error)


def _join(address: str, info: ProcessInfo, timeout: float, secret: str | None) -> str | None:
    """Run the part of the other processes: introduce this one. Return process 0's error."""
    with _reach(address, info, timeout) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(encode_hello(Hello(info, describe_process()), secret))
        line = receive_line(connection, timeout + MARGIN_SECONDS)
    try:
        error = decode_answer(line, secret).error
    except MessageError:
        return (
            f"process {info.process_id} of {info.num_processes} connected to {address}, but what "
            "listens there does not expect it: process 0 has started without it (was another "
            "process given this process_id?) or has exited, its GOSSIPJAX_SECRET differs, or the "
            "port is another program's."
        )
    if error is None:
        _reach(address, info, timeout).close()
    return error


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


def _connect(address: str, timeout: float) -> socket.socket:
    connection = socket.create_connection(parse_address(address), timeout)
    if connection.getsockname() == connection.getpeername():
        connection.close()  # where nobody listens, TCP may connect a socket to itself
        raise ConnectionRefusedError("nobody listens there")
    return connection
