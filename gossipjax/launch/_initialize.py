"""Joins a job of several processes, and leaves it, by JAX's own runtime."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import warnings
from types import TracebackType
from typing import NoReturn

import jax

from gossipjax.launch import peers
from gossipjax.launch._devices import choose_gpu, visible_gpus
from gossipjax.launch._hello import MAX_SHOWN, bind_address, meet, reach
from gossipjax.launch._process_info import (
    ProcessInfo,
    find_gloo_problem,
    process_from_arguments,
    process_from_scheduler,
    require_address,
    seconds_from,
)
from gossipjax.launch._progress import open_progress
from gossipjax.launch._signals import final_errors

MEETING_SECONDS = 60.0  # for the other processes to come
HEARTBEAT_SECONDS = 30.0  # until a process that is not heard counts as dead
LOSS_SECONDS = 1.0  # after a collective has failed, until the loss of a process is known, too
# Texts in errors that the end of another process may have caused: of Gloo, or JAX's coordinator.
CAUSED_BY_OTHERS = ("Gloo", "unhealthy", "Barrier", "coordination service")
_initialized: ProcessInfo | None = None


@final_errors()
def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_timeout: float | None = None,
    heartbeat_timeout: float | None = None,
) -> ProcessInfo:
    """Joins this process to its job. Call it once, at the top, before you first use JAX.

    `initialize` looks for the number of this process, the number of processes and the address of
    process 0. The order is: the arguments; `GOSSIPJAX_COORDINATOR_ADDRESS`,
    `GOSSIPJAX_NUM_PROCESSES` and `GOSSIPJAX_PROCESS_ID`, which `python -m gossipjax.launch` sets;
    the same names with `JAX_`, which Kubeflow Trainer sets; JAX's own detection of Open MPI, Slurm,
    Cloud TPU and Kubernetes. If nothing is found, or with `num_processes=1`, this process is a job
    by itself.

    Under Open MPI and Slurm you need to give the address only. If the address is known, all
    processes first connect to process 0, and a process that is missing or was started twice raises
    an error. If JAX has to detect the address, JAX aborts a process instead of raising an error.

    docs/guides/launcher.md says which GPU a process gets, and how to protect a job, as JAX, Gloo
    and NCCL let everybody connect and encrypt nothing. After `initialize`, an uncaught exception
    ends the process at once, as `exit_process` does.

    Args:
      coordinator_address: `HOST:PORT` of process 0. All processes must reach it, and the port must
        be free.
      num_processes: the number of processes in the job.
      process_id: the number of this process, from 0.
      initialization_timeout: the seconds to wait for the other processes. The default is
        `GOSSIPJAX_INITIALIZATION_TIMEOUT`, else 60.
      heartbeat_timeout: the seconds after which a process that JAX does not hear is dead, and all
        others end. The default is `GOSSIPJAX_HEARTBEAT_TIMEOUT`, else 30.

    Returns:
      The number of this process and the number of processes.

    Raises:
      ValueError: if numbers or address are incomplete, malformed or contradict each other or an
        earlier call, if a host has more processes than GPUs, or JAX was used before.
      ConnectionError: if process 0 cannot be reached or cannot listen, if processes are missing or
        were started twice, or if another process cannot reach the address at which Gloo listens.
        The message names the address and the timeout, the processes, or the line that /etc/hosts
        lacks.

    >>> from gossipjax import launch
    >>> launch.initialize(num_processes=1)
    ProcessInfo(process_id=0, num_processes=1)
    """
    global _initialized
    open_progress()  # so that the launcher can ask for the stacks of a process that hangs here
    timeout = seconds_from(initialization_timeout, "initialization_timeout", MEETING_SECONDS)
    heartbeat = seconds_from(heartbeat_timeout, "heartbeat_timeout", HEARTBEAT_SECONDS)
    # The program may have called `jax.distributed.initialize` itself.
    if _initialized is None and jax.distributed.is_initialized():
        _initialized = ProcessInfo(jax.process_index(), jax.process_count())
    requested = process_from_arguments(coordinator_address, num_processes, process_id)
    if _initialized is not None:
        if requested is not None and requested[0] != _initialized:
            raise ValueError(
                f"initialize must get the same numbers at each call, got {requested[0]} after "
                f"{_initialized}: call it once, at the top of the program."
            )
        return _initialized
    if requested is None:
        _initialized = _initialize_detected(timeout, heartbeat)
        return _initialized
    info, address = requested
    # Without an address, this process is a job by itself, for which JAX needs to be told nothing.
    if address is not None and info.num_processes > 1:
        if os.environ.get("GOSSIPJAX_SECRET"):
            warnings.warn(
                "GOSSIPJAX_SECRET guards asynchronous nodes alone since gossipjax 0.5.0, and not "
                "this job: docs/guides/launcher.md says how to protect it.",
                stacklevel=3,
            )
        local_device_ids = choose_gpu()
        platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
        is_on_cpu = platforms.startswith("cpu") or not (platforms or visible_gpus(None))
        connections = meet(address, info, timeout)
        peers.kept = peers.Peers(info, connections)
        # On CPUs, JAX communicates by Gloo, which may listen where others cannot reach it.
        # Any connection shows where this machine is in the network of the job.
        connection = next(iter(connections.values()))[0]
        problem = find_gloo_problem(connection, info.process_id) if is_on_cpu else None
        if problems := [text for text in peers.kept.gather("Gloo", problem, timeout) if text]:
            peers.kept.leave()  # all processes raise this error, so none of them is lost
            raise ConnectionError(" ".join(problems[:MAX_SHOWN]))
        # Process 0 starts JAX's coordinator now, at the port at which all have met. The others wait
        # until it listens: if JAX's first attempt to connect failed, it would sleep for a second.
        if info.process_id:
            reach(address, f"process {info.process_id}", timeout).close()
        _initialize_jax(
            timeout,
            heartbeat,
            coordinator_address=address,
            num_processes=info.num_processes,
            process_id=info.process_id,
            cluster_detection_method="deactivate",
            local_device_ids=local_device_ids,
            # Without it, JAX would listen at every address of the machine.
            coordinator_bind_address=bind_address(address),
        )
    _initialized = info
    return _initialized


def _initialize_detected(timeout: float, heartbeat: float) -> ProcessInfo:
    """Lets JAX detect the job. If it finds none, this process is a job by itself."""
    scheduled = process_from_scheduler()
    # Only Open MPI 4 tells JAX an address; under Open MPI 5, JAX would ask for mpi4py.
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        require_address()
    try:
        _initialize_jax(timeout, heartbeat, local_device_ids=choose_gpu())
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise
        require_address()  # JAX found no job: an error if a scheduler started several processes
        return ProcessInfo(0, 1)
    except Exception as error:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            error.add_note(
                "JAX asks Kubernetes for an Indexed Job. If this pod is a job by itself, set "
                "GOSSIPJAX_NUM_PROCESSES=1. In another job of several set it, too, with "
                "GOSSIPJAX_COORDINATOR_ADDRESS and GOSSIPJAX_PROCESS_ID."
            )
        raise
    if scheduled is not None:  # asking JAX would start its backend, which programs configure later
        return scheduled[1]
    return ProcessInfo(jax.process_index(), jax.process_count())


def _initialize_jax(timeout: float, heartbeat: float, **options: str | int | None) -> None:
    """Calls `jax.distributed.initialize`, but lets the process end at SIGTERM and at an error."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    former_handler = signal.getsignal(signal.SIGTERM)
    # `shutdown_timeout_seconds` stays at five minutes: JAX aborts all processes if one ends later
    # than another by more than that. A process that dies is found by the heartbeat, much sooner.
    try:
        jax.distributed.initialize(
            initialization_timeout=math.ceil(timeout),
            heartbeat_timeout_seconds=math.ceil(heartbeat),
            **options,  # pyright: ignore[reportArgumentType]
        )
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ValueError(
            "gx.launch.initialize must be called before the first array or device of JAX is made, "
            "got a call after it: import modules that make some, such as a model, after the call."
        ) from error
    # JAX's handler would make the process ignore SIGTERM, and never save.
    if on_main_thread and former_handler is not None:
        signal.signal(signal.SIGTERM, former_handler)
    former_hook = sys.excepthook

    def exit_after_report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Reports an uncaught exception, and ends the process at once.

        If another process has ended, `Peers` has said so, and the traceback of the collective that
        failed by that is left out. The collective may fail before the loss is known, so it waits.
        """
        names_others = any(text in str(error) for text in CAUSED_BY_OTHERS)
        may_be_caused = names_others or isinstance(error, ConnectionError)
        seconds = LOSS_SECONDS if may_be_caused else 0
        is_lost = peers.kept is not None and peers.kept.has_lost(seconds)
        if not (is_lost and may_be_caused):
            with contextlib.suppress(SystemExit):  # of `final_errors`
                former_hook(kind, error, traceback)
        # JAX's shutdown would wait for the other processes.
        status = getattr(error, "exit_status", 1)
        exit_process(130 if issubclass(kind, KeyboardInterrupt) else status)

    sys.excepthook = exit_after_report


def exit_process(status: int | str) -> NoReturn:
    """Exits with `status`, at once if it is not 0; in a single process this is `sys.exit`.

    Call it when one of several processes fails. After `sys.exit`, JAX would wait up to five minutes
    for the other processes to exit, and then abort. With status 0 `exit_process` waits as well,
    because process 0 must not end first. In a job of several processes, functions registered with
    `atexit` are not called.

    Args:
      status: the exit status, 0 to 255. If it is a text, the text goes to stderr and the status is
        1.

    >>> from gossipjax import launch
    >>> launch.exit_process("error: no data")
    Traceback (most recent call last):
    SystemExit: error: no data
    """
    if not jax.distributed.is_initialized():
        sys.exit(status)
    with contextlib.suppress(OSError, ValueError):  # who reads it may have ended
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stderr.flush()
    if status == 0:
        if peers.kept is not None:
            peers.kept.leave()
        jax.distributed.shutdown()
    os._exit(1 if isinstance(status, str) else status)
