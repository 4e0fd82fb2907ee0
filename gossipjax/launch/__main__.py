"""Command line of the launcher: `python -m gossipjax.launch --processes N -- COMMAND ...`."""

from __future__ import annotations

import argparse
import shutil
import sys

from gossipjax.launch._devices import divide_gpus
from gossipjax.launch._environment import JobSpec
from gossipjax.launch._job import StartError, supervise
from gossipjax.launch._stall import StallLimits
from gossipjax.launch._worker import log

MAX_PROCESSES = 1024  # processes on one machine
MAX_LOCAL_DEVICES = 1024  # XLA on CPU needs 6 s to start 1,024 devices, and minutes for 4,096
MAX_RESTARTS = 10**6
MAX_SECONDS = 10**6
MIN_STALL_SECONDS = 0.1  # the launcher looks ten times as often
SLOW_SECONDS = 600.0  # for the start, and for anything that a program calls slow


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (default: `sys.argv[1:]`). Return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    stall_slow = options.stall_slow
    if stall_slow is None:
        stall_slow = max(SLOW_SECONDS, options.stall or 0)
    for option, value, minimum, maximum in (
        ("--processes", options.processes, 1, MAX_PROCESSES),
        ("--local-devices", options.local_devices, 1, MAX_LOCAL_DEVICES),
        ("--max-restarts", options.max_restarts, 0, MAX_RESTARTS),
        ("--restart-delay", options.restart_delay, 0, MAX_SECONDS),
        ("--grace", options.grace, 0, MAX_SECONDS),
        ("--stall", options.stall, MIN_STALL_SECONDS, MAX_SECONDS),
        ("--stall-slow", stall_slow, options.stall or 0, MAX_SECONDS),
    ):
        if value is not None and not minimum <= value <= maximum:  # also refuses nan
            parser.error(f"{option} must be from {minimum:g} to {maximum:g}, got {value}")
    if options.stall_slow is not None and options.stall is None:
        parser.error(f"--stall-slow must come with --stall, got {options.stall_slow:g} alone")
    if not command:
        parser.error("the line must end with -- and a command, got no command: -- python train.py")
    if shutil.which(command[0]) is None:
        parser.error(f"the command must be a program that can be executed, got {command[0]!r}")
    try:
        gpu_variables, warning = divide_gpus(
            options.processes, options.local_devices, asynchronous=options.asynchronous
        )
    except ValueError as error:
        parser.error(str(error))
    if warning:
        log(warning)
    job = JobSpec(
        command,
        options.processes,
        options.local_devices,
        gpu_variables,
        grace_seconds=options.grace,
        keep_memory=options.keep_memory,
        stall=None if options.stall is None else StallLimits(options.stall, stall_slow),
        max_restarts=options.max_restarts,
        delay_seconds=options.restart_delay,
        asynchronous=options.asynchronous,
    )
    try:
        return supervise(job)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gossipjax.launch",
        usage="%(prog)s --processes N [options] -- COMMAND ...",
        description="Run COMMAND in N processes on this machine, as one job. If a process fails, "
        "the others are stopped. docs/guides/launcher.md says more.",
        epilog="Exit status: 0, that of the process that failed first, or 128 + the number of the "
        "signal. GPUs are divided among the processes; with too few, set JAX_PLATFORMS=cpu.",
    )
    add = parser.add_argument
    add("--processes", type=int, required=True, metavar="N", help="number of processes")
    add(
        "--local-devices",
        type=int,
        default=1,
        metavar="L",
        help="devices of each process (default: 1)",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="after a failure, start all processes again, at most K times; not after exit status "
        "2, and not if the program cannot start (default: 0)",
    )
    add(
        "--restart-delay",
        type=float,
        default=1,
        metavar="SECONDS",
        help="before the first restart; doubles with each further failure (default: 1)",
    )
    add(
        "--asynchronous",
        action="store_true",
        help="processes are asynchronous nodes: one that fails is started again by itself",
    )
    add(
        "--stall",
        type=float,
        metavar="SECONDS",
        help="a job whose processes do not advance for this time is stuck: the launcher says "
        "where, and goes on as after a failure. Longer than the longest step or evaluation, for "
        "programs that use gx.TrainStep or call gossipjax.launch.advance() (default: not watched)",
    )
    add(
        "--stall-slow",
        type=float,
        metavar="SECONDS",
        help="the same from the start to the first step, and where something slow is expected "
        "(default: 600, or --stall if that is longer)",
    )
    add(
        "--grace",
        type=float,
        default=30,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL (default: 30); at most 5 after a failure",
    )
    add(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="processes keep memory that they free, for the next step, which is faster on CPU",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="program and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
