"""The ZeroMQ sockets of a node: one that listens, and two for each address that it sends to.

For each address, one socket sends pieces of models and the other small messages, so that a sign of
life never waits behind a model. Threads ask name servers for the numeric addresses of names.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from gossipjax.asynchronous._messages import read_numeric
from gossipjax.asynchronous._settings import COMPARE, may_connect

HANDSHAKE_MS = 2000  # after which a connection is closed that has not begun as ZeroMQ does
RECONNECT_MS = 100
MAX_RECONNECT_MS = 2000
PROBE_MS = 1000
CONNECT_MS = 3000
KEEPALIVE_SECONDS = 2
ENCRYPTION_BYTES = 256  # that a frame is longer when it is encrypted, at most; 33 are in use
MAX_FRAME_BYTES = 1 << 22
MAX_SOCKETS = 16_384
QUEUED = 50  # messages to an address; beyond them, messages are dropped, and parcels sent again
WAKE_ADDRESS = "inproc://wake"
GREETING = b"\xff" + bytes(7) + b"\x01\x7f"  # bytes with which ZeroMQ begins each connection
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Sockets:
    """Sends frames to addresses, and receives frames that are sent to this node.

    With a secret, connections are encrypted (CurveZMQ), and nobody without the secret can connect.
    Without a secret, frames go to this machine only, whatever addresses strangers name. The
    attribute `address` has the real port if the node listens at port 0, any free one.
    """

    def __init__(self, address: str, secret: str | None, patience: float):
        self.find_numeric = Names(patience / 2, secret).find
        self.sent = self.received = 0  # bytes in frames
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        # These are the defaults of all sockets.
        self._context.linger = 0
        self._context.sndhwm = self._context.rcvhwm = QUEUED
        # Some firewalls forget connections on which nothing passes, and say nothing.
        self._context.tcp_keepalive = 1
        self._context.tcp_keepalive_idle = self._context.tcp_keepalive_intvl = KEEPALIVE_SECONDS
        # After an outage, TCP itself would wait as long again before it tries once more.
        self._context.tcp_maxrt = int(1000 * patience / 2)
        self._context.connect_timeout = CONNECT_MS
        self._keys = None if secret is None else make_keys(secret)
        if self._keys:
            self._context.curve_publickey, self._context.curve_secretkey = self._keys
        # (address, is_bulk) -> the socket that sends to it.
        self._outgoing: dict[tuple[str, bool], zmq.Socket[bytes]] = {}
        self._numbers: dict[str, str | None] = {}  # address -> where its sockets connect
        # A ROUTER can answer on the connection on which a message came, even if this node cannot
        # connect to its sender.
        self._incoming = self._context.socket(zmq.ROUTER)
        self._incoming.maxmsgsize = MAX_FRAME_BYTES + (ENCRYPTION_BYTES if self._keys else 0)
        self._incoming.handshake_ivl = HANDSHAKE_MS
        self._incoming.curve_server = self._keys is not None
        try:
            self._bound = self._bind(find_numbers(address)[0])
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise OSError(
                f"this node must listen at {address}, got: {error}. Give an address of this "
                "machine with a port that is free; port 0 is any. Is GOSSIPJAX_NODE its own place?"
            ) from error
        port = str(self._incoming.get_string(zmq.LAST_ENDPOINT)).rpartition(":")[2]
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._wake_receiver = self._context.socket(zmq.PAIR)
        self._wake_receiver.bind(WAKE_ADDRESS)
        self._wake_sender = self._context.socket(zmq.PAIR)
        self._wake_sender.connect(WAKE_ADDRESS)
        self._poller = zmq.Poller()
        self._poller.register(self._incoming, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)

    def _bind(self, numbers: str) -> str:
        """Listens at a numeric address, `IP:port`, and returns it."""
        self._incoming.ipv6 = numbers.startswith("[")
        self._incoming.bind(f"tcp://{numbers}")
        return numbers

    def send(self, address: str, frames: Sequence[Any], is_bulk: bool = False) -> bool:
        """Sends frames, which must not change afterwards; returns False if they were dropped.

        Frames are dropped if too many wait already, or while the host name has no IP address.
        Pieces of models are `is_bulk`.
        """
        key = address, is_bulk
        try:
            if key not in self._outgoing:
                numbers = self._numbers[address] = self.find_numeric(address)
                if numbers is None:
                    return False
                self._outgoing[key] = self._make_sender(numbers)
                self._outgoing[key].connect(f"tcp://{numbers}")
            self._outgoing[key].send_multipart(frames, zmq.NOBLOCK, copy=False)
            self.sent += sum(memoryview(frame).nbytes for frame in frames)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # an address that is none, or too many sockets
            self.forget(address)
            return False
        return True

    def _make_sender(self, numbers: str) -> zmq.Socket[bytes]:
        """Makes a socket that can connect to a numeric address; the caller lets it connect."""
        sender = self._context.socket(zmq.DEALER)
        sender.ipv6 = numbers.startswith("[")
        sender.reconnect_ivl = RECONNECT_MS
        sender.reconnect_ivl_max = MAX_RECONNECT_MS
        if self._keys:
            sender.curve_serverkey = self._keys[0]
        return sender

    def look_after(self, address: str) -> list[bytes]:
        """Returns what a silent node has answered; drops its sockets if its name has a new number.

        If the name of this node has a new numeric address, the node listens there, too. Threads ask
        for the names, so a call takes no time, and a later call sees what they have found.
        """
        if self.find_numeric(address, peer_is_silent=True) != self._numbers.get(address):
            self.forget(address)
        own = self.find_numeric(self.address, peer_is_silent=True)
        with contextlib.suppress(zmq.ZMQError):  # if it is no address of this machine
            if own not in (self._bound, None):
                self._bound = self._bind(own)
        return self.read_answers(address)

    def read_answers(self, address: str) -> list[bytes]:
        """Returns what a node has answered over the connection to it."""
        answers: list[bytes] = []
        with contextlib.suppress(zmq.Again, KeyError):
            while len(answers) < QUEUED:
                answers += self._outgoing[address, False].recv_multipart(zmq.NOBLOCK)
        return answers

    def answer(self, route: bytes, text: bytes) -> None:
        """Sends a text back over the connection on which frames came, which `route` names."""
        with contextlib.suppress(zmq.ZMQError):
            self._incoming.send_multipart([route, text], zmq.NOBLOCK)
            self.sent += len(text)

    def find_obstacle(self, address: str) -> tuple[str, str | None] | None:
        """Says why nothing comes from an address, and the way out if there is one."""
        numbers = self.find_numeric(address)
        if numbers is None:
            return f"no name server says where {address} is", None
        refused = self._is_refused_at(numbers)
        if isinstance(refused, OSError):
            return f"nobody listens at {address} ({refused.strerror or refused})", None
        if refused:
            return f"the node at {address} refuses this one, which has another secret", COMPARE
        return None

    def _is_refused_at(self, numbers: str) -> bool | OSError:
        """Says whether the node at a numeric address refuses this secret.

        Returns the error if nobody listens there. Any thread may call it: it connects by itself.
        """
        host, _, port = numbers.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), PROBE_MS / 1000)
        except OSError as error:
            return error
        greeting = b""
        with connection, connection.makefile("rb") as file, contextlib.suppress(OSError):
            greeting = file.read(len(GREETING))
        if greeting != GREETING:  # of something else, such as a tunnel without its other end yet
            return False
        with self._make_sender(numbers) as sender:
            with sender.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                sender.connect(f"tcp://{numbers}")
                is_over = monitor.poll(PROBE_MS)
                is_refused = is_over and recv_monitor_message(monitor)["event"] & REFUSED
                sender.disable_monitor()
            return bool(is_refused)

    def forget(self, address: str) -> None:
        """Closes the sockets to an address, with all that waits there; `send` makes new ones."""
        self._numbers.pop(address, None)
        for is_bulk in (True, False):
            sender = self._outgoing.pop((address, is_bulk), None)
            if sender is not None:
                sender.close(linger=0)

    def receive(self, seconds: float) -> list[list[Any]]:
        """Waits until something arrives or `wake` is called; returns the messages that arrived.

        Each is a list of frames, of which the first is the route for `answer`.
        """
        ready = dict(self._poller.poll(int(1000 * seconds)))
        if self._wake_receiver in ready:
            self._wake_receiver.recv()
        arrived: list[list[Any]] = []
        while self._incoming in ready and len(arrived) < QUEUED and self._incoming.poll(0):
            frames = self._incoming.recv_multipart(zmq.NOBLOCK, copy=False)
            arrived.append([frame.buffer for frame in frames])
            self.received += sum(map(len, frames))
        return arrived

    def wake(self) -> None:
        """Makes a `receive` that waits in another thread return."""
        with contextlib.suppress(zmq.Again):  # the thread is awake already
            self._wake_sender.send(b"", zmq.NOBLOCK)

    def close(self, linger: float = 0.0) -> None:
        """Closes all sockets, after at most `linger` seconds for frames that still wait."""
        self._context.destroy(linger=int(1000 * linger))


def make_keys(secret: str) -> tuple[bytes, bytes]:
    """Makes the public and the private key from a job's secret, in ZeroMQ's form.

    The public key is secret, too: it is never sent in the clear, and nobody connects without it.

    >>> make_keys("a text that is long")[0][:16]
    b'&Qh*^PgHbw87)mrS'
    """
    text = secret.encode(errors="surrogateescape")
    # This is slow on purpose (about 50 ms), so that nobody can try a dictionary.
    key = hashlib.scrypt(text, salt=b"gossipjax asynchronous", n=1 << 14, r=8, p=1, dklen=32)
    private = z85.encode(key)
    return zmq.curve_public(private), private


def find_numbers(address: str) -> tuple[str, ...]:
    """Asks a name server for all numeric addresses of `host:port`; returns those of IPv4 first.

    >>> find_numbers("127.0.0.1:5000")
    ('127.0.0.1:5000',)
    """
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({(":" in str(where[0]), str(where[0])) for *_, where in found})
    return tuple(f"[{host}]:{port}" if is_6 else f"{host}:{port}" for is_6, host in hosts)


class Names:
    """Remembers the numeric addresses of names.

    `find` never waits. It returns the last good answer, and lets a thread ask again, for each name
    at most once in `min_interval` seconds.
    """

    def __init__(self, min_interval: float, secret: str | None):
        self._min_interval = min_interval
        self._secret = secret
        self._answers: dict[str, tuple[str, ...]] = {}  # address -> the same in numbers
        # address -> when the last answer came; infinite while a thread asks
        self._answered_at: dict[str, float] = {}

    def find(self, address: str, peer_is_silent: bool = False) -> str | None:
        """Returns the numeric address to connect to; None if it is forbidden or not known yet.

        If `peer_is_silent` and its name has several addresses, later calls return another one.
        """
        if not may_connect(address, self._secret):
            return None
        if read_numeric(address) is not None:
            return address
        age = time.monotonic() - self._answered_at.get(address, -math.inf)
        if age > self._min_interval:
            self._answered_at[address] = math.inf  # nobody else asks meanwhile
            # After a longer pause the peer's silence says nothing about the number in use.
            takes_next = peer_is_silent and age < 2 * self._min_interval
            arguments = address, takes_next
            threading.Thread(target=self._ask, args=arguments, daemon=True).start()
        return self._answers.get(address, (None,))[0]

    def _ask(self, address: str, takes_next: bool) -> None:
        """Asks for the numeric addresses of a name; the first one stays unless `takes_next`."""
        with contextlib.suppress(OSError, UnicodeError):
            found = find_numbers(address)
            in_use = self._answers.get(address, found)[0]
            first = (found.index(in_use) + takes_next) % len(found) if in_use in found else 0
            self._answers[address] = found[first:] + found[:first]
        self._answered_at[address] = time.monotonic()
