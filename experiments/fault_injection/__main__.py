"""Kills processes of training jobs at random moments, and says what was lost.

    python -m experiments.fault_injection --kills 20 --processes 4
    python -m experiments.fault_injection asynchronous --kills 20 --processes 4

In lockstep (`lockstep.py`) the launcher restarts the job after each kill; in the asynchronous job
(`asynchronous.py`) the other nodes go on. Both programs write `summary.json` into `--out`, print a
table with a row per fault, and exit with status 1 if a requirement was violated. Linux only: they
find the processes in /proc.
"""

import signal
import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from experiments import results
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection import asynchronous, lockstep
from experiments.fault_injection.options import AsynchronousOptions, LockstepOptions
from experiments.program import exit_on_error

PROGRAM = "python -m experiments.fault_injection"
ASYNCHRONOUS = "asynchronous"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the faults, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_asynchronous = given[:1] == [ASYNCHRONOUS]
    out = None
    with exit_on_error(lambda: out):
        if is_asynchronous:
            program = f"{PROGRAM} {ASYNCHRONOUS}"
            options = tyro.cli(
                tyro.conf.FlagCreatePairsOff[AsynchronousOptions], prog=program, args=given[1:]
            )
        else:
            options = tyro.cli(
                tyro.conf.FlagCreatePairsOff[LockstepOptions], prog=PROGRAM, args=given
            )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with results.make_progress_bar(Console()) as bar, compilation_cache():
            if isinstance(options, AsynchronousOptions):
                violations = asynchronous.measure(options, out, bar)
            else:
                violations = lockstep.measure(options, out, bar)
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
