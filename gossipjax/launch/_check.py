"""Checks the path between two machines: one answers, the other asks and says what is wrong.

Who asks proves first that it has the secret. Strangers are told a random number, and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import struct
import sys
import time
from importlib.metadata import version
from typing import Any

from gossipjax.launch._process_info import parse_address

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0
SEND_SECONDS = 3.0  # each way
BLOCK = 1 << 14  # bytes
MORE = b"\1"
LAST = b"\0"
PINGS = 10
UNSENT_BYTES = 1 << 17  # that wait in the kernel, at most: a slow path would need long for more
MAX_CLOCK_SECONDS = 1.0
MIN_LOSS = 0.005  # a full link loses less
USUAL_MTU = 1500
TUNNEL_BYTES = 80  # that WireGuard adds to a packet
USE_BBR = "sudo sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr"
LISTEN = "type there: python -m gossipjax.launch --listen {address}"
UNREACHED = {
    socket.gaierror: "no name server knows {host}: take its number, or write it into /etc/hosts",
    TimeoutError: "{address} does not answer: a firewall drops what comes, or the machine is off. "
    "Type there: sudo ufw allow {port}/tcp. In a cloud, open the port in its settings, too",
    ConnectionRefusedError: "nothing listens at {address}, or a firewall refuses all: " + LISTEN,
    OSError: "no way leads to {address}: see what `ip route get {host}` says",
}
STRANGE = "{address} is open, but another program listens there: end it, and " + LISTEN
REFUSED = (
    "{address} is open, and has another secret: `echo $GOSSIPJAX_SECRET | sha256sum` must print "
    "the same on both machines"
)
BLOCKED = (
    "{address} is open, but large packets do not arrive. Type on both machines, with the name that "
    "`ip route get {host}` prints after dev: sudo ip link set dev NAME mtu 1280"
)


class End:
    """One end of a connection: exchanges values as lines of JSON, and blocks to measure by."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._connection = connection
        self._file = connection.makefile("rb")

    def say(self, value: Any) -> None:
        """Sends a value as a line of JSON, which the other end reads by `hear`."""
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """Waits for a line of JSON, and returns its value."""
        return json.loads(self._file.readline(1 << 14))

    def ping(self) -> tuple[float, float]:
        """Returns the seconds there and back, and by how many seconds the other clock is ahead."""
        start = time.time()
        self.say(None)
        other_clock = self.hear()
        now = time.time()
        # The other end read its clock about halfway between.
        return now - start, other_clock - (start + now) / 2

    def send_blocks(self) -> None:
        """Sends blocks for `SEND_SECONDS`, for the other end to measure."""
        end = time.monotonic() + SEND_SECONDS
        while time.monotonic() < end:
            self._connection.sendall(MORE * BLOCK)
        self._connection.sendall(LAST * BLOCK)

    def receive_blocks(self) -> float:
        """Returns the bits per second of the second half of the blocks, as TCP begins slowly."""
        times = [time.monotonic()]
        while self._file.read(BLOCK)[:1] == MORE:
            times.append(time.monotonic())
        half = len(times) // 2
        count = len(times) - 1 - half
        seconds = max(times[-1] - times[half], 1e-9)  # never 0
        return 8 * BLOCK * count / seconds

    def describe(self) -> dict[str, Any]:
        """Returns this machine's versions, and on Linux the MTU and the loss that TCP has found."""
        found: dict[str, Any] = {"Python": platform.python_version()}
        found |= {name: version(name) for name in ("gossipjax", "jax")}
        if sys.platform == "linux":
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
            # tcpi_snd_mss, tcpi_pmtu, tcpi_total_retrans and tcpi_data_segs_out of linux/tcp.h
            offsets = (16, 60, 100, 156)
            mss, mtu, resent, sent = (struct.unpack_from("I", info, i)[0] for i in offsets)
            # Bytes of the headers of IP and TCP, with a time stamp.
            headers = 52 if self._connection.family == socket.AF_INET else 72
            found |= {"mtu": min(mtu, mss + headers), "loss": resent / max(1, sent)}
        return found


def prove(nonce: str) -> str:
    """Returns a hash of the secret and `nonce`; slow, so that nobody can try a dictionary."""
    secret = os.environ.get("GOSSIPJAX_SECRET", "").encode(errors="surrogateescape")
    key = hashlib.scrypt(secret, salt=b"gossipjax check", n=1 << 14, r=8, p=1)
    return hmac.new(key, nonce.encode(), "sha256").hexdigest()


def listen(address: str) -> str:
    """Answers checks at an address until Ctrl-C; returns the reason if it cannot listen there."""
    host, port = parse_address(address)
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(place, family=family)
    except OSError as error:
        return (
            f"this machine cannot listen at {address} ({error.strerror}). Take an address that "
            "`hostname -I` prints, and a port that `ss -ltn` does not show; a machine without a "
            "public address needs a tunnel, docs/recipes/wireguard.md"
        )
    print(f"type on the other machine: python -m gossipjax.launch --check {address}", flush=True)
    while True:
        connection, (other, *_) = server.accept()
        with connection, contextlib.suppress(OSError, ValueError, TypeError):
            answer(End(connection))
            print(f"asked from {other}", flush=True)


def answer(end: End) -> None:
    """Answers one check, step by step as `check` asks, if the other machine has the secret."""
    nonce = secrets.token_hex()
    end.say(nonce)
    is_same = hmac.compare_digest(end.hear(), prove(nonce))
    end.say(is_same)
    if is_same:
        for _ in range(PINGS):
            end.hear()
            end.say(time.time())
        end.say(end.receive_blocks())
        end.send_blocks()
        end.say(end.describe())


def check(address: str) -> str | None:
    """Checks the path to the machine that listens at an address, and prints what it finds.

    Returns None, or the reason, and what to type, if no check was possible.
    """
    host, port = parse_address(address)
    where = {"address": address, "host": host, "port": port}
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        texts = (text for kind, text in UNREACHED.items() if isinstance(error, kind))
        return next(texts).format(**where)
    problem = STRANGE  # what is wrong if the connection fails from here on
    with connection, contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        end = End(connection)
        end.say(prove(end.hear()))
        if not end.hear():  # the other machine has another secret
            return REFUSED.format(**where)
        delay, ahead = min(end.ping() for _ in range(PINGS))
        problem = BLOCKED  # small messages have arrived, and now come large ones
        end.send_blocks()
        rates = end.hear(), end.receive_blocks()
        report(delay, ahead, rates, end.describe(), end.hear())
        return None
    return problem.format(**where)


def report(
    delay: float, ahead: float, rates: tuple[float, ...], own: dict[str, Any], other: dict[str, Any]
) -> None:
    """Prints what `check` has found, and what to type: `own` and `other` are from `End.describe`.

    `delay` and `ahead` (of `End.ping`) are in seconds, and `rates`, there and back, in bits/s.
    """
    advice = []
    there, back = (f"{rate / 1e6:.4g}" for rate in rates)
    print(f"delay      {1000 * delay:.1f} ms there and back")
    print(f"bandwidth  {there} Mbit/s there, {back} back")
    print(f"clock      {ahead:+.3f} s there, give or take {delay / 2:.3f} s")
    if abs(ahead) > MAX_CLOCK_SECONDS + delay / 2:
        advice.append("the clocks differ: type on both: sudo timedatectl set-ntp true")
    if "mtu" in own and "mtu" in other:
        mtu = min(own["mtu"], other["mtu"])
        print(f"sent again {own['loss']:.2%} of the packets there, {other['loss']:.2%} back")
        print(f"path MTU   {mtu} bytes")
        if max(own["loss"], other["loss"]) > MIN_LOSS:
            advice.append(f"packets are lost: type on both, unless you did: {USE_BBR}")
        if mtu < USUAL_MTU:
            advice.append(f"a tunnel needs `MTU = {mtu - TUNNEL_BYTES}` in its file on both")
    else:
        print("sent again, path MTU: only Linux tells")
    for name in ("Python", "gossipjax", "jax"):
        print(f"{name:10} {own[name]} here, {other[name]} there")
        if own[name] != other[name]:
            advice.append(f"take the same {name} on both, for example {other[name]}")
    print("\n".join(f"- {text}" for text in advice) or "nothing is wrong", flush=True)
