"""The processes of a job whose nodes wait for nobody: each is restarted without the others."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import time

from gossipjax.launch.supervisor._events import (
    DeadlinePassed,
    Event,
    Signaled,
    next_event,
    stop_signals,
)
from gossipjax.launch.supervisor._output import log
from gossipjax.launch.supervisor._reaper import Reaper
from gossipjax.launch.supervisor._signals import describe_signal
from gossipjax.launch.supervisor._stall import STOPPED, Verdict
from gossipjax.launch.supervisor._supervisor import (
    HOPELESS,
    Backoff,
    JobSpec,
    RestartPolicy,
    reserved_port,
    start_worker,
)
from gossipjax.launch.supervisor._watch import Watch, watching
from gossipjax.launch.supervisor._worker import (
    BAD_USAGE,
    Exited,
    OutputClosed,
    Worker,
    build_environment,
)

PLACE = "GOSSIPJAX_NODE"  # environment variables of a process: its place, and where all listen
ADDRESSES = "GOSSIPJAX_NODE_ADDRESSES"


def supervise_each(job: JobSpec, policy: RestartPolicy) -> int:
    """Run a job to the end of all its processes; restart each that fails, by itself.

    A process that fails is started again after a delay, at most `policy.max_restarts` times, unless
    its status was 2 (bad usage) or it cannot start. The others go on. A process that is stuck is
    killed, and has failed with status `STALL_STATUS`. Must be called on the main thread.

    Returns:
      The exit status: 0, that of the process that failed for good first, or 128 + the number of
      the signal that stopped the job.

    Raises:
      StartError: if a process cannot be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with (
        stop_signals(events),
        Reaper() as reaper,
        contextlib.ExitStack() as ports,
        watching(job.stall) as watch,
    ):
        addresses = [
            f"127.0.0.1:{ports.enter_context(reserved_port())}" for _ in range(job.num_processes)
        ]
        return _IndependentJob(job, policy, addresses, events, reaper, watch).run()


class _Place:
    """One process of the job, with its restarts."""

    def __init__(self, policy: RestartPolicy):
        self.worker: Worker | None = None
        self.restarts = 0
        self.start_time = 0.0
        self.restart_time = math.inf  # by time.monotonic(), while it waits to be restarted
        self.backoff = Backoff(policy.delay_seconds)
        self.stall_status: int | None = None  # of a process that was killed because it was stuck


class _IndependentJob:
    """The processes, by rank, and what happens to them."""

    def __init__(
        self,
        job: JobSpec,
        policy: RestartPolicy,
        addresses: list[str],
        events: queue.SimpleQueue[Event],
        reaper: Reaper,
        watch: Watch | None,
    ):
        self._job = job
        self._policy = policy
        self._addresses = addresses
        self._events = events
        self._reaper = reaper
        self._watch = watch
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
        """The next event; None when a process is to be restarted, or looked at."""
        next_look = math.inf if self._watch is None else self._watch.next_look
        next_time = min(self._deadline, next_look, *(p.restart_time for p in self._places))
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
                if self._watch is not None and self._watch.next_look <= now:
                    self._look(self._watch)
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
        if self._watch is not None:
            self._watch.forget(exited.rank)
        if self._stop_signal is not None or (exited.code == 0 and place.stall_status is None):
            return
        if place.stall_status is None:
            log(worker.describe_failure(exited, "the others go on"))
        else:
            exited = Exited(exited.rank, place.stall_status)
        is_first = place.restarts == 0
        is_hopeless = exited.status == BAD_USAGE or (is_first and worker.cannot_start(exited))
        if is_hopeless or place.restarts == self._policy.max_restarts:
            self._status = self._status or exited.status
            if place.restarts < self._policy.max_restarts:
                log(f"rank {exited.rank}: {HOPELESS}")
            return
        delay = place.backoff.next_delay(time.monotonic() - place.start_time)
        place.restarts += 1
        place.restart_time = time.monotonic() + delay
        log(
            f"rank {exited.rank}: restart {place.restarts} of {self._policy.max_restarts} in "
            f"{delay:g} s"
        )

    def _look(self, watch: Watch) -> None:
        """Kill the processes that are stuck. No process waits for another, so each is judged."""
        processes = watch.look()
        if self._stop_signal is not None:
            return
        for process in processes:
            place = self._places[process.rank]
            if place.stall_status is None and process.is_overdue(watch.limits):
                reason = "not advancing" if process.stopped_seconds is None else STOPPED
                verdict = Verdict([process.rank], reason)
                log(watch.report([process], verdict, "the others go on"))
                place.stall_status = watch.find_status(verdict)
                if place.worker is not None:
                    place.worker.send_signal(signal.SIGKILL)

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
        place.stall_status = None
        place.worker = start_worker(
            rank, job, environment, self._events.put, self._reaper, self._watch
        )
