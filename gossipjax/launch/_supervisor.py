"""Starts the processes of a job on this machine, watches, stops and restarts them.

Processes that need each other are one group. If a process of a group fails, the whole group is
stopped and starts again. In an asynchronous job, each node is a group of one process. If a node
fails, it starts again while other nodes go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from gossipjax.launch._process_info import ADDRESSES, PLACE
from gossipjax.launch._progress import PROGRESS
from gossipjax.launch._reaper import STOP_SIGNALS, Reaper
from gossipjax.launch._stall import StallLimits, Watch, find_stall, watching
from gossipjax.launch._worker import (
    BAD_USAGE,
    DRAIN_SECONDS,
    GRACE,
    LOOK_SECONDS,
    STREAMS,
    Exited,
    OutputClosed,
    Signaled,
    Worker,
    describe_signal,
    log,
    signal_handlers,
)

MAX_GRACE_AFTER_FAILURE = 5.0  # seconds: without the failed process the others cannot save
MIN_DELAY_SECONDS = 0.1  # before the second restart of a series, also if the first came at once
MAX_DELAY_SECONDS = 30.0  # between two restarts
STABLE_SECONDS = 600.0  # after which a failure is not one of a series
MAX_WAIT_SECONDS = 0.5  # longest wait for an event without a look at signals

# For glibc: keep the memory that XLA frees, instead of fetching it from the kernel again, page by
# page, for the buffers of the next step. A step with 20 MB of parameters on CPU: 45 ms instead of
# 64. More than 1 GiB at the end of the heap goes back; no limit would make no step faster.
MALLOC_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}

Event = Exited | Signaled | OutputClosed


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A command, and the options of the launcher that say how to run it."""

    command: Sequence[str]
    num_processes: int
    local_devices: int  # devices of each process
    gpu_variables: Sequence[Mapping[str, str]]  # variables of each process, from `divide_gpus`
    grace_seconds: float  # from SIGTERM to SIGKILL
    keep_memory: bool  # whether processes have `MALLOC_ENVIRONMENT`
    stall: StallLimits | None  # None does not watch
    max_restarts: int  # restarts of the job, or of each asynchronous node
    delay_seconds: float  # before the first restart; see `Backoff`
    asynchronous: bool  # whether each process is a node that is started again without the others


class StartError(Exception):
    """A process of the job cannot be started, for example because memory is short."""


def supervise(job: JobSpec) -> int:
    """Run a job to its end, with restarts. Must be called on the main thread.

    If a process fails, the other processes of its group get SIGTERM, and later SIGKILL. After a
    delay the group is started again, unless the status was 2 (bad usage), the program cannot start,
    or a signal stopped the job. A process that is stuck counts as failed, with status
    `STALL_STATUS`.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with (
        _stop_signals(events),
        Reaper() as reaper,
        contextlib.ExitStack() as ports,
        watching(job.stall) as watch,
    ):
        return _Supervisor(job, events, reaper, ports, watch).run()


@contextlib.contextmanager
def _stop_signals(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """Turn signals into events while the context is open; at its end, wait for the output.

    Wait as long as the reader of the output pauses, unless a signal has stopped or now stops the
    job.
    """
    is_stopping = False

    def stop(number: int, _: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        events.put(Signaled(number))

    with signal_handlers(STOP_SIGNALS, stop):
        try:
            yield
        finally:
            deadline = math.inf
            while time.monotonic() < deadline and not all(s.is_written() for s in STREAMS):
                if is_stopping:
                    deadline = min(deadline, time.monotonic() + DRAIN_SECONDS)
                time.sleep(LOOK_SECONDS)


class Backoff:
    """The delays before restarts: each is twice the previous, but at most `MAX_DELAY_SECONDS`.

    After an attempt that ran for `STABLE_SECONDS`, the next delay is `first_seconds` again.
    """

    def __init__(self, first_seconds: float):
        self._first_seconds = first_seconds
        self._next_seconds = first_seconds

    def next_delay(self, ran_seconds: float) -> float:
        """Return the seconds to wait after an attempt that failed after `ran_seconds`."""
        if ran_seconds >= STABLE_SECONDS:
            self._next_seconds = self._first_seconds
        delay = self._next_seconds
        doubled = min(max(2 * delay, MIN_DELAY_SECONDS), MAX_DELAY_SECONDS)
        self._next_seconds = max(self._first_seconds, doubled)
        return delay


class _Group:
    """Processes that are started and stopped together. Times are those of `time.monotonic()`."""

    def __init__(self, ranks: Sequence[int], delay_seconds: float):
        self.ranks = ranks
        self.restarts = 0
        self.backoff = Backoff(delay_seconds)
        self.begin()

    def begin(self) -> None:
        """Forget the attempt before this one."""
        self.start_time = time.monotonic()
        self.restart_time = math.inf  # when the next attempt is due, if it is
        self.kill_time = math.inf  # the end of the grace period, if one has begun
        self.workers: dict[int, Worker] = {}  # the processes of this attempt, by rank
        self.num_running = 0
        self.failure: Exited | None = None  # the first failure of this attempt

    @property
    def is_active(self) -> bool:
        return self.num_running > 0 or self.restart_time < math.inf

    def terminate(self, grace_seconds: float) -> None:
        self._signal(signal.SIGTERM)
        self.kill_time = min(self.kill_time, time.monotonic() + grace_seconds)

    def kill(self) -> None:
        self.kill_time = math.inf
        self._signal(signal.SIGKILL)

    def join(self) -> None:
        for worker in self.workers.values():
            worker.join()

    def _signal(self, number: int) -> None:
        for worker in self.workers.values():
            worker.send_signal(number)


class _Supervisor:
    """Runs the groups of a job, and handles events in the order in which they arrive."""

    def __init__(
        self,
        job: JobSpec,
        events: queue.SimpleQueue[Event],
        reaper: Reaper,
        ports: contextlib.ExitStack,
        watch: Watch | None,
    ):
        self._job = job
        self._events = events
        self._reaper = reaper
        self._ports = ports
        self._watch = watch
        self._job_id = uuid.uuid4().hex
        self._secret = secrets.token_hex()
        self._status = 0
        self._stop_signal: int | None = None
        ranks = range(job.num_processes)
        divided = [[rank] for rank in ranks] if job.asynchronous else [ranks]
        self._groups = [_Group(part, job.delay_seconds) for part in divided]
        # All nodes of an asynchronous job keep their addresses.
        self._addresses = [self._reserve_address() for _ in ranks] if job.asynchronous else []

    def run(self) -> int:
        """Start all processes and handle events until none runs or waits for its restart."""
        try:
            for group in self._groups:
                self._start(group)
            while any(group.is_active for group in self._groups):
                self._handle(self._next_event())
        finally:
            for group in self._groups:
                group.kill()
            for group in self._groups:
                group.join()
        return self._status if self._stop_signal is None else 128 + self._stop_signal

    def _next_event(self) -> Event | None:
        """Return the next event, or None when it is time to kill, start or look at processes."""
        due = [when for group in self._groups for when in (group.kill_time, group.restart_time)]
        next_time = min([*due, math.inf if self._watch is None else self._watch.next_look])
        while True:
            # In short parts: the handler of a signal that arrives just before a wait runs after it.
            seconds = max(0.0, min(next_time - time.monotonic(), MAX_WAIT_SECONDS))
            try:
                return self._events.get(timeout=seconds)
            except queue.Empty:
                if time.monotonic() >= next_time:
                    return None

    def _handle(self, event: Event | None) -> None:
        match event:
            case None:
                self._on_time()
            case Exited():
                self._on_exit(event)
            case Signaled(number) if self._stop_signal is None:
                self._stop(number)
            case Signaled():  # the second signal does not wait
                for group in self._groups:
                    group.kill()
            case OutputClosed() if self._stop_signal is None:  # each line of output reports it
                self._stop(signal.SIGPIPE)

    def _on_time(self) -> None:
        now = time.monotonic()
        for group in self._groups:
            if group.kill_time <= now:
                group.kill()
            if group.restart_time <= now:
                self._start(group)
        if self._watch is not None and self._watch.next_look <= now:
            self._look(self._watch)

    def _on_exit(self, exited: Exited) -> None:
        """Count the process. The first failure stops the other processes of its group."""
        group = next(group for group in self._groups if exited.rank in group.ranks)
        group.num_running -= 1
        if self._watch is not None:
            self._watch.forget(exited.rank)
        if exited.code != 0 and group.failure is None and self._stop_signal is None:
            group.failure = exited
            group.terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))
            consequence = "the others go on" if self._job.asynchronous else "stopping the others"
            log(group.workers[exited.rank].describe_failure(exited, consequence))
        if group.num_running == 0:
            group.join()
            if group.failure is not None and self._stop_signal is None:
                self._plan_restart(group, group.failure)

    def _plan_restart(self, group: _Group, failure: Exited) -> None:
        """Say when a group whose attempt has failed starts again, or that it does not."""
        job = self._job
        name = f"rank {failure.rank}: " if job.asynchronous else ""
        # After a restart the program is known to start. A failing import may be the machine's then:
        # of a file system that is not back yet, for example.
        cannot_start = group.restarts == 0 and group.workers[failure.rank].cannot_start(failure)
        is_hopeless = failure.status == BAD_USAGE or cannot_start
        if is_hopeless or group.restarts == job.max_restarts:
            self._status = self._status or failure.status
            if group.restarts < job.max_restarts:
                log(f"{name}the program would fail again, so it is not started again")
            return
        delay = group.backoff.next_delay(time.monotonic() - group.start_time)
        group.restarts += 1
        group.restart_time = time.monotonic() + delay
        size = "" if job.asynchronous else f", with {len(group.ranks)} processes,"
        log(f"{name}restart {group.restarts} of {job.max_restarts}{size} in {delay:g} s")

    def _look(self, watch: Watch) -> None:
        """Kill processes that are stuck, which stops their group."""
        processes = watch.look()
        for group in self._groups:
            watched = [process for process in processes if process.rank in group.ranks]
            is_ending = group.failure is not None or self._stop_signal is not None
            verdict = None if is_ending else find_stall(watched, watch.limits)
            if verdict is None:
                continue
            consequence = "the others go on" if self._job.asynchronous else "stopping the job"
            log(watch.describe(watched, verdict, consequence))
            watch.ask_for_stacks(watched)
            rank = min(verdict.ranks, default=group.ranks[0])
            group.failure = Exited(rank, watch.find_status(verdict))
            for rank in verdict.ranks:
                group.workers[rank].send_signal(signal.SIGKILL)
            group.terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))

    def _stop(self, number: int) -> None:
        """Stop the job on the first signal, or when its output has no reader (SIGPIPE)."""
        self._stop_signal = number
        for group in self._groups:
            group.restart_time = math.inf
            group.terminate(self._job.grace_seconds)
        log(f"{describe_signal(number)}: the processes have {self._job.grace_seconds:g} s to exit")

    def _start(self, group: _Group) -> None:
        group.begin()
        coordinator = ""
        if not self._job.asynchronous:
            self._ports.close()  # that of the attempt before
            coordinator = self._reserve_address()
        for rank in group.ranks:
            environment = self._make_environment(group, rank, coordinator)
            if self._watch is not None:
                environment |= self._watch.add(rank)
            try:
                worker = Worker(
                    rank, self._job.command, environment, self._events.put, self._reaper
                )
            except OSError as error:
                raise StartError(f"cannot start rank {rank}: {error}") from error
            group.workers[rank] = worker
            group.num_running += 1
            if self._watch is not None:
                self._watch.follow(rank, worker.process_id)

    def _make_environment(self, group: _Group, rank: int, coordinator: str) -> dict[str, str]:
        """Make a process's environment: the launcher's, with defaults and fixed values."""
        job = self._job
        count = job.num_processes if job.asynchronous else len(group.ranks)
        # NPROC is the size of XLA's thread pool on CPU. With no more threads than devices, the
        # devices that wait in a collective would leave no thread for the computations of others.
        defaults = {
            "NPROC": str(max(2 * job.local_devices, (os.cpu_count() or 1) // count)),
            "PYTHONUNBUFFERED": "1",
            "GOSSIPJAX_SECRET": self._secret,
            "NCCL_SOCKET_IFNAME": "lo",  # else it listens at this machine's address in the network
            **(MALLOC_ENVIRONMENT if job.keep_memory else {}),
        }
        coordinated = {
            "GOSSIPJAX_COORDINATOR_ADDRESS": coordinator,
            "GOSSIPJAX_NUM_PROCESSES": str(count),
            "GOSSIPJAX_PROCESS_ID": str(rank),
        }
        required = {
            "JAX_NUM_CPU_DEVICES": str(job.local_devices),
            "GOSSIPJAX_RESTART": str(group.restarts),
            "GOSSIPJAX_JOB": self._job_id,
            GRACE: f"{job.grace_seconds:g}",
            PROGRESS: "",  # not that of a job in which the launcher runs
            **job.gpu_variables[rank],
        }
        if not job.asynchronous:
            return {**defaults, **os.environ, **required, **coordinated}
        # A node has no coordinator of such a job either.
        inherited = {name: value for name, value in os.environ.items() if name not in coordinated}
        places = {PLACE: str(rank), ADDRESSES: ",".join(self._addresses)}
        return {**defaults, **inherited, **required, **places}

    def _reserve_address(self) -> str:
        """Return a loopback address for one process, with a port that no other process gets."""
        holder = self._ports.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere two sockets cannot share it
            holder.close()
        return f"127.0.0.1:{port}"
