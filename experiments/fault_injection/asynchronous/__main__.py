"""Kills and stops nodes that wait for nobody, and looks at the others, the result and the weight.

    python -m experiments.fault_injection.asynchronous --kills 20 --processes 4

Trains `async-sgp` or `async-adpsgd` with `experiments.image` under `python -m gossipjax.launch
--asynchronous`; its computation is a sleep in each step, as of devices that do not share these
cores. One job has its processes killed: SIGKILL to a random one, some seconds after the one before
was back; the launcher starts it again, and it joins anew. In another job a process is stopped for
`--stop-seconds` (SIGSTOP), and goes on (SIGCONT). A third job is undisturbed, with other seeds.

Required: the others never stop, and their median step takes as long as before, within 5 %; a node
is back within 10 s of its restart, or its going on; the account of the weight (living, on its way,
dead) closes to 1e-6; the accuracy is that of the undisturbed runs, within their spread. The program
writes `summary.json` into `--out`, prints a row per kill and stop, and exits with status 1 if a
requirement was violated. Linux only: it finds the processes in /proc.
"""

import dataclasses
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import Progress

from experiments import results
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection.asynchronous.faults import inject_faults
from experiments.fault_injection.asynchronous.job import AsynchronousJob
from experiments.fault_injection.asynchronous.kills import kill_node
from experiments.fault_injection.asynchronous.options import Options
from experiments.fault_injection.asynchronous.requirements import (
    ACCURACY,
    check_kills,
    check_result,
    check_stops,
)
from experiments.fault_injection.asynchronous.stops import stop_node
from experiments.fault_injection.asynchronous.tables import make_kills_table, make_stops_table
from experiments.program import exit_on_error
from experiments.results import Record

FAULTS = {
    "kills": (kill_node, make_kills_table, check_kills),
    "stops": (stop_node, make_stops_table, check_stops),
}
UNDISTURBED = "undisturbed"


def measure(options: Options, out: Path, console: Console) -> list[str]:
    """Runs the jobs, writes `summary.json`, prints the tables, and returns the violations.

    Raises:
      JobError: if a job fails or hangs.
    """
    counts = {"kills": options.kills, "stops": options.stops}
    with results.make_progress_bar(console) as bar, compilation_cache():
        undisturbed = run_undisturbed(options, out, bar)
        records = [
            run_disturbed(name, count, options, out, undisturbed, bar)
            for name, count in counts.items()
            if count
        ]
    record = {UNDISTURBED: undisturbed} | {record["name"]: record for record in records}
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * run[ACCURACY] for run in undisturbed]
    for record in records:
        account = record["account"]
        console.print(
            f"{len(record['faults'])} {record['name']} in {record['run']['steps']:,} steps of each "
            f"of {options.processes} nodes, on average. Accuracy of the average model "
            f"{100 * record['run'][ACCURACY]:.2f} %; undisturbed, with other seeds, "
            f"{min(accuracies):.2f} to {max(accuracies):.2f} %. Weight: "
            f"{sum(account['living'].values()):.6f} living, {account['in_flight']:.6f} on its way, "
            f"{account['dead']:.6f} of the dead, of {account['founded']:g}; the difference is "
            f"{account['difference']:.1e}.",
            soft_wrap=True,
        )
    return [violation for record in records for violation in record["violations"]]


def run_undisturbed(options: Options, out: Path, bar: Progress) -> list[Record]:
    """Runs the job without faults; returns the entries of its runs."""
    task = bar.add_task(UNDISTURBED, total=None, status=f"{options.runs} runs")
    seeds = range(options.seed + 1, options.seed + 1 + options.runs)
    with AsynchronousJob(options, out / UNDISTURBED, seeds, 0) as job:
        job.wait_for_end()
    bar.update(task, total=1, completed=1)
    return job.read_runs()


def run_disturbed(
    name: str, count: int, options: Options, out: Path, undisturbed: list[Record], bar: Progress
) -> Record:
    """Runs the job with kills or stops; returns what happened, and what was violated."""
    make_fault, make_table, check = FAULTS[name]
    task = bar.add_task(name, total=count, status="")
    faults: list[Any] = []
    start = time.time()

    def report(fault: Any) -> None:
        bar.update(task, advance=1, status=f"node {fault.place}")

    max_restarts = count if name == "kills" else 0
    try:
        with AsynchronousJob(options, out / name, [options.seed], max_restarts) as job:
            inject_faults(options, job, faults, count, make_fault, report)
    finally:
        bar.console.print(make_table(faults, start))
    (run,) = job.read_runs()
    account = job.add_up()
    return {
        "name": name,
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "run": run,
        "account": account._asdict() | {"difference": account.difference},
        "violations": [
            *check(faults, count),
            *check_result(name, run, undisturbed, account),
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the faults, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.fault_injection.asynchronous",
            description="Kills and stops nodes that wait for nobody at random moments.",
            args=arguments,
        )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        for name in (*FAULTS, UNDISTURBED):
            shutil.rmtree(out / name, ignore_errors=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        violations = measure(options, out, Console())
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
