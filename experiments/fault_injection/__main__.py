"""Kills processes of training jobs at random moments, and says what was lost.

    python -m experiments.fault_injection --kills 20 --processes 4
    python -m experiments.fault_injection asynchronous --kills 20 --processes 4

In lockstep (`lockstep.py`) the launcher restarts the job after each kill; in the asynchronous job
(`asynchronous.py`) the other nodes go on. Both write `summary.json` into `--out`, print a table
with a row per fault, and exit with status 1 if a requirement was violated. Linux only: they find
the processes in /proc.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import Console

from experiments import results
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection import asynchronous, lockstep
from experiments.fault_injection.options import AsynchronousOptions, LockstepOptions
from experiments.program import exit_on_error

PROGRAM = "python -m experiments.fault_injection"
PROGRAMS: dict[str, tuple[type[Any], Callable[..., list[str]]]] = {
    "asynchronous": (AsynchronousOptions, asynchronous.measure),
    "": (LockstepOptions, lockstep.measure),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the faults, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and given[0] in PROGRAMS else ""
    kind, measure = PROGRAMS[name]
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[kind], prog=f"{PROGRAM} {name}".strip(), args=given
        )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with results.make_progress_bar(Console()) as bar, compilation_cache():
            violations = measure(options, out, bar)
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
