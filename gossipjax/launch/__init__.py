"""Processes, hosts and meshes; `python -m gossipjax.launch` runs a job on this machine.

A program calls `initialize()` before JAX's first use and then runs unchanged on one process, under
the launcher and on the hosts of a cluster. The engine is JAX's own multi-controller runtime.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from types import TracebackType
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from gossipjax.rendezvous import (
    Place,
    given_place,
    is_loopback,
    meet,
    patience,
    scheduled_device,
    scheduled_place,
    whole_number,
)
from gossipjax.supervisor import Job, supervise

_place: Place | None = None


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    timeout: float | None = None,
) -> Place:
    """Joins this process to its job; called once, at the top, before JAX's first use.

    The place in the job comes from the arguments; else from `GOSSIPJAX_COORDINATOR`,
    `GOSSIPJAX_PROCESSES` and `GOSSIPJAX_PROCESS` (our launcher sets them); else from JAX's own
    detection of Open MPI, Slurm, Cloud TPU and Kubernetes; else this is a single process, as it is
    with `processes=1` and in a job step of one process. Under Open MPI and Slurm the coordinator
    alone is enough. With a known coordinator, the processes meet there first, so that one that is
    missing or was started twice is an error here; where JAX detects the place, JAX aborts.

    Of Slurm and Open MPI JAX takes one GPU per process: `JAX_LOCAL_DEVICE_IDS=0,1,...` gives it
    more. SIGTERM does what it did before the call (JAX would have the process ignore it), and an
    uncaught exception ends the process at once, as `leave` does.

    Args:
      coordinator: `HOST:PORT` of process 0, that all can reach; the port is free there.
      processes: how many there are.
      process: the number of this one, from 0.
      timeout: seconds to wait for the others: `GOSSIPJAX_TIMEOUT`, or 60, if not given.

    Returns:
      The place. A second call with the same one does nothing.

    Raises:
      ValueError: for half a place, a process outside of 0..processes - 1, a bad address, or another
        place than in an earlier call.
      ConnectionError: if process 0 cannot be reached or cannot listen, or if processes are missing
        or doubled; it names the address and the time, or the processes.

    >>> from gossipjax import launch
    >>> launch.initialize(processes=1)
    Place(process=0, processes=1)
    """
    global _place
    seconds = patience(timeout)
    address, place = given_place(coordinator, processes, process)
    if _place is None and jax.distributed.is_initialized():  # by the program itself
        _place = Place(jax.process_index(), jax.process_count())
    if _place is not None:
        if place not in (None, _place):
            raise ValueError(
                f"this is process {_place.process} of {_place.processes} already; it cannot become "
                f"process {place.process} of {place.processes}."
            )
        return _place
    if place is None:
        place = _detected(seconds)
    elif place.processes > 1:
        meet(address, place, seconds)
        _join(
            coordinator_address=address,
            num_processes=place.processes,
            process_id=place.process,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(seconds),
            local_device_ids=scheduled_device(place),
            # JAX would listen on every address of the machine.
            coordinator_bind_address=address if is_loopback(address) else None,
        )
    _place = place
    return place


def _detected(seconds: float) -> Place:
    try:
        _join(initialization_timeout=math.ceil(seconds))
    except ValueError as error:
        if "coordinator_address" not in str(error):
            raise
        name, place = scheduled_place()
        if place is not None:
            raise ValueError(
                f"{name} runs {place.processes} processes, but JAX does not find their "
                "coordinator: set GOSSIPJAX_COORDINATOR=HOST:PORT for all, of process 0's host."
            ) from None
        return Place(0, 1)
    # Where a scheduler says it, so as not to start JAX's backend: programs still set it up.
    return scheduled_place()[1] or Place(jax.process_index(), jax.process_count())


def _join(**options: str | int | None) -> None:
    """`jax.distributed.initialize`, without what it and its shutdown do to a failing process."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(**options)  # pyright: ignore[reportArgumentType]
    if on_main_thread and on_sigterm is not None:
        signal.signal(signal.SIGTERM, on_sigterm)
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        report(kind, error, at)
        leave(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def leave(status: int | str) -> NoReturn:
    """`sys.exit`, for a process that fails alone: of several processes, it ends this one at once.

    After `sys.exit` JAX waits for the others to end too, up to five minutes, and then aborts. What
    is registered with `atexit` is not called. An uncaught exception ends a process in this way.

    >>> from gossipjax import launch
    >>> launch.leave("error: no data")
    Traceback (most recent call last):
    SystemExit: error: no data
    """
    if not jax.distributed.is_initialized():
        sys.exit(status)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(status, str) else status)


def mesh(nodes: int | None = None, local: int | None = None) -> Mesh:
    """The devices of all processes as N nodes of `local` devices, with Auto axes, for `gx.spmd`.

    A node's devices are neighbors in the order of the processes: a process holds N / processes
    whole nodes, or a node is made of whole processes that follow each other. A single process may
    have devices to spare; several may not.

    Args:
      nodes: N; as many as there are devices for, if not given.
      local: the devices of a node, L. Not given, it is one and the mesh has no such axis.

    Returns:
      A mesh with the axis `nodes`, or the axes `nodes` and `local`: `[N]` or `[N, L]`.

    Raises:
      ValueError: if the numbers do not divide, or there are fewer devices than N * L; of several
        processes also if there are more.

    >>> from gossipjax import launch
    >>> dict(launch.mesh(nodes=1).shape)
    {'nodes': 1}
    """
    for name, value in (("nodes", nodes), ("local", local)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1
        ):
            raise ValueError(f"{name} is a whole number of at least 1; given {value!r}.")
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    counts = Counter(device.process_index for device in devices)
    each, size = len(devices) // len(counts), local or 1
    found = f"{len(devices)} devices: {len(counts)} processes with {each} each"
    if len(set(counts.values())) > 1:
        raise ValueError(f"processes have different numbers of devices: {dict(counts)}.")
    if nodes is None and len(devices) % size:
        raise ValueError(f"local={local} does not divide {found}; give a divisor of it.")
    nodes = len(devices) // size if nodes is None else nodes
    if nodes % len(counts) and len(counts) % nodes:
        raise ValueError(
            f"{len(counts)} processes do not divide {nodes} nodes: every process holds as many. "
            f"Take a multiple of {len(counts)} nodes, or another number of processes."
        )
    if nodes * size > len(devices):
        more = -(-nodes * size // len(counts))
        raise ValueError(
            f"{nodes} nodes of {size} need {nodes * size} devices, and there are {found}. Take "
            f"fewer; or on CPU ask for more, with --local-devices {more} of the launcher or "
            f'jax.config.update("jax_num_cpu_devices", {more}) before JAX\'s first use; or under '
            "Slurm and Open MPI, where JAX takes one GPU per process, set JAX_LOCAL_DEVICE_IDS."
        )
    if len(counts) > 1 and nodes * size < len(devices):
        raise ValueError(
            f"{nodes} nodes of {size} leave devices idle, and there are {found}. Use all, with "
            f"nodes={len(devices) // size}, or start fewer processes or devices."
        )
    grid = np.array(devices[: nodes * size])
    return (
        Mesh(grid, ("nodes",))
        if local is None
        else Mesh(grid.reshape(-1, size), ("nodes", "local"))
    )


def nodes_left(nodes: int) -> int:
    """`nodes * processes / processes at start`: what `--elastic` left of so many nodes.

    Outside of the launcher, and before any restart, it is `nodes`.

    Raises:
      ValueError: if that is no whole number.

    >>> from gossipjax import launch
    >>> launch.nodes_left(8)
    8
    """
    at_start = whole_number(None, "GOSSIPJAX_PROCESSES_AT_START")
    processes = whole_number(None, "GOSSIPJAX_PROCESSES")
    if at_start is None or processes is None:
        return nodes
    if nodes * processes % at_start:
        raise ValueError(
            f"{nodes} nodes began on {at_start} processes, of which {processes} are left: "
            f"{nodes * processes / at_start:g} nodes. Begin with a multiple of {at_start} nodes."
        )
    return nodes * processes // at_start


def main(arguments: list[str] | None = None) -> int:
    """`python -m gossipjax.launch`: returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gossipjax.launch",
        usage="%(prog)s --processes N [options] -- COMMAND ...",
        description="Runs COMMAND in N processes on this machine, as one job. One that fails ends "
        "all; SIGTERM and Ctrl-C are passed on as SIGTERM, so that the processes may save.",
        epilog="Exit status: that of the process that failed first, or 128 + the signal's number. "
        "Accelerators are dealt out, --local-devices to each process; without enough of them, set "
        "JAX_PLATFORMS=cpu.",
    )
    add = parser.add_argument
    add("--processes", type=int, required=True, metavar="N", help="how many processes")
    add("--local-devices", type=int, default=1, metavar="L", help="devices of each (default: 1)")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="start all again at most K times after a failure, but not after status 2, of what "
        "would fail again; the program is told by GOSSIPJAX_RESTART and GOSSIPJAX_JOB (default: 0)",
    )
    add(
        "--elastic",
        action="store_true",
        help="restart on the processes that are left; the program finds how many there were in "
        "GOSSIPJAX_PROCESSES_AT_START (gossipjax.launch.nodes_left)",
    )
    add(
        "--grace",
        type=float,
        default=30,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL (default: 30); 5 at most after a failure, when there is "
        "nothing that the others could save",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="program and its arguments")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    for name, least in (("processes", 1), ("local_devices", 1), ("max_restarts", 0), ("grace", 0)):
        value = getattr(options, name)
        if not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is at least {least}; given {value}")
    if options.elastic and not options.max_restarts:
        parser.error("--elastic is about restarts: give --max-restarts, too")
    if not command:
        parser.error("no command: end with -- and what to run, as in -- python train.py")
    if shutil.which(command[0]) is None:
        parser.error(f"command not found, or not executable: {command[0]}")
    job = Job(command, options.processes, options.local_devices, options.grace)
    return supervise(job, options.max_restarts, options.elastic)


if __name__ == "__main__":
    sys.exit(main())
