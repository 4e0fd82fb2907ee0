"""Kills processes of training jobs at random moments, and says what was lost.

    python -m experiments.fault_injection --kills 20 --processes 4
    python -m experiments.fault_injection asynchronous --kills 20 --processes 4

In lockstep (`lockstep.py`) the launcher restarts the job after each kill; in the asynchronous job
(`asynchronous.py`) the other nodes go on. The same job also runs undisturbed. Both write
`summary.json` into `--out`, print a table with a row per fault, and exit with status 1 if a
requirement was violated. Linux only: they find the processes in /proc.
"""

import dataclasses
import operator
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress

from experiments import results
from experiments.fault_injection.asynchronous import AsynchronousJob
from experiments.fault_injection.job import ACCURACY
from experiments.fault_injection.lockstep import LockstepJob
from experiments.fault_injection.options import AsynchronousOptions, LockstepOptions
from experiments.program import exit_on_error
from experiments.tables import make_table

PROGRAM = "python -m experiments.fault_injection"
PROGRAMS: dict[str, tuple[type[Any], type[Any]]] = {
    "asynchronous": (AsynchronousOptions, AsynchronousJob),
    "": (LockstepOptions, LockstepJob),
}


def measure(make_job: Any, options: Any, out: Path, bar: Progress) -> list[str]:
    """Runs both jobs, writes `summary.json`, prints the table, and returns the violations."""
    for name in ("undisturbed", "disturbed"):  # of an earlier run, which --overwrite replaces
        shutil.rmtree(out / name, ignore_errors=True)
    task = bar.add_task("undisturbed", total=None, status=f"{1 + options.runs} runs")
    with make_job(options, out / "undisturbed", range(1 + options.runs), 0) as job:
        job.wait_for_end()
    undisturbed = results.read_summary(job.out)["runs"]
    bar.update(task, total=1, completed=1)
    task = bar.add_task(f"{options.fault}s", total=options.kills, status="")
    faults: list[Any] = []
    try:
        with make_job(options, out / "disturbed", [0], options.kills) as job:
            for fault in job.inject_faults():
                faults.append(fault)
                bar.update(task, advance=1)
    finally:
        rows = [{"": f"{number}"} | fault.make_row() for number, fault in enumerate(faults, 1)]
        columns = {name: operator.itemgetter(name) for name in (rows[0] if rows else ())}
        bar.console.print(make_table("", "", columns, rows, texts=0))
    (run,) = results.read_summary(job.out)["runs"]
    details = job.describe()
    record = {
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "disturbed": run,
        "undisturbed": undisturbed,
        **details,
        "violations": list(job.find_violations(faults, run, undisturbed, **details)),
    }
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * other[ACCURACY] for other in undisturbed]
    bar.console.print(
        f"{len(faults)} of {options.kills} {options.fault}s. Accuracy {100 * run[ACCURACY]:.2f} %; "
        f"undisturbed {min(accuracies):.2f} to {max(accuracies):.2f} %.",
        *(f"{name}: {value}" for name, value in details.items()),
        sep="\n",
        soft_wrap=True,
    )
    return record["violations"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the faults, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given and given[0] in PROGRAMS else ""
    kind, make_job = PROGRAMS[name]
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[kind], prog=f"{PROGRAM} {name}".strip(), args=given
        )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with results.make_progress_bar(Console()) as bar:
            violations = measure(make_job, options, out, bar)
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
