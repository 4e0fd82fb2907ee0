"""Command line of the launcher: `python -m gossipjax.launch --processes N -- COMMAND ...`."""

from __future__ import annotations

import argparse
import shutil
import sys

from gossipjax.launch._devices import divide_gpus
from gossipjax.launch._job import supervise
from gossipjax.launch._worker import log

MAX_SECONDS = 10**6
SLOW_SECONDS = 600.0  # for the start, and for anything that a program calls slow


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (default: `sys.argv[1:]`). Return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.stall_slow is None:
        options.stall_slow = max(SLOW_SECONDS, options.stall or 0)
    elif options.stall is None:
        parser.error(f"--stall-slow must come with --stall, got {options.stall_slow:g} alone")
    for option, minimum, maximum in (
        ("processes", 1, 1024),  # on one machine
        ("local_devices", 1, 1024),  # XLA on CPU needs 6 s to start 1,024, and minutes for 4,096
        ("max_restarts", 0, 10**6),
        ("restart_delay", 0, MAX_SECONDS),
        ("grace", 0, MAX_SECONDS),
        ("stall", 0.1, MAX_SECONDS),  # the launcher looks ten times as often
        ("stall_slow", options.stall or 0, MAX_SECONDS),
    ):
        value = getattr(options, option)
        if value is not None and not minimum <= value <= maximum:  # also refuses nan
            name = f"--{option.replace('_', '-')}"
            parser.error(f"{name} must be from {minimum:g} to {maximum:g}, got {value}")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("the line must end with -- and a command, got no command: -- python train.py")
    if shutil.which(options.command[0]) is None:
        given = options.command[0]
        parser.error(f"the command must be a program that can be executed, got {given!r}")
    try:
        options.gpu_variables, warning = divide_gpus(
            options.processes, options.local_devices, asynchronous=options.asynchronous
        )
    except ValueError as error:
        parser.error(str(error))
    if warning:
        log(warning)
    try:
        return supervise(options)
    except OSError as error:  # memory is short, or the command too long
        print(f"error: cannot start all processes: {error}", file=sys.stderr)
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

    def add(name: str, kind: type, default: object, metavar: str, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)

    parser.add_argument("--processes", type=int, required=True, metavar="N", help="their number")
    add("--local-devices", int, 1, "L", "devices of each process (default: 1)")
    text = "after a failure, start all processes again, at most K times; not after exit status 2"
    add("--max-restarts", int, 0, "K", f"{text} (default: 0)")
    text = "before the first restart; doubles with each further failure (default: 1)"
    add("--restart-delay", float, 1, "SECONDS", text)
    text = "processes are asynchronous nodes: one that fails is started again by itself"
    parser.add_argument("--asynchronous", action="store_true", help=text)
    text = (
        "a job whose processes do not advance for this time is stuck: the launcher says where, and "
        "goes on as after a failure. Longer than the longest step or evaluation, for programs that "
        "use gx.TrainStep or call gossipjax.launch.advance() (default: not watched)"
    )
    add("--stall", float, None, "SECONDS", text)
    text = (
        "the same from the start to the first step, and where something slow is expected (default: "
        "600, or --stall if that is longer)"
    )
    add("--stall-slow", float, None, "SECONDS", text)
    text = "from SIGTERM to SIGKILL (default: 30); at most 5 after a failure"
    add("--grace", float, 30, "SECONDS", text)
    text = "processes keep memory that they free, for the next step, which is faster on CPU"
    keep = argparse.BooleanOptionalAction
    parser.add_argument("--keep-memory", action=keep, default=True, help=text)
    text = "program and its arguments"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
