"""Starts the processes of a job on this machine, watches, stops and restarts them.

Processes that need each other are one group. If a process of a group fails, the whole group is
stopped and starts again. In an asynchronous job, each node is a group of one process. If a node
fails, it starts again while other nodes go on. A coroutine runs each group.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from gossipjax.launch._process_info import ADDRESSES, PLACE
from gossipjax.launch._progress import PROGRESS
from gossipjax.launch._signals import describe_signal
from gossipjax.launch._stall import (
    BAD_USAGE,
    STACK_SECONDS,
    StallLimits,
    Watch,
    ask_for_stacks,
    find_stall,
)
from gossipjax.launch._worker import DRAIN_SECONDS, LOOK_SECONDS, STDERR, STDOUT, Worker, log

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_GRACE_AFTER_FAILURE = 5.0  # seconds: without the failed process the others cannot save
MIN_DELAY_SECONDS = 0.1  # before the second restart of a series, also if the first came at once
MAX_DELAY_SECONDS = 30.0  # between two restarts
STABLE_SECONDS = 600.0  # after which a failure is not one of a series

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
    delay the group is started again, unless the status was 2 (bad usage) or a signal stopped the
    job. A process that is stuck counts as failed, with status `STALL_STATUS`.
    """
    with (
        contextlib.ExitStack() as ports,
        tempfile.TemporaryDirectory(prefix="gossipjax-") as folder,
    ):
        watch = None
        if options.stall is not None:
            watch = Watch(StallLimits(options.stall, options.stall_slow), Path(folder))
        return asyncio.run(_Supervisor(options, ports, watch).run())


def _make_environment(
    options: Namespace, job: str, secret: str, addresses: Sequence[str], rank: int, restarts: int
) -> dict[str, str]:
    """Makes a process's environment: the launcher's, with defaults and fixed values.

    `addresses`: where each asynchronous node listens, or where process 0 does.
    """
    # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the devices
    # that wait in a collective would leave no thread for the computations of others.
    num_threads = max(2 * options.local_devices, (os.cpu_count() or 1) // options.processes)
    defaults = {
        "NPROC": str(num_threads),
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": "lo",  # else it listens at this machine's address in the network
        **(MALLOC_ENVIRONMENT if options.keep_memory else {}),
    }
    lockstep = {
        "GOSSIPJAX_COORDINATOR_ADDRESS": addresses[0],
        "GOSSIPJAX_NUM_PROCESSES": str(options.processes),
        "GOSSIPJAX_PROCESS_ID": str(rank),
    }
    required = {
        "JAX_NUM_CPU_DEVICES": str(options.local_devices),
        "GOSSIPJAX_RESTART": str(restarts),
        "GOSSIPJAX_JOB": job,
        PROGRESS: "",  # not that of a job in which the launcher runs
        **options.gpu_variables[rank],
    }
    if not options.asynchronous:
        return {**defaults, **os.environ, **required, **lockstep}
    # The nodes do not take part in a job in lockstep in which the launcher may run.
    inherited = {name: value for name, value in os.environ.items() if name not in lockstep}
    places = {PLACE: str(rank), ADDRESSES: ",".join(addresses)}
    return {**defaults, "GOSSIPJAX_SECRET": secret, **inherited, **required, **places}


def next_delay(former: float | None, first: float, ran_seconds: float) -> float:
    """Returns the seconds before a restart, from those before the former restart, if any."""
    if former is None or ran_seconds >= STABLE_SECONDS:
        return first
    return max(first, min(max(2 * former, MIN_DELAY_SECONDS), MAX_DELAY_SECONDS))


class _Group:
    """Processes that are started and stopped together."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks
        self.restarts = 0
        self.workers: dict[int, Worker] = {}  # of the newest attempt
        self.failed: int | None = None  # the rank of the process that failed first in it
        self.status = 0  # of this process, as a shell reports it

    def send_signal(self, number: int) -> None:
        for worker in self.workers.values():
            worker.send_signal(number)

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM now, and SIGKILL after the time of grace."""
        self.send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for worker in self.workers.values():  # not those of the next attempt
            loop.call_later(grace_seconds, worker.send_signal, signal.SIGKILL)


class _Supervisor:
    """Runs the groups of a job."""

    def __init__(self, options: Namespace, ports: contextlib.ExitStack, watch: Watch | None):
        self._options = options
        self._ports = ports
        self._watch = watch
        self._job = uuid.uuid4().hex
        self._secret = secrets.token_hex()
        self._status = 0
        self._stop_signal: int | None = None
        self._stopping = asyncio.Event()
        self._is_each: bool = options.asynchronous  # whether each process is a group by itself
        ranks = range(options.processes)
        divided = [[rank] for rank in ranks] if self._is_each else [ranks]
        self._groups = [_Group(part) for part in divided]
        # All nodes of an asynchronous job keep their addresses.
        self._addresses = [self._reserve_address() for _ in ranks] if self._is_each else []

    async def run(self) -> int:
        """Runs all groups and passes their output on; returns the status of the job."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup`
                loop.add_signal_handler(number, self._stop, number)
        for stream in (STDOUT, STDERR):
            stream.on_closed = lambda: loop.call_soon_threadsafe(self._on_closed)
        looking = asyncio.create_task(self._look())
        try:
            await asyncio.gather(*map(self._run_group, self._groups))
        finally:
            looking.cancel()
            for group in self._groups:
                group.send_signal(signal.SIGKILL)
            deadline = math.inf  # a reader may pause, but not keep a signal back
            while not (STDOUT.is_written() and STDERR.is_written()) and time.monotonic() < deadline:
                if self._stop_signal is not None:
                    deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
                await asyncio.sleep(LOOK_SECONDS)
        return self._status if self._stop_signal is None else 128 + self._stop_signal

    async def _run_group(self, group: _Group) -> None:
        """Starts a group until it succeeds, or must not be started again."""
        delay = None
        most = self._options.max_restarts
        while self._stop_signal is None:
            start_time = time.monotonic()
            await self._run_attempt(group)
            if group.failed is None or self._stop_signal is not None:
                return
            name = f"rank {group.failed}: " if self._is_each else ""
            if group.status == BAD_USAGE or group.restarts == most:
                self._status = self._status or group.status
                if group.restarts < most:
                    log(f"{name}the program would fail again, so it is not started again")
                return
            ran_seconds = time.monotonic() - start_time
            delay = next_delay(delay, self._options.restart_delay, ran_seconds)
            group.restarts += 1
            size = "" if self._is_each else f", with {len(group.ranks)} processes,"
            log(f"{name}restart {group.restarts} of {most}{size} in {delay:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_attempt(self, group: _Group) -> None:
        """Runs the processes of a group once."""
        group.failed = None
        group.workers = {}
        addresses = self._addresses
        if not self._is_each:
            self._ports.close()  # that of the attempt before
            addresses = [self._reserve_address()]
        for rank in group.ranks:
            environment = _make_environment(
                self._options, self._job, self._secret, addresses, rank, group.restarts
            )
            if self._watch is not None:
                environment |= self._watch.add(rank)
            group.workers[rank] = Worker(rank, self._options.command, environment)
        await asyncio.gather(*(self._follow(group, worker) for worker in group.workers.values()))

    async def _follow(self, group: _Group, worker: Worker) -> None:
        """Waits for a process. The first failure stops the other processes of its group."""
        code = await worker.wait()
        if self._watch is not None:
            self._watch.forget(worker.rank, group.ranks)
        if code != 0 and group.failed is None and self._stop_signal is None:
            follows = "the others go on" if self._is_each else "stopping the others"
            log(worker.describe_failure(code, follows))
            self._fail(group, worker.rank, code if code > 0 else 128 - code)

    def _fail(self, group: _Group, rank: int, status: int) -> None:
        group.failed = rank
        group.status = status
        group.terminate(min(self._options.grace, MAX_GRACE_AFTER_FAILURE))

    async def _look(self) -> None:
        """Kills processes that are stuck, which stops their group."""
        while (watch := self._watch) is not None:
            await asyncio.sleep(watch.interval)
            processes = watch.look()
            for group in self._groups:
                watched = [process for process in processes if process.rank in group.ranks]
                is_ending = group.failed is not None or self._stop_signal is not None
                verdict = None if is_ending else find_stall(watched, watch.limits)
                if verdict is None:
                    continue
                follows = "the others go on" if self._is_each else "stopping the job"
                log(watch.describe(watched, verdict, follows))
                ask_for_stacks(watched, {w.rank: w.process_id for w in group.workers.values()})
                group.failed = min(verdict.ranks, default=group.ranks[0])
                await asyncio.sleep(STACK_SECONDS)
                for rank in verdict.ranks:
                    group.workers[rank].send_signal(signal.SIGKILL)
                self._fail(group, group.failed, watch.find_status())

    def _on_closed(self) -> None:
        """Stops the job when nobody reads its output, which each line of output reports."""
        if self._stop_signal is None:
            self._stop(signal.SIGPIPE)

    def _stop(self, number: int) -> None:
        """Stops the job. The second signal does not wait."""
        if self._stop_signal is not None:
            for group in self._groups:
                group.send_signal(signal.SIGKILL)
            return
        self._stop_signal = number
        self._stopping.set()
        for group in self._groups:
            group.terminate(self._options.grace)
        log(f"{describe_signal(number)}: the processes have {self._options.grace:g} s to exit")

    def _reserve_address(self) -> str:
        """Returns a loopback address for one process, with a port that no other process gets."""
        holder = self._ports.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere two sockets cannot share it
            holder.close()
        return f"127.0.0.1:{port}"
