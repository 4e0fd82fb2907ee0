"""The processes of a job whose nodes wait for nobody: each is restarted without the others."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time
from typing import IO

from gossipjax.launch.supervisor._reaper import STOP_SIGNALS, reaper
from gossipjax.launch.supervisor._signals import describe_signal, signal_handlers
from gossipjax.launch.supervisor._supervisor import (
    BAD_USAGE,
    Backoff,
    DeadlinePassed,
    Event,
    JobSpec,
    RestartPolicy,
    Signaled,
    StartError,
    next_event,
    reserved_port,
)
from gossipjax.launch.supervisor._worker import Exited, OutputClosed, Worker, build_environment, log

PLACE = "GOSSIPJAX_NODE"  # environment variables of a process: its place, and where all listen
ADDRESSES = "GOSSIPJAX_NODE_ADDRESSES"


def supervise_each(job: JobSpec, policy: RestartPolicy) -> int:
    """Run a job to the end of all its processes; restart each that fails, by itself.

    A process that fails is started again after a delay, at most `policy.max_restarts` times, unless
    its status was 2 (bad usage). The others go on. Must be called on the main thread.

    Returns:
      The exit status: 0, that of the process that failed for good first, or 128 + the number of
      the signal that stopped the job.

    Raises:
      StartError: if a process cannot be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with (
        signal_handlers(STOP_SIGNALS, lambda number, _: events.put(Signaled(number))),
        reaper() as reaper_input,
        contextlib.ExitStack() as ports,
    ):
        addresses = [
            f"127.0.0.1:{ports.enter_context(reserved_port())}" for _ in range(job.num_processes)
        ]
        return _IndependentJob(job, policy, addresses, events, reaper_input).run()


class _Place:
    """One process of the job, with its restarts."""

    def __init__(self, policy: RestartPolicy):
        self.worker: Worker | None = None
        self.restarts = 0
        self.start_time = 0.0
        self.restart_time = math.inf  # by time.monotonic(), while it waits to be restarted
        self.backoff = Backoff(policy.delay_seconds)


class _IndependentJob:
    """The processes, by rank, and what happens to them."""

    def __init__(
        self,
        job: JobSpec,
        policy: RestartPolicy,
        addresses: list[str],
        events: queue.SimpleQueue[Event],
        reaper_input: IO[bytes],
    ):
        self._job = job
        self._policy = policy
        self._addresses = addresses
        self._events = events
        self._reaper_input = reaper_input
        self._places = [_Place(policy) for _ in addresses]
        self._status = 0
        self._stop_signal: int | None = None
        self._deadline = math.inf  # of the grace period, by time.monotonic()

    def run(self) -> int:
        """Start all processes and handle events until none runs or waits for its restart."""
        try:
            for rank in range(len(self._places)):
                self._start(rank)
            while any(p.worker or p.restart_time < math.inf for p in self._places):
                self._handle(self._next_event())
        finally:
            self._signal_all(signal.SIGKILL)
            for place in self._places:
                if place.worker is not None:
                    place.worker.join()
        return self._status if self._stop_signal is None else 128 + self._stop_signal

    def _next_event(self) -> Event | None:
        """The next event; None when a process is to be restarted."""
        next_time = min(self._deadline, *(place.restart_time for place in self._places))
        event = next_event(self._events, next_time)
        return DeadlinePassed() if event is None and next_time == self._deadline else event

    def _handle(self, event: Event | None) -> None:
        is_stopping = self._stop_signal is not None
        match event:
            case None:
                now = time.monotonic()
                for rank, place in enumerate(self._places):
                    if place.restart_time <= now:
                        self._start(rank)
            case Exited():
                self._on_exit(event)
            case Signaled(number) if not is_stopping:
                self._stop(number)
            case OutputClosed() if not is_stopping:
                self._stop(signal.SIGPIPE)
            case Signaled() | DeadlinePassed():
                self._deadline = math.inf
                self._signal_all(signal.SIGKILL)

    def _on_exit(self, exited: Exited) -> None:
        place = self._places[exited.rank]
        worker = place.worker
        place.worker = None
        if worker is None:
            return
        worker.join()
        if exited.code == 0 or self._stop_signal is not None:
            return
        log(worker.describe_failure(exited, "the others go on"))
        if exited.status == BAD_USAGE or place.restarts == self._policy.max_restarts:
            self._status = self._status or exited.status
            return
        delay = place.backoff.next_delay(time.monotonic() - place.start_time)
        place.restarts += 1
        place.restart_time = time.monotonic() + delay
        log(
            f"rank {exited.rank}: restart {place.restarts} of {self._policy.max_restarts} in "
            f"{delay:g} s"
        )

    def _stop(self, number: int) -> None:
        self._stop_signal = number
        for place in self._places:
            place.restart_time = math.inf
        self._signal_all(signal.SIGTERM)
        self._deadline = time.monotonic() + self._job.grace_seconds
        log(f"{describe_signal(number)}: the processes have {self._job.grace_seconds:g} s to exit")

    def _signal_all(self, number: int) -> None:
        for place in self._places:
            if place.worker is not None:
                place.worker.send_signal(number)

    def _start(self, rank: int) -> None:
        job = self._job
        place = self._places[rank]
        environment = build_environment(
            rank, 0, job.num_processes, job.local_devices, job.keep_memory
        )
        for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):  # of jax.distributed
            del environment[f"GOSSIPJAX_{name}"]
        environment = {"GOSSIPJAX_SECRET": job.secret, **environment} | {
            PLACE: str(rank),
            ADDRESSES: ",".join(self._addresses),
            "GOSSIPJAX_RESTART": str(place.restarts),
            "GOSSIPJAX_JOB": job.job_id,
        }
        place.start_time = time.monotonic()
        place.restart_time = math.inf
        try:
            place.worker = Worker(
                rank, job.command, environment, self._events.put, self._reaper_input
            )
        except OSError as error:
            raise StartError(f"cannot start rank {rank}: {error}") from error
