"""Starts the processes of a job on this machine, watches, stops and restarts them.

Processes that need each other are one group. If a process of a group fails, the whole group is
stopped and starts again. In an asynchronous job, each node is a group of one process. If a node
fails, it starts again while other nodes go on. A coroutine runs each group.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from gossipjax.launch._environment import JobSpec, make_environment
from gossipjax.launch._signals import describe_signal
from gossipjax.launch._stall import BAD_USAGE, STACK_SECONDS, Watch, find_stall, watching
from gossipjax.launch._worker import DRAIN_SECONDS, LOOK_SECONDS, STDERR, STDOUT, Worker, log

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_GRACE_AFTER_FAILURE = 5.0  # seconds: without the failed process the others cannot save
MIN_DELAY_SECONDS = 0.1  # before the second restart of a series, also if the first came at once
MAX_DELAY_SECONDS = 30.0  # between two restarts
STABLE_SECONDS = 600.0  # after which a failure is not one of a series


class StartError(Exception):
    """A process of the job cannot be started, for example because memory is short."""


class Failure(NamedTuple):
    """The first failure of an attempt."""

    rank: int
    code: int  # exit status, or minus the number of the signal that ended the process

    @property
    def status(self) -> int:
        """The exit status as a shell reports it; after a signal it is 128 + its number."""
        return self.code if self.code >= 0 else 128 - self.code


class Backoff:
    """The delays before restarts: each is twice the previous, but at most `MAX_DELAY_SECONDS`.

    After an attempt that ran for `STABLE_SECONDS`, the next delay is `first_seconds` again.
    """

    def __init__(self, first_seconds: float):
        self._first_seconds = first_seconds
        self._next_seconds = first_seconds

    def next_delay(self, ran_seconds: float) -> float:
        """Returns the seconds to wait after an attempt that failed after `ran_seconds`."""
        if ran_seconds >= STABLE_SECONDS:
            self._next_seconds = self._first_seconds
        delay = self._next_seconds
        doubled = min(max(2 * delay, MIN_DELAY_SECONDS), MAX_DELAY_SECONDS)
        self._next_seconds = max(self._first_seconds, doubled)
        return delay


class _Group:
    """Processes that are started and stopped together: those of the newest attempt, by rank."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks
        self.restarts = 0
        self.workers: dict[int, Worker] = {}
        self.failure: Failure | None = None

    def send_signal(self, number: int) -> None:
        for worker in self.workers.values():
            worker.send_signal(number)

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM now, and SIGKILL after the time of grace."""
        self.send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for worker in self.workers.values():  # not those of the next attempt
            loop.call_later(grace_seconds, worker.send_signal, signal.SIGKILL)


def supervise(job: JobSpec) -> int:
    """Runs a job to its end, with restarts; returns its status. Call it on the main thread.

    If a process fails, the other processes of its group get SIGTERM, and later SIGKILL. After a
    delay the group is started again, unless the status was 2 (bad usage), the program cannot start,
    or a signal stopped the job. A process that is stuck counts as failed, with status
    `STALL_STATUS`.
    """
    with contextlib.ExitStack() as ports, watching(job.stall) as watch:
        return asyncio.run(_Supervisor(job, ports, watch).run())


class _Supervisor:
    """Runs the groups of a job."""

    def __init__(self, job: JobSpec, ports: contextlib.ExitStack, watch: Watch | None):
        self._job = job
        self._ports = ports
        self._watch = watch
        self._job_id = uuid.uuid4().hex
        self._secret = secrets.token_hex()
        self._status = 0
        self._stop_signal: int | None = None
        self._stopping = asyncio.Event()
        ranks = range(job.num_processes)
        divided = [[rank] for rank in ranks] if job.asynchronous else [ranks]
        self._groups = [_Group(part) for part in divided]
        # All nodes of an asynchronous job keep their addresses.
        self._addresses = [self._reserve_address() for _ in ranks] if job.asynchronous else []

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
            await self._write_all()
        return self._status if self._stop_signal is None else 128 + self._stop_signal

    async def _write_all(self) -> None:
        """Waits for the reader of the output; only shortly after a signal."""
        deadline = math.inf
        while not (STDOUT.is_written() and STDERR.is_written()):
            if self._stop_signal is not None:
                deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _run_group(self, group: _Group) -> None:
        backoff = Backoff(self._job.delay_seconds)
        while self._stop_signal is None:
            start_time = time.monotonic()
            await self._run_attempt(group)
            if group.failure is None or self._stop_signal is not None:
                return
            if not self._may_restart(group, group.failure):
                self._status = self._status or group.failure.status
                return
            delay = backoff.next_delay(time.monotonic() - start_time)
            group.restarts += 1
            start, size = f"rank {group.failure.rank}: ", ""
            if not self._job.asynchronous:
                start, size = "", f", with {len(group.ranks)} processes,"
            log(f"{start}restart {group.restarts} of {self._job.max_restarts}{size} in {delay:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    def _may_restart(self, group: _Group, failure: Failure) -> bool:
        # After a restart the program is known to start. A failing import may be the machine's then:
        # of a file system that is not back yet, for example.
        worker = group.workers[failure.rank]
        cannot_start = group.restarts == 0 and worker.cannot_start(failure.code)
        is_left = group.restarts < self._job.max_restarts
        if failure.status != BAD_USAGE and not cannot_start:
            return is_left
        if is_left:
            start = f"rank {failure.rank}: " if self._job.asynchronous else ""
            log(f"{start}the program would fail again, so it is not started again")
        return False

    async def _run_attempt(self, group: _Group) -> None:
        """Runs the processes of a group once."""
        group.failure = None
        group.workers = {}
        addresses = self._addresses
        if not self._job.asynchronous:
            self._ports.close()  # that of the attempt before
            addresses = [self._reserve_address()]
        for rank in group.ranks:
            environment = make_environment(
                self._job, self._job_id, self._secret, addresses, rank, group.restarts
            )
            if self._watch is not None:
                environment |= self._watch.add(rank)
            try:
                worker = Worker(rank, self._job.command, environment)
            except OSError as error:
                raise StartError(f"cannot start rank {rank}: {error}") from error
            group.workers[rank] = worker
            if self._watch is not None:
                self._watch.follow(rank, worker.process_id)
        followed = (self._follow(group, worker) for worker in group.workers.values())
        await asyncio.gather(*followed)

    async def _follow(self, group: _Group, worker: Worker) -> None:
        """Waits for a process. The first failure stops the other processes of its group."""
        code = await worker.wait()
        if self._watch is not None:
            self._watch.forget(worker.rank)
        if code != 0 and group.failure is None and self._stop_signal is None:
            group.failure = Failure(worker.rank, code)
            log(worker.describe_failure(code, self._say_what_follows("stopping the others")))
            group.terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))

    def _say_what_follows(self, in_lockstep: str) -> str:
        return "the others go on" if self._job.asynchronous else in_lockstep

    async def _look(self) -> None:
        """Kills processes that are stuck, which stops their group."""
        while (watch := self._watch) is not None:
            await asyncio.sleep(max(0.0, watch.next_look - time.monotonic()))
            processes = watch.look()
            for group in self._groups:
                watched = [process for process in processes if process.rank in group.ranks]
                is_ending = group.failure is not None or self._stop_signal is not None
                verdict = None if is_ending else find_stall(watched, watch.limits)
                if verdict is None:
                    continue
                rank = min(verdict.ranks, default=group.ranks[0])
                group.failure = Failure(rank, watch.find_status(verdict))
                follows = self._say_what_follows("stopping the job")
                log(watch.describe(watched, verdict, follows))
                watch.ask_for_stacks(watched)
                await asyncio.sleep(STACK_SECONDS)
                for rank in verdict.ranks:
                    group.workers[rank].send_signal(signal.SIGKILL)
                group.terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))

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
            group.terminate(self._job.grace_seconds)
        log(f"{describe_signal(number)}: the processes have {self._job.grace_seconds:g} s to exit")

    def _reserve_address(self) -> str:
        """Returns a loopback address for one process, with a port that no other process gets."""
        holder = self._ports.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere two sockets cannot share it
            holder.close()
        return f"127.0.0.1:{port}"
