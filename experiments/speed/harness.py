"""What the checks share: options, the run of a check, tables, and samples."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.table import Table

from experiments import results
from experiments.options import OutputOptions
from experiments.program import ProgramError, exit_on_error
from experiments.results import Record


class Measurement(NamedTuple):
    """What a check measures, and how its result is shown."""

    description: str  # where it runs
    # what is done, and a function that does it and returns lines of `metrics.jsonl`
    cases: Sequence[tuple[str, Callable[[], list[Record]]]]
    make_table: Callable[[Sequence[Record]], Table]  # of the list `runs` of `summary.json`
    summarize: Callable[[list[Record]], list[Record]] = list  # a case's lines -> objects in `runs`
    violation: str = ""  # the error of a run whose `matches_schedule` is false


def run_check(
    name: str, options: OutputOptions, make_measurement: Callable[[], Measurement]
) -> tuple[Path, list[Record]]:
    """Runs a check: makes its folder, measures all cases, writes the files, prints the table.

    The exit status is 1 if a program exchanges something else than its schedule says. Returns the
    folder and the runs.
    """
    out = None
    with exit_on_error(lambda: out):
        measurement = make_measurement()
        out = results.create_run_dir(f"speed-{name}", options.out, options.overwrite)
        console = Console()
        runs: list[Record] = []
        with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
            task = bar.add_task(name, total=len(measurement.cases), status="")
            for status, measure in measurement.cases:
                bar.update(task, status=status)
                lines = measure()
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
                file.flush()
                runs += measurement.summarize(lines)
                environment = {"placement": measurement.description}
                results.write_summary(out, dataclasses.asdict(options), environment, runs)
                bar.advance(task)
        console.print(measurement.make_table(runs))
        console.print(f"{measurement.description}. Results: {out}", soft_wrap=True)
        if not all(run.get("matches_schedule", True) for run in runs):
            raise ProgramError(f"{measurement.violation}, got something else: see the table.")
        return out, runs


def summarize_samples(name: str, samples: ArrayLike) -> Record:
    """The median of `samples`, named `name`, and their quantiles 0.1 and 0.9.

    >>> summarize_samples("seconds", [1.0, 2.0, 3.0])
    {'seconds': 2.0, 'seconds_p10': 1.2, 'seconds_p90': 2.8}
    """
    low, median, high = np.quantile(np.asarray(samples, float), [0.1, 0.5, 0.9]).tolist()
    return {name: median, f"{name}_p10": low, f"{name}_p90": high}
