"""Kills processes of a training job at random moments, and compares it with uninterrupted runs.

    python -m experiments.fault_injection --kills 20 --processes 4

Trains SGP with `experiments.image` under `python -m gossipjax.launch`, a node per process, and
sends SIGKILL to random processes at random moments: during training, while a checkpoint is being
written, and while the processes start. After each kill the launcher restarts the job. The job must
end, must resume each time from the newest complete checkpoint, and must have the same result as the
same job without kills, bit for bit, while runs with other seeds must have another one. With
`--fault stop` the processes get SIGSTOP instead, and the launcher, with `--stall`, must notice. A
kill whose moment comes after the end of the job is left out. The program writes `summary.json` into
`--out`, prints a table with a row per kill, and exits with status 1 if a requirement was violated.
Linux only: it finds the processes in /proc.
"""

import dataclasses
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import results
from experiments.compilation_cache import compilation_cache
from experiments.fault_injection.kills import Kill, find_violations, inject_kills
from experiments.fault_injection.options import Options
from experiments.fault_injection.supervised_run import SupervisedRun
from experiments.program import exit_on_error


def make_table(kills: list[Kill]) -> Table:
    """Makes a table with a row per kill."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for header in ("kill", "seconds", "process"):
        table.add_column(header, justify="right")
    table.add_column("phase", no_wrap=True)
    table.add_column("while\nsaving")
    steps = ("step\nlogged", "newest\nsaved", "resumed\nfrom", "steps\nlost")
    for header in (*steps, "restart\nafter (s)"):
        table.add_column(header, justify="right")
    for number, kill in enumerate(kills, start=1):
        resumed_from = "-"
        lost = "-"
        if kill.resumed_from is not None:
            resumed_from = f"{kill.resumed_from}"
            lost = f"{kill.logged_step - kill.resumed_from}"
        table.add_row(
            f"{number}",
            f"{kill.seconds:.1f}",
            f"{kill.process_id}",
            kill.phase,
            "yes" if kill.saving else "",
            f"{kill.logged_step}",
            f"{kill.saved_step}",
            resumed_from,
            lost,
            f"{kill.restart_seconds:.1f}",
        )
    return table


def measure(options: Options, out: Path, console: Console) -> list[str]:
    """Runs both jobs, writes `summary.json`, prints the table, and returns the violations.

    Raises:
      JobError: if a job fails or hangs.
    """
    kills: list[Kill] = []
    with results.make_progress_bar(console) as bar, compilation_cache():
        task = bar.add_task("uninterrupted", total=None, status=f"{1 + options.runs} runs")
        with SupervisedRun(options, out / "uninterrupted", range(1 + options.runs), 0) as run:
            run.wait_for_end()
        bar.update(task, total=1, completed=1)
        task = bar.add_task("kills", total=options.kills, status="")

        def report_progress(kill: Kill) -> None:
            bar.update(task, advance=1, status=f"after step {kill.logged_step}, {kill.phase}")

        try:
            with SupervisedRun(options, out / "killed", [0], options.kills) as run:
                inject_kills(options, run, random.Random(options.seed), kills, report_progress)
        finally:
            console.print(make_table(kills))
    uninterrupted = results.read_summary(out / "uninterrupted")["runs"]
    (killed,) = results.read_summary(out / "killed")["runs"]
    violations = find_violations(options, kills, killed, uninterrupted)
    record = {
        "kills": [dataclasses.asdict(kill) for kill in kills],
        "killed": killed,
        "uninterrupted": uninterrupted,
        "violations": violations,
    }
    results.write_summary(out, dataclasses.asdict(options), {}, [record])
    accuracies = [100 * run["test_accuracy_average_model"] for run in uninterrupted]
    console.print(
        f"{len(kills)} of {options.kills} {options.fault}s of "
        f"{options.processes} processes, "
        f"{sum(kill.saving for kill in kills)} while a checkpoint was written; "
        f"{options.steps} steps, a checkpoint every {options.checkpoint_every}. "
        f"Final accuracy {100 * killed['test_accuracy_average_model']:.2f} %; without "
        f"{accuracies[0]:.2f} %, with other seeds {min(accuracies[1:]):.2f} to "
        f"{max(accuracies[1:]):.2f} %.",
        soft_wrap=True,
    )
    return violations


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, injects the kills, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.fault_injection",
            description="Kills processes of a training job at random moments.",
            args=arguments,
        )
        out = results.create_run_dir("fault-injection", options.out, options.overwrite)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        violations = measure(options, out, Console())
    if violations:
        sys.exit("\n".join(["violated:", *violations]))
    print("no requirement was violated")


if __name__ == "__main__":
    main()
