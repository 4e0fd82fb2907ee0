"""The processes of a measurement: one per host, all started together, none left behind."""

import dataclasses
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

import gossipjax as gx
from experiments.program import ProgramError
from experiments.results import Record
from experiments.runner import Processes, read_tail
from experiments.speed.wire import links
from experiments.speed.wire.links import Host
from experiments.speed.wire.worker import Job

TAIL_LINES = 15  # of a failed host's output
MIN_THREADS = 2  # of a host
POLL_SECONDS = 0.05
COMMAND = (sys.executable, "-m", "experiments.speed.wire")
PORT = 5599  # of host 0 inside its namespace
PROCESS_BYTES = 700e6  # memory of a host: what JAX takes
MODEL_COPIES = 30  # memory of a host: models at once
STALL_TIMEOUT = 180.0  # seconds; covers a compilation on a slow machine
STALL_FACTOR = 10  # a step that takes longer than this times its bound hangs


class HostFailedError(ProgramError):
    """A host's process ended early or hangs; the message has its last lines."""


def require_memory(hosts: int, megabytes: float, way_out: str) -> None:
    """Raises `ValueError` if `hosts` hosts with models of this size need more than is free."""
    needed = hosts * (PROCESS_BYTES + MODEL_COPIES * megabytes * 1e6)
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    if match and needed > (available := 1024 * int(match[1])):
        raise ValueError(
            f"the models of {hosts} hosts must fit into {available / 1e9:.1f} GB of free memory, "
            f"got about {needed / 1e9:.4g} GB, with {megabytes:g} MB a model: {way_out}."
        )


def measure_on_hosts(
    kind: str,
    options: Any,
    hosts: int,
    bits_per_second: int | None,
    max_factor: float,
    report_progress: Callable[[str], None],
    collect: Callable[[list[list[Record]]], None],
) -> None:
    """Measures in one process per host, which are on links of this bandwidth.

    `options` has the `megabytes` of a model and the `compute_seconds` of a step, which takes up to
    `max_factor` times as long. `collect` is called with the records of the hosts, of each run that
    all have finished, at the end and also after a failure or Ctrl-C.
    """
    seconds = max_factor * options.compute_seconds
    if bits_per_second is not None:
        seconds += 2 * hosts * 8e6 * options.megabytes / bits_per_second
    stall_timeout = STALL_TIMEOUT + STALL_FACTOR * seconds
    network = links.make_network(hosts, bits_per_second)
    scratch = tempfile.TemporaryDirectory(prefix="gossipjax-speed-")
    with scratch as name, network as members:
        folder = Path(name)
        port = PORT
        if bits_per_second is None:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
        job = Job(
            kind=kind,
            options=dataclasses.asdict(options),
            coordinator_address=f"{members[0].address}:{port}",
            addresses=[host.address for host in members],
            secret=secrets.token_hex(),
            interface=links.INTERFACE if bits_per_second else None,
        )
        (folder / "job.json").write_text(json.dumps(job._asdict(), default=str))
        try:
            run_hosts(members, COMMAND, folder, stall_timeout, report_progress)
        finally:
            collect(read_records(folder, hosts))


def read_records(folder: Path, hosts: int) -> list[list[Record]]:
    """The records of the hosts, of each run that all have finished."""
    records: list[list[Record]] = []
    while True:
        paths = [folder / f"{len(records)}-{rank}.json" for rank in range(hosts)]
        if not all(path.exists() for path in paths):
            return records
        records.append([json.loads(path.read_text()) for path in paths])


def make_display(bar: Progress, total: int, title: str) -> Callable[[str], None]:
    """Returns what shows host 0's progress: a bar of `total` steps for each title in it."""
    tasks: dict[str, TaskID] = {}

    def show(progress: str) -> None:
        if progress.count("|") < 2:  # read while it is written
            return
        done, name, status = progress.split("|", 2)
        if name not in tasks:
            for task in tasks.values():
                bar.update(task, completed=total, status="measured")
            tasks[name] = bar.add_task(name or title, total=total, status="")
        bar.update(tasks[name], completed=float(done), status=status)

    return show


def run_hosts(
    hosts: Sequence[Host],
    command: Sequence[str],
    folder: Path,
    stall_timeout: float,
    report_progress: Callable[[str], None],
) -> None:
    """Runs `command FOLDER RANK` on every host; none of the processes outlives this call.

    A process writes its progress into `FOLDER/RANK.progress`, its output is `FOLDER/RANK.log`, and
    it ends when its standard input closes. `report_progress` gets host 0's progress.
    """
    threads = max(MIN_THREADS, (os.cpu_count() or MIN_THREADS) // len(hosts))
    environment = {
        **gx.launch.MALLOC_ENVIRONMENT,
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": str(threads),
    }
    environment.pop("XLA_FLAGS", None)
    with Processes(grace=0) as processes:
        started = [
            processes.start(
                [*host.prefix, *command, f"{folder}", f"{rank}"],
                folder / f"{rank}.log",
                environment,
                stdin=subprocess.PIPE,
            )
            for rank, host in enumerate(hosts)
        ]
        _watch(started, folder, stall_timeout, report_progress)


def _watch(
    processes: Sequence["subprocess.Popen[bytes]"],
    folder: Path,
    stall_timeout: float,
    report_progress: Callable[[str], None],
) -> None:
    """Waits until all processes have ended; raises `HostFailedError` as `run_hosts` does."""
    files = [folder / f"{rank}.progress" for rank in range(len(processes))]
    progress = [""] * len(processes)
    changed_at = time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            tails = [_read_tail(rank, f"ended with {code}", folder) for rank, code in failed]
            raise HostFailedError("\n".join(tails))
        if all(code == 0 for code in codes):
            return
        latest = [file.read_text() if file.exists() else "" for file in files]
        if latest != progress:
            if latest[0] != progress[0]:
                report_progress(latest[0])
            progress = latest
            changed_at = time.monotonic()
        elif time.monotonic() - changed_at > stall_timeout:
            modified = [file.stat().st_mtime if file.exists() else 0.0 for file in files]
            slowest = modified.index(min(modified))
            tail = _read_tail(slowest, f"silent for {stall_timeout:.0f} s", folder)
            listed = "; ".join(f"host {i}: {p or 'starting'}" for i, p in enumerate(progress))
            raise HostFailedError(f"the hosts hang ({listed}).\n{tail}")
        time.sleep(POLL_SECONDS)


def _read_tail(rank: int, reason: str, folder: Path) -> str:
    """The last lines of a host's output, below the reason why they are shown."""
    lines = [f"    {line}" for line in read_tail(folder / f"{rank}.log", TAIL_LINES)]
    return "\n".join([f"host {rank} {reason}; its last lines:", *lines])
