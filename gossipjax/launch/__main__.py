"""Command line of the launcher: `python -m gossipjax.launch --processes N -- COMMAND ...`."""

from __future__ import annotations

import argparse
import contextlib
import sys

from gossipjax.launch._check import check, listen
from gossipjax.launch._devices import divide_gpus
from gossipjax.launch._job import supervise

SLOW_SECONDS = 600.0  # for the start, and for anything that a program calls slow
MINIMA = {"processes": 1, "local_devices": 1, "stall": 0.1}  # of all other numbers it is 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (default: `sys.argv[1:]`); returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.processes is None:
        return check_or_listen(parser, options)
    for name, value in vars(options).items():
        minimum = MINIMA.get(name, 0)
        if isinstance(value, int | float) and not value >= minimum:  # also refuses nan
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} must be at least {minimum}, got {value}")
    if options.stall_slow is None:
        options.stall_slow = max(SLOW_SECONDS, options.stall or 0)
    elif options.stall is None:
        parser.error(f"--stall-slow must come with --stall, got {options.stall_slow:g} alone")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("the line must end with -- and a command, got no command: -- python train.py")
    try:
        options.gpu_variables = divide_gpus(
            options.processes, options.local_devices, asynchronous=options.asynchronous
        )
    except ValueError as error:
        parser.error(str(error))
    return supervise(options)


def check_or_listen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Checks the path to another machine, or answers its checks; returns the exit status."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            problem = check(options.check) if options.check else listen(options.listen)
        except ValueError as error:
            parser.error(str(error))
        if problem:
            print(f"gossipjax: {problem}.", file=sys.stderr)
            return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line of the launcher."""
    parser = argparse.ArgumentParser(
        prog="python -m gossipjax.launch",
        usage="%(prog)s --processes N [options] -- COMMAND ...\n"
        "       %(prog)s --check HOST:PORT\n       %(prog)s --listen HOST:PORT",
        description="Run COMMAND in N processes on this machine, as one job. If a process fails, "
        "the others are stopped. docs/guides/launcher.md says more.",
        epilog="Exit status: 0, that of the process that failed first, or 128 + the number of the "
        "signal. GPUs are divided among the processes; with too few, set JAX_PLATFORMS=cpu.",
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--processes", type=int, metavar="N", help="their number")
    text = "check the path to a machine that listens by --listen, and start nothing"
    what.add_argument("--check", metavar="HOST:PORT", help=text)
    text = "answer those who check the path to this machine, until Ctrl-C"
    what.add_argument("--listen", metavar="HOST:PORT", help=text)
    text = "devices of each process (default: 1)"
    add("--local-devices", type=int, default=1, metavar="L", help=text)
    text = "after a failure, start all processes again, at most K times (default: 0)"
    add("--max-restarts", type=int, default=0, metavar="K", help=f"{text}; not after 2, 64, 78")
    text = "before the first restart; doubles with each further failure (default: 1)"
    add("--restart-delay", type=float, default=1.0, metavar="SECONDS", help=text)
    text = "processes are asynchronous nodes: one that fails is started again by itself"
    add("--asynchronous", action="store_true", help=text)
    text = (
        "a job whose processes do not advance for this time is stuck: the launcher says where, and "
        "goes on as after a failure. Longer than the longest step or evaluation, for programs that "
        "use gx.TrainStep or call gossipjax.launch.advance() (default: not watched)"
    )
    add("--stall", type=float, metavar="SECONDS", help=text)
    text = (
        "the same from the start to the first step, and where something slow is expected (default: "
        "600, or --stall if that is longer)"
    )
    add("--stall-slow", type=float, metavar="SECONDS", help=text)
    text = "from SIGTERM to SIGKILL (default: 30); at most 5 after a failure"
    add("--grace", type=float, default=30.0, metavar="SECONDS", help=text)
    text = "processes keep memory that they free, for the next step, which is faster on CPU"
    add("--keep-memory", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "program and its arguments"
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
