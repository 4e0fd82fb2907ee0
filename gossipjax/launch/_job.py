"""Starts the processes of a job on this machine, watches, stops and restarts them.

Processes that need each other are one group. If a process of a group fails, the whole group is
stopped and starts again. In an asynchronous job, each node is a group of one process. If a node
fails, it starts again while other nodes go on.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from gossipjax.launch._process_info import ADDRESSES, COORDINATORS, JAX, OURS, PLACE, SCHEDULERS
from gossipjax.launch._progress import PROGRESS
from gossipjax.launch._signals import FINAL, signal_handlers
from gossipjax.launch._stall import Watch, ask_for_stack, describe_stall, find_stall
from gossipjax.launch._worker import CLOSED, Worker, log

LOOK_SECONDS = 0.05  # between two looks at the processes
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_GRACE_AFTER_FAILURE = 5.0  # seconds: without the failed process the others cannot save
MAX_DELAY_SECONDS = 30.0  # between two restarts
STACK_SECONDS = 1.0  # time for processes to write their stacks, before they are ended
STALL_STATUS = 124  # counts as the exit status of a stuck process; `timeout` also exits with it
STABLE_SECONDS = 600.0  # a group that ran for so long starts again after the first delay

# For glibc: keep the memory that XLA frees, instead of fetching it from the kernel again, page by
# page, for the buffers of the next step. A step with 20 MB of parameters on CPU: 45 ms instead of
# 64. More than 1 GiB at the end of the heap goes back; no limit would make no step faster.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def supervise(options: Namespace) -> int:
    """Runs a job to its end, with restarts; returns its status. Call it on the main thread.

    If a process fails, the other processes of its group get SIGTERM, and later SIGKILL. After a
    delay the group is started again, unless the status is one of `FINAL` or a signal stopped the
    job. A process that is stuck counts as failed, with status `STALL_STATUS`.
    """
    with contextlib.ExitStack() as ports, tempfile.TemporaryDirectory("gossipjax") as folder:
        watch = None if options.stall is None else Watch(Path(folder))
        return _Supervisor(options, ports, watch).run()


def next_delay(former: float | None, first: float, ran_seconds: float) -> float:
    """Returns the seconds to wait before a restart: twice the `former` delay, within a limit.

    The delay is `first` before the first restart, and again after a run of `STABLE_SECONDS`.
    """
    if former is None or ran_seconds >= STABLE_SECONDS:
        return first
    return max(first, min(2 * former, MAX_DELAY_SECONDS))


class _Group:
    """Processes that are started and stopped together."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks
        self.restarts = 0
        self.delay: float | None = None  # before the newest restart, in seconds
        self.start_time = time.monotonic()  # of the newest attempt, or of the next one
        self.kill_time = math.inf  # when the time of grace ends
        self.workers: dict[int, Worker] = {}  # rank -> a process of this attempt that still runs
        self.failed: int | None = None  # the rank of the process that failed first in this attempt
        self.status = 0  # the exit status of that process, as a shell reports it
        self.is_over = False  # whether nothing of the group runs or will be started

    def send_signal(self, number: int) -> None:
        for worker in self.workers.values():
            worker.send_signal(number)

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM now, and SIGKILL after the time of grace."""
        self.send_signal(signal.SIGTERM if grace_seconds else signal.SIGKILL)
        self.kill_time = time.monotonic() + grace_seconds


class _Supervisor:
    """Runs the groups of a job."""

    def __init__(self, options: Namespace, ports: contextlib.ExitStack, watch: Watch | None):
        self._options = options
        self._ports = ports
        self._watch = watch
        self._job = uuid.uuid4().hex
        self._secret = secrets.token_hex()
        self._status = 0  # that of the group that failed first for good
        self._signals: list[int] = []  # signals that asked this process to stop the job
        self._is_asynchronous: bool = options.asynchronous
        ranks = range(options.processes)
        groups = [[rank] for rank in ranks] if options.asynchronous else [ranks]
        self._groups = [_Group(group) for group in groups]
        # Asynchronous nodes keep their addresses when they are started again. Other processes get a
        # new address of process 0 at each start.
        self._addresses = [self._reserve_address() for _ in ranks] if options.asynchronous else []

    def run(self) -> int:
        """Runs all groups and passes their output on; returns the status of the job."""
        with signal_handlers(STOP_SIGNALS, self._stop):
            try:
                while groups := [group for group in self._groups if not group.is_over]:
                    for group in groups:
                        self._advance(group)
                    if self._watch is not None and not self._signals:
                        self._find_stalls(self._watch, groups)
                    if CLOSED and not self._signals:  # nobody reads the output any more
                        self._stop(signal.SIGPIPE)
                    time.sleep(LOOK_SECONDS)
            finally:
                for group in self._groups:
                    group.send_signal(signal.SIGKILL)
        return 128 + self._signals[0] if self._signals else self._status

    def _stop(self, number: int, _: FrameType | None = None) -> None:
        """Stops the job. The second signal does not wait."""
        self._signals.append(number)
        is_second = len(self._signals) > 1
        for group in self._groups:
            group.terminate(0 if is_second else self._options.grace)
        if not is_second:
            name = signal.Signals(number).name
            log(f"{name}: the processes have {self._options.grace:g} s to exit")

    def _advance(self, group: _Group) -> None:
        """Starts or kills the processes of a group when it is time, and notes which have ended."""
        now = time.monotonic()
        if not group.workers:
            group.is_over = bool(self._signals)  # a job that was stopped starts nothing
            if group.is_over or now < group.start_time:
                return
            group.failed = None
            group.kill_time = math.inf
            if not self._is_asynchronous:
                self._ports.close()  # frees the port of the attempt before
                self._addresses = [self._reserve_address()]
            for rank in group.ranks:
                environment = self._make_environment(rank, group.restarts)
                group.workers[rank] = Worker(rank, self._options.command, environment)
            if self._signals:  # one came while the processes were started
                group.terminate(self._options.grace)
        if now >= group.kill_time:
            group.send_signal(signal.SIGKILL)
        for rank, worker in [*group.workers.items()]:
            code = worker.poll()
            if code is None:
                continue
            del group.workers[rank]
            if self._watch is not None:
                self._watch.forget(rank, group.ranks)
            if code != 0 and group.failed is None and not self._signals:
                follows = "the others go on" if self._is_asynchronous else "stopping the others"
                self._fail(group, rank, code if code > 0 else 128 - code)  # as in a shell
                log(worker.describe_failure(code, follows))
        if not group.workers:
            self._finish(group, now)

    def _finish(self, group: _Group, now: float) -> None:
        """Decides, when all processes of a group have ended, whether they are started again."""
        max_restarts = self._options.max_restarts
        name = f"rank {group.failed}: " if self._is_asynchronous else ""
        if group.failed is None or self._signals:
            group.is_over = True
        elif group.status in FINAL or group.restarts == max_restarts:
            group.is_over = True
            self._status = self._status or group.status
            if group.restarts < max_restarts:
                log(f"{name}the program would fail again, so it is not started again")
        else:
            ran_seconds = now - group.start_time
            group.delay = next_delay(group.delay, self._options.restart_delay, ran_seconds)
            group.start_time = now + group.delay
            group.restarts += 1
            log(f"{name}restart {group.restarts} of {max_restarts} in {group.delay:g} s")

    def _make_environment(self, rank: int, restarts: int) -> dict[str, str]:
        """Makes the environment of a process: defaults, then the launcher's, then fixed values."""
        options = self._options
        # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the
        # devices that wait in a collective would leave no thread for the computations of others.
        num_threads = max(2 * options.local_devices, (os.cpu_count() or 1) // options.processes)
        defaults = {
            "NPROC": str(num_threads),
            "PYTHONUNBUFFERED": "1",
            "NCCL_SOCKET_IFNAME": "lo",  # else it listens at this machine's address in the network
            **(MALLOC_ENVIRONMENT if options.keep_memory else {}),
        }
        # The launcher may itself run in a job, such as of Slurm. Its processes must not join that.
        others = {*COORDINATORS, *OURS, *JAX, *itertools.chain(*SCHEDULERS.values())}
        inherited = {name: value for name, value in os.environ.items() if name not in others}
        required = {
            "JAX_NUM_CPU_DEVICES": str(options.local_devices),
            "GOSSIPJAX_RESTART": str(restarts),
            "GOSSIPJAX_JOB": self._job,
            PROGRESS: "" if self._watch is None else self._watch.add(rank),
            **options.gpu_variables[rank],
        }
        if self._is_asynchronous:
            defaults["GOSSIPJAX_SECRET"] = self._secret
            required |= {PLACE: str(rank), ADDRESSES: ",".join(self._addresses)}
        else:
            values = (self._addresses[0], str(rank), str(options.processes))
            required |= zip((COORDINATORS[0], *OURS), values, strict=True)
        return {**defaults, **inherited, **required}

    def _fail(self, group: _Group, rank: int, status: int) -> None:
        """Notes that a process has failed, and stops the rest of its group."""
        group.failed = rank
        group.status = status
        group.terminate(min(self._options.grace, MAX_GRACE_AFTER_FAILURE))

    def _find_stalls(self, watch: Watch, groups: Sequence[_Group]) -> None:
        """Finds the groups that are stuck, and ends them.

        All processes of such a group write their stacks. Those that are stuck are then killed, and
        the others are stopped, so the group counts as failed.
        """
        processes = watch.look()
        limits = self._options.stall, self._options.stall_slow
        for group in groups:
            watched = [process for process in processes if process.rank in group.ranks]
            if group.failed is not None or not (found := find_stall(watched, *limits)):
                continue
            ranks, reason = found
            follows = "the others go on" if self._is_asynchronous else "stopping the job"
            log(describe_stall(watched, ranks, f"{reason}, {follows}"))
            for process in watched:
                ask_for_stack(process, group.workers[process.rank].process_id)
            time.sleep(STACK_SECONDS)
            for rank in ranks:
                group.workers[rank].send_signal(signal.SIGKILL)
            self._fail(group, min(ranks, default=group.ranks[0]), STALL_STATUS)

    def _reserve_address(self) -> str:
        """Returns a loopback address with a free port, which no other process is given."""
        holder = self._ports.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        # On Linux the holder stays open, and the process can still listen there by SO_REUSEADDR.
        if sys.platform != "linux":
            holder.close()
        return f"127.0.0.1:{port}"
