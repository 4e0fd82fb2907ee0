"""The processes of a job on this machine: started together, stopped together, restarted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gossipjax.launch.supervisor._events import (
    DeadlinePassed,
    Event,
    Signaled,
    next_event,
    stop_signals,
)
from gossipjax.launch.supervisor._output import log
from gossipjax.launch.supervisor._progress import PROGRESS
from gossipjax.launch.supervisor._reaper import Reaper
from gossipjax.launch.supervisor._signals import describe_signal
from gossipjax.launch.supervisor._stall import StallLimits, find_stall
from gossipjax.launch.supervisor._watch import Watch, watching
from gossipjax.launch.supervisor._worker import (
    BAD_USAGE,
    Exited,
    OutputClosed,
    Worker,
    build_environment,
)

MAX_GRACE_AFTER_FAILURE = 5.0  # seconds: without the failed process the others cannot save
MAX_DELAY_SECONDS = 30.0  # between two restarts
STABLE_SECONDS = 600.0  # after which a failure is not one of a series
HOPELESS = "the program would fail again, so it is not started again"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A command, and how to run it.

    Attributes:
      command: program and arguments of every process.
      num_processes: number of processes at the start of the job.
      local_devices: devices of each process.
      grace_seconds: from SIGTERM to SIGKILL.
      keep_memory: whether processes keep the memory that they free.
      stall: after which time without an advance a process is stuck; None does not watch.
      job_id: distinguishes the job from others, the same after restarts.
      secret: by which the processes of the job know each other, unless the user has set one.
    """

    command: Sequence[str]
    num_processes: int
    local_devices: int = 1
    grace_seconds: float = 30.0
    keep_memory: bool = True
    stall: StallLimits | None = None
    job_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    secret: str = dataclasses.field(default_factory=secrets.token_hex, repr=False)


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """Restarts after failures.

    Attributes:
      max_restarts: restarts of a job, at most.
      delay_seconds: before the first restart; see `Backoff`.
      elastic: whether a restart has one process less for each that was lost.
    """

    max_restarts: int = 0
    delay_seconds: float = 1.0
    elastic: bool = False


class Backoff:
    """Delays before restarts: each is twice the one before, but at most `MAX_DELAY_SECONDS`.

    After an attempt of `STABLE_SECONDS` they start again, at `first_seconds`.
    """

    def __init__(self, first_seconds: float):
        self._first_seconds = first_seconds
        self._next_seconds = first_seconds

    def next_delay(self, ran_seconds: float) -> float:
        """Return the seconds to wait after an attempt that ran for `ran_seconds` and failed."""
        if ran_seconds >= STABLE_SECONDS:
            self._next_seconds = self._first_seconds
        delay = self._next_seconds
        self._next_seconds = max(self._first_seconds, min(2 * delay, MAX_DELAY_SECONDS))
        return delay


class StartError(Exception):
    """A process of the job cannot be started: the machine has no room for it, for example."""


class Outcome(NamedTuple):
    """End of one attempt to run a job.

    Attributes:
      status: exit status of the launcher.
      lost: number of processes with which an elastic job does not go on.
      stopped: whether a signal or closed output stopped the job.
      is_hopeless: whether the job failed in a way that a restart does not repair.
    """

    status: int
    lost: int
    stopped: bool
    is_hopeless: bool

    @property
    def may_restart(self) -> bool:
        """Whether the job failed, and in a way that a restart may repair."""
        return self.status != 0 and not self.stopped and not self.is_hopeless


def supervise(job: JobSpec, policy: RestartPolicy) -> int:
    """Run a job to its end, with restarts. Must be called on the main thread.

    If a process fails, the others get SIGTERM, then SIGKILL. Then, after a delay, all are started
    again, unless the status was 2 (bad usage), the program cannot start, or a signal stopped the
    job. A process that is stuck has failed, with status `STALL_STATUS`.

    Returns:
      The exit status: 0, that of the process that failed first, or 128 + the number of the signal.

    Raises:
      StartError: if a process cannot be started.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    num_processes = job.num_processes
    backoff = Backoff(policy.delay_seconds)
    with stop_signals(events), Reaper() as reaper, watching(job.stall) as watch:
        restart = 0
        while True:
            start_time = time.monotonic()
            outcome = _Attempt(job, restart, num_processes, events, reaper, watch).run()
            if restart == policy.max_restarts or not outcome.may_restart:
                if restart < policy.max_restarts and outcome.is_hopeless:
                    log(HOPELESS)
                return outcome.status
            restart += 1
            if policy.elastic:
                num_processes = max(1, num_processes - outcome.lost)
            delay = backoff.next_delay(time.monotonic() - start_time)
            log(
                f"restart {restart} of {policy.max_restarts}, with {num_processes} processes, in "
                f"{delay:g} s"
            )
            stop_signal = _wait_for_stop(events, delay)
            if stop_signal is not None:
                return 128 + stop_signal


def _wait_for_stop(events: queue.SimpleQueue[Event], seconds: float) -> int | None:
    """Wait while no process runs. Return the number of the signal that ends the job, or None."""
    deadline = time.monotonic() + seconds
    while True:
        match next_event(events, deadline):
            case None:
                return None
            case Signaled(number):
                return number
            case OutputClosed():
                return signal.SIGPIPE


class _Attempt:
    """One start of all processes of a job."""

    def __init__(
        self,
        job: JobSpec,
        restart: int,
        num_processes: int,
        events: queue.SimpleQueue[Event],
        reaper: Reaper,
        watch: Watch | None,
    ):
        self._job = job
        self._restart = restart
        self._num_processes = num_processes
        self._events = events
        self._reaper = reaper
        self._watch = watch
        self._workers: list[Worker] = []
        self._num_running = num_processes
        self._deadline = math.inf  # of the grace period, by time.monotonic()
        self._first_failure: Exited | None = None
        self._stop_signal: int | None = None
        self._num_lost = 0  # to a SIGKILL that is not the launcher's, or because they were stuck

    def run(self) -> Outcome:
        """Start all processes and handle events until the last process has exited."""
        with reserved_port() as port:
            try:
                for rank in range(self._num_processes):
                    self._workers.append(self._start(rank, port))
                while self._num_running:
                    self._handle(self._next_event())
            finally:
                self._signal_all(signal.SIGKILL)
                for worker in self._workers:
                    worker.join()
        # One failure makes others fail, in any order and in any way, except by SIGKILL.
        lost = max(1, self._num_lost)
        return Outcome(self._status(), lost, self._stop_signal is not None, self._is_hopeless())

    def _handle(self, event: Event | None) -> None:
        is_stopping = self._stop_signal is not None
        match event:
            case None:
                self._look()
            case Exited():
                self._on_exit(event)
            case Signaled(number) if not is_stopping:
                self._stop(number)
            case OutputClosed() if not is_stopping:
                self._stop(signal.SIGPIPE)
            case OutputClosed():
                pass  # each line of output reports it again
            case Signaled() | DeadlinePassed():
                self._kill()

    def _on_exit(self, exited: Exited) -> None:
        """Count the process; the first failure stops the others."""
        self._num_running -= 1
        self._num_lost += exited.is_lost
        if self._watch is not None:
            self._watch.forget(exited.rank)
        if exited.code != 0 and self._first_failure is None and self._stop_signal is None:
            self._first_failure = exited
            self._terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))
            log(self._workers[exited.rank].describe_failure(exited))

    def _look(self) -> None:
        """Look whether processes are stuck: they are killed, which stops the others."""
        watch = self._watch
        if watch is None:
            return
        processes = watch.look()
        is_ending = self._first_failure is not None or self._stop_signal is not None
        verdict = None if is_ending else find_stall(processes, watch.limits)
        if verdict is None:
            return
        log(watch.report(processes, verdict, "stopping the job"))
        self._first_failure = Exited(min(verdict.ranks, default=0), watch.find_status(verdict))
        for rank in verdict.ranks:
            self._workers[rank].send_signal(signal.SIGKILL)
        self._num_lost = len(verdict.ranks) if len(verdict.ranks) < self._num_running else 1
        self._terminate(min(self._job.grace_seconds, MAX_GRACE_AFTER_FAILURE))

    def _stop(self, number: int) -> None:
        """Stop the job on the first signal, or when nobody reads its output (SIGPIPE)."""
        self._stop_signal = number
        grace_seconds = self._job.grace_seconds
        self._terminate(grace_seconds)
        log(f"{describe_signal(number)}: the processes have {grace_seconds:g} s to exit")

    def _terminate(self, grace_seconds: float) -> None:
        self._signal_all(signal.SIGTERM)
        self._deadline = min(self._deadline, time.monotonic() + grace_seconds)

    def _kill(self) -> None:
        self._deadline = math.inf
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for worker in self._workers:
            worker.send_signal(number)

    def _next_event(self) -> Event | None:
        """The next event; None when it is time to look whether the processes advance."""
        next_look = math.inf if self._watch is None else self._watch.next_look
        event = next_event(self._events, min(self._deadline, next_look))
        is_over = event is None and time.monotonic() >= self._deadline
        return DeadlinePassed() if is_over else event

    def _status(self) -> int:
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        return 0 if self._first_failure is None else self._first_failure.status

    def _is_hopeless(self) -> bool:
        """Whether a restart would not help: bad usage, or a program that has never started.

        After a restart the program is known to start, and then a failing import may be the
        machine's: of a file system that is not back yet, for example.
        """
        failure = self._first_failure
        if failure is None:
            return False
        cannot_start = self._restart == 0 and self._workers[failure.rank].cannot_start(failure)
        return failure.status == BAD_USAGE or cannot_start

    def _start(self, rank: int, port: int) -> Worker:
        job = self._job
        environment = {
            "GOSSIPJAX_SECRET": job.secret,
            **build_environment(
                rank, port, self._num_processes, job.local_devices, job.keep_memory
            ),
            "GOSSIPJAX_NUM_PROCESSES_AT_START": str(job.num_processes),
            "GOSSIPJAX_RESTART": str(self._restart),
            "GOSSIPJAX_JOB": job.job_id,
        }
        return start_worker(rank, job, environment, self._events.put, self._reaper, self._watch)


def start_worker(
    rank: int,
    job: JobSpec,
    environment: dict[str, str],
    report: Callable[[Exited | OutputClosed], None],
    reaper: Reaper,
    watch: Watch | None,
) -> Worker:
    """Start a process of the job, and watch it.

    Raises:
      StartError: if it cannot be started.
    """
    environment = {**environment, PROGRESS: ""}  # not that of a job in which the launcher runs
    if watch is not None:
        environment |= watch.add(rank)
    try:
        worker = Worker(rank, job.command, environment, report, reaper)
    except OSError as error:
        raise StartError(f"cannot start rank {rank}: {error}") from error
    if watch is not None:
        watch.follow(rank, worker.process_id)
    return worker


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A loopback port that the kernel gives to nobody else, and on which process 0 may listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":  # elsewhere two sockets cannot share it
            holder.close()
        yield port
