"""A router between network namespaces that is slow, far away, and loses packets. Linux, as root.

Kernels without `netem` cannot delay or lose packets, so they pass through this process: each
namespace has a TUN device whose other end is here.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import threading
import time
from collections.abc import Iterator

from experiments.program import FatalError
from experiments.speed.wire.links import (
    INTERFACE,
    Host,
    ignore_stop_signals,
    remove_created,
    remove_leftovers,
    run_command,
)

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN = 1
IFF_NO_PI = 0x1000
MAX_PACKET = 65_536
DESTINATION = slice(16, 20)  # in a packet of IPv4
POLL_SECONDS = 0.002


class Router:
    """Passes packets between hosts, in a thread.

    Attributes:
      bytes_per_second: that a host sends, and that it receives, at most.
      delay: seconds, one way.
      loss: the part of the packets that is lost.
      queue_seconds: packets that would wait longer are lost.
      cut: pairs of hosts, by number, between which nothing passes.
      passed: bytes that have arrived.
    """

    def __init__(
        self,
        devices: list[int],
        bytes_per_second: float,
        delay: float,
        loss: float,
        seed: int,
        queue_seconds: float = 0.5,
    ):
        self.bytes_per_second = bytes_per_second
        self.delay = delay
        self.loss = loss
        self.queue_seconds = queue_seconds
        self.cut: set[frozenset[int]] = set()
        self.passed = 0
        self._devices = devices
        self._rng = random.Random(seed)
        self._free = {"up": [0.0] * len(devices), "down": [0.0] * len(devices)}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self._thread.join()

    def _run(self) -> None:
        poller = select.poll()
        for device in self._devices:
            poller.register(device, select.POLLIN)
        numbers = {device: number for number, device in enumerate(self._devices)}
        while not self._is_closed:
            now = time.monotonic()
            wait = self._waiting[0][0] - now if self._waiting else POLL_SECONDS
            for device, _ in poller.poll(1000 * max(0.0, min(wait, POLL_SECONDS))):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._take(numbers[device], os.read(device, MAX_PACKET))
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                *_, receiver, packet = heapq.heappop(self._waiting)
                with contextlib.suppress(OSError):
                    self.passed += os.write(self._devices[receiver], packet)

    def _take(self, sender: int, packet: bytes) -> None:
        """Has a packet wait for its time, or loses it."""
        if len(packet) < DESTINATION.stop or packet[0] >> 4 != 4:
            return
        receiver = packet[DESTINATION][3] - 1
        is_cut = frozenset((sender, receiver)) in self.cut
        is_lost = self._rng.random() < self.loss
        if not 0 <= receiver < len(self._devices) or receiver == sender or is_cut or is_lost:
            return
        due = time.monotonic()
        for direction, host in (("up", sender), ("down", receiver)):
            free = self._free[direction]
            start = max(due, free[host])
            if start - due > self.queue_seconds:
                return
            due = free[host] = start + len(packet) / self.bytes_per_second
        self._count += 1
        entry = (due + self.delay, self._count, receiver, packet)
        heapq.heappush(self._waiting, entry)


def list_missing() -> list[str]:
    """What a far network needs and is not here."""
    needed = {
        "root (this is another user)": os.geteuid() == 0,
        "the program ip": shutil.which("ip") is not None,
        f"the device {TUN}": os.path.exists(TUN),
    }
    return [name for name, is_here in needed.items() if not is_here]


def require_tools() -> None:
    """Raises `FatalError` where no far network can be made, with what is missing."""
    if missing := list_missing():
        raise FatalError(
            f"nodes that are far need network namespaces and TUN devices. Missing: "
            f"{', '.join(missing)}. Run it as root (ip is in the package iproute2)."
        )


@contextlib.contextmanager
def make_far_network(
    hosts: int, bytes_per_second: float, delay: float, loss: float, seed: int
) -> Iterator[tuple[Router, list[Host]]]:
    """Hosts, each a network namespace, and the router between them.

    Raises:
      OSError: if the kernel refuses; what was made until then is removed.
    """
    remove_leftovers()
    name = f"gxs{os.getpid()}"
    devices: list[int] = []
    members: list[Host] = []
    router = None
    try:
        for number in range(hosts):
            host = Host(f"10.78.0.{number + 1}", f"{name}n{number}")
            run_command("ip", "netns", "add", str(host.namespace))
            devices.append(_open_device(f"{name}h{number}"))
            members.append(host)
            _move_device(f"{name}h{number}", host)
        router = Router(devices, bytes_per_second, delay, loss, seed)
        yield router, members
    finally:
        if router is not None:
            router.close()
        for device in devices:
            os.close(device)
        with ignore_stop_signals():
            remove_created(os.getpid())


def _open_device(name: str) -> int:
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _move_device(name: str, host: Host) -> None:
    """Puts a device into the namespace of a host; its other end stays here."""
    namespace = str(host.namespace)
    run_command("ip", "link", "set", name, "netns", namespace)
    run_command("ip", "-n", namespace, "link", "set", name, "name", INTERFACE)
    run_command("ip", "-n", namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    run_command("ip", "-n", namespace, "link", "set", INTERFACE, "mtu", "1400", "up")
    run_command("ip", "-n", namespace, "link", "set", "lo", "up")
