"""Command line of the launcher: `python -m gossipjax.launch --processes N -- COMMAND ...`."""

from __future__ import annotations

import argparse
import math
import shutil
import sys

from gossipjax.launch._supervisor import JobSpec, supervise


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of the process). Return the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    require_at_least(parser, "--processes", options.processes, 1)
    require_at_least(parser, "--local-devices", options.local_devices, 1)
    require_at_least(parser, "--max-restarts", options.max_restarts, 0)
    require_at_least(parser, "--grace", options.grace, 0)
    if options.elastic and not options.max_restarts:
        parser.error("--elastic applies to restarts: give --max-restarts, too")
    if not command:
        parser.error("no command: end with -- and the command, as in -- python train.py")
    if shutil.which(command[0]) is None:
        parser.error(f"command not found, or not executable: {command[0]}")
    job = JobSpec(command, options.processes, options.local_devices, options.grace)
    return supervise(job, options.max_restarts, options.elastic)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gossipjax.launch",
        usage="%(prog)s --processes N [options] -- COMMAND ...",
        description="Run COMMAND in N processes on this machine, as one job. If a process fails, "
        "the others are stopped. SIGTERM and Ctrl-C are passed on as SIGTERM, so that the "
        "processes can save.",
        epilog="Exit status: 0, that of the process that failed first, or 128 + the number of the "
        "signal. Accelerators are divided among the processes, --local-devices for each; without "
        "enough of them, set JAX_PLATFORMS=cpu.",
    )
    parser.add_argument(
        "--processes", type=int, required=True, metavar="N", help="number of processes"
    )
    parser.add_argument(
        "--local-devices",
        type=int,
        default=1,
        metavar="L",
        help="devices of each process (default: 1)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="after a failure, start all processes again, at most K times; not after exit status "
        "2, which means that the program would fail again. The program reads GOSSIPJAX_RESTART "
        "and GOSSIPJAX_JOB (default: 0)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="restart on the surviving processes only; gossipjax.launch.surviving_nodes gives the "
        "number of nodes",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30,
        metavar="SECONDS",
        help="from SIGTERM to SIGKILL (default: 30); at most 5 after a failure, when the other "
        "processes have nothing that they could save",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="program and its arguments"
    )
    return parser


def require_at_least(
    parser: argparse.ArgumentParser, option: str, value: float, minimum: int
) -> None:
    if not minimum <= value < math.inf:
        parser.error(f"{option} must be a finite number >= {minimum}, got {value}")


if __name__ == "__main__":
    sys.exit(main())
