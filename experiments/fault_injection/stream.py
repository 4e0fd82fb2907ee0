"""What one plain TCP stream carries from one host to another."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.speed.wire.links import Host

PORT = 5001
CHUNK = 1 << 16
MAX_SECONDS = 30.0  # until the next bytes arrive


def measure_stream(sender: Host, receiver: Host, seconds: float) -> float:
    """Bytes per second that arrive, from the first one on.

    Raises:
      OSError: if nothing arrives.
    """
    with _start(receiver, "receive", receiver.address, f"{seconds}") as receiving:
        assert receiving.stdout is not None
        receiving.stdout.readline()  # it listens now
        with _start(sender, "send", receiver.address):
            printed = receiving.stdout.read()
    if receiving.returncode:
        raise OSError(f"a stream from {sender.address} to {receiver.address} must arrive.")
    return float(printed)


def _start(host: Host, *words: str) -> subprocess.Popen[str]:
    command = [*host.prefix, sys.executable, __file__, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def receive(address: str, seconds: float) -> None:
    """Takes what one sender sends for so long, and prints the bytes per second."""
    with socket.create_server((address, PORT)) as server:
        print("listens", flush=True)
        server.settimeout(MAX_SECONDS)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(MAX_SECONDS)
        count = len(stream.recv(CHUNK))
        began = now = time.monotonic()
        while now < began + seconds:
            count += len(stream.recv(CHUNK))
            now = time.monotonic()
        print(count / (now - began))


def send(address: str) -> None:
    """Sends until the receiver ends."""
    with (
        socket.create_connection((address, PORT), MAX_SECONDS) as stream,
        contextlib.suppress(ConnectionError),
    ):
        while True:
            stream.sendall(bytes(CHUNK))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2])
    else:
        receive(sys.argv[2], float(sys.argv[3]))
