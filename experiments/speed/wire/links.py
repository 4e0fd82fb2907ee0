"""Hosts on one machine: network namespaces joined by links that `tc` limits. Linux, as root.

The names of namespaces and links begin with `gxs` and the number of the process that made them. The
context removes them at its end; what a killed process has left, the next one removes.
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

import gossipjax as gx
from experiments.quantities import BANDWIDTH, parse
from experiments.runner import ignore_stop_signals

INTERFACE = "e0"  # inside a namespace
QUEUE_SECONDS = 0.05  # packets that would wait longer are dropped
BURST_SECONDS = 0.01
MIN_BURST_BYTES = 66_000  # a packet that the kernel has not cut up yet
HOST_FILES = Path("/etc/netns")  # a folder per namespace, with files for /etc
CREATED_NAME = re.compile(r"gxs(\d+)[bhn]\d*")
RATE = BANDWIDTH._replace(low=1000.0)  # 8 kbit/s: tc sends a packet now and then at least


class Host(NamedTuple):
    """A host: its address, and its network namespace; None on the machine's loopback."""

    address: str
    namespace: str | None

    @property
    def prefix(self) -> list[str]:
        """Words that run a command on this host when they stand before it."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


def parse_rate(rate: str) -> int:
    """Bits per second of a bandwidth.

    >>> parse_rate("200mbit"), parse_rate("25MB/s")
    (200000000, 200000000)
    """
    return round(8 * parse(RATE, rate, "--bandwidth"))


def require_tools() -> None:
    """Raises `ValueError` where links cannot be limited, with what is missing."""
    missing = [f"the program {name}" for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0:
        missing.insert(0, "root (this is another user)")
    if missing:
        raise ValueError(
            f"--bandwidth needs network namespaces and tc. Missing: {', '.join(missing)}. Run it "
            "as root (ip and tc are in the package iproute2), or leave --bandwidth out: then the "
            "hosts are joined by the machine's loopback, without limits."
        )


@contextlib.contextmanager
def make_network(hosts: int, bits_per_second: int | None) -> Iterator[list[Host]]:
    """Joins `hosts` hosts by full-duplex links of `bits_per_second`; None means no limits.

    With a limit each host is a network namespace, on a bridge that joins only these.
    """
    if bits_per_second is None:
        yield [Host("127.0.0.1", None)] * hosts
        return
    remove_leftovers()
    name = f"gxs{os.getpid()}"
    members = [Host(f"10.77.{i // 250}.{i % 250 + 1}", f"{name}n{i}") for i in range(hosts)]
    try:
        run_command("ip", "link", "add", f"{name}b", "type", "bridge")
        run_command("ip", "link", "set", f"{name}b", "up")
        for i, host in enumerate(members):
            _add_host(host, f"{name}h{i}", f"{name}b", bits_per_second)
        yield members
    finally:
        with ignore_stop_signals():
            remove_created(os.getpid())


def _add_host(host: Host, outside: str, bridge: str, bits_per_second: int) -> None:
    name = str(host.namespace)
    # Gloo listens on the address to which the machine's name resolves.
    folder = HOST_FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
    peer = ["peer", "name", INTERFACE, "netns", name]
    run_command("ip", "netns", "add", name)
    run_command("ip", "link", "add", outside, "type", "veth", *peer)
    run_command("ip", "link", "set", outside, "master", bridge, "up")
    run_command("ip", "-n", name, "addr", "add", f"{host.address}/16", "dev", INTERFACE)
    run_command("ip", "-n", name, "link", "set", INTERFACE, "up")
    run_command("ip", "-n", name, "link", "set", "lo", "up")
    burst = max(MIN_BURST_BYTES, int(bits_per_second / 8 * BURST_SECONDS))
    limit = burst + int(bits_per_second / 8 * QUEUE_SECONDS)
    shaping = f"root tbf rate {bits_per_second}bit burst {burst}b limit {limit}b".split()
    run_command("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *shaping)  # what it sends
    run_command("tc", "qdisc", "add", "dev", outside, *shaping)  # what it receives


def run_command(*command: str) -> str:
    """Runs a command; returns its output, or raises `OSError` with its error output."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def list_created() -> dict[int, list[str]]:
    """Names of the namespaces, links and folders that exist, by the process that made them."""
    names = {path.name for path in HOST_FILES.iterdir()} if HOST_FILES.is_dir() else set()
    names |= set(re.findall(r"^\S+", run_command("ip", "netns", "list"), re.MULTILINE))
    names |= set(re.findall(r"^\d+: ([^:@]+)", run_command("ip", "-o", "link"), re.MULTILINE))
    created: dict[int, list[str]] = {}
    for name in sorted(names):
        if match := CREATED_NAME.fullmatch(name):
            created.setdefault(int(match[1]), []).append(name)
    return created


def remove_created(process: int) -> None:
    """Removes what this process has made: namespaces, their processes, links and folders."""
    for name in list_created().get(process, []):
        if "n" in name:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for member in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(HOST_FILES / name, ignore_errors=True)
        else:  # the links of a namespace may be gone with it
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def remove_leftovers() -> None:
    """Removes what processes have left that no longer exist."""
    for process in list_created():
        if not Path(f"/proc/{process}").exists():
            remove_created(process)


def exit_on_stop_signals() -> contextlib.AbstractContextManager[None]:
    """Turns SIGTERM and a closed terminal into an exception, so that contexts clean up."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        sys.exit(128 + signal_number)

    return gx.launch.signal_handlers((signal.SIGTERM, signal.SIGHUP), stop)
