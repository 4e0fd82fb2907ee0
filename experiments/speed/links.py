"""Hosts on one machine: network namespaces, joined by links that `tc` limits. Linux, as root.

Everything that is made is named `gxs` and the number of the process that made it, and is taken away
when the context ends; what a killed process has left, the next one takes away.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from gossipjax.supervisor import handling

INTERFACE = "e0"  # inside a namespace
QUEUE_SECONDS = 0.05  # what would wait longer is dropped
BURST_SECONDS, LEAST_BURST = 0.01, 66_000  # bytes: a packet that the kernel has not cut up yet
OURS = re.compile(r"gxs(\d+)[bhn]\d*")

# What tc reads as a rate (tc(8)): bits, or bytes for ...bps, in powers of 1000 or 1024.
_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:([kmgt]i?)?(bit|bps))?", re.IGNORECASE)


class Place(NamedTuple):
    """Where a host runs: its address, and the namespace, if it has one."""

    address: str
    namespace: str | None

    @property
    def prefix(self) -> list[str]:
        """What goes before a command that shall run there."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


def bits_per_second(rate: str) -> int:
    """A bandwidth as `tc` reads it.

    Raises:
      ValueError: if `tc` does not.

    >>> bits_per_second("200mbit"), bits_per_second("25mbps"), bits_per_second("8kibit")
    (200000000, 200000000, 8192)
    """
    match = _RATE.fullmatch(rate.strip())
    if match is None:
        raise ValueError(
            f"--bandwidth takes no {rate!r}: it is a rate as tc reads it, a number and bit, kbit, "
            "mbit, gbit or tbit (bits per second), or bps, kbps, mbps, ... (bytes per second), as "
            "in 200mbit."
        )
    number, scale, unit = match[1], (match[2] or "").lower(), (match[3] or "bit").lower()
    base = 1024 if scale.endswith("i") else 1000
    power = " kmgt".index(scale[0]) if scale else 0
    bits = int(float(number) * base**power * (8 if unit == "bps" else 1))
    if bits < 8000:
        raise ValueError(f"--bandwidth is at least 8kbit; given {rate!r}, {bits} bits per second.")
    return bits


def require_tools() -> None:
    """Raises `ValueError` where links cannot be limited: says what is missing."""
    missing = [f"the program {name}" for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root (this is another user)")
    if missing:
        raise ValueError(
            f"--bandwidth needs network namespaces and tc. Missing: {', '.join(missing)}. Run it "
            "as root (ip and tc are in the package iproute2), or leave --bandwidth out: then the "
            "hosts are joined by the machine's own loopback, without limits."
        )


@contextlib.contextmanager
def network(hosts: int, rate: int | None) -> Iterator[list[Place]]:
    """So many hosts, joined by full-duplex links of `rate` bits per second; None: no limits.

    With a rate each is a network namespace, joined by a bridge that only they are on.

    Raises:
      OSError: if the kernel refuses; what was made until then is taken away.
    """
    if rate is None:
        yield [Place("127.0.0.1", None)] * hosts
        return
    remove_leftovers()
    mine = f"gxs{os.getpid()}"
    places = [Place(f"10.77.{i // 250}.{i % 250 + 1}", f"{mine}n{i}") for i in range(hosts)]
    try:
        _run("ip", "link", "add", f"{mine}b", "type", "bridge")
        _run("ip", "link", "set", f"{mine}b", "up")
        for i, place in enumerate(places):
            _add_host(place, f"{mine}h{i}", f"{mine}b", rate)
        yield places
    finally:
        with uninterrupted():
            remove(os.getpid())


def _add_host(place: Place, outside: str, bridge: str, rate: int) -> None:
    name = str(place.namespace)
    # Gloo listens on the address that the machine's own name resolves to.
    folder = Path("/etc/netns") / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{place.address} {socket.gethostname()}\n")
    burst = max(LEAST_BURST, int(rate / 8 * BURST_SECONDS))
    limit = burst + int(rate / 8 * QUEUE_SECONDS)
    limited = f"root tbf rate {rate}bit burst {burst}b limit {limit}b".split()
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
    _run("ip", "link", "set", outside, "master", bridge, "up")
    _run("ip", "-n", name, "addr", "add", f"{place.address}/16", "dev", INTERFACE)
    _run("ip", "-n", name, "link", "set", INTERFACE, "up")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limited)  # what it sends
    _run("tc", "qdisc", "add", "dev", outside, *limited)  # what it receives


def _run(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {found.stderr.strip()}")
    return found.stdout


def made() -> dict[int, list[str]]:
    """The names of all that is there of ours, by the process that made it."""
    folder = Path("/etc/netns")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names |= set(re.findall(r"^\S+", _run("ip", "netns", "list"), re.MULTILINE))
    names |= set(re.findall(r"^\d+: ([^:@]+)", _run("ip", "-o", "link"), re.MULTILINE))
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        if match := OURS.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def remove(process: int) -> None:
    """Takes away what this process has made: namespaces, what runs in them, links, files."""
    for name in made().get(process, []):
        if "n" in name:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for number in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        else:  # the links of a namespace may have gone with it
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def remove_leftovers() -> None:
    """Takes away what processes have left that are no more."""
    for process in made():
        if not Path(f"/proc/{process}").exists():
            remove(process)


def uninterrupted() -> contextlib.AbstractContextManager[None]:
    """Holds Ctrl-C and SIGTERM off while there is something to clean up."""
    return handling((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN)


def terminable() -> contextlib.AbstractContextManager[None]:
    """Makes SIGTERM and a closed terminal an exception, so that what is open is cleaned up."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    return handling((signal.SIGTERM, signal.SIGHUP), stop)
