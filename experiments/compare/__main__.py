"""Compares methods: a grid of runs in one command, and one table of them.

    python -m experiments.compare --algorithm sgp dpsgd allreduce --topology ring exponential \\
      --dirichlet-alpha 1 0.1 --seed 0 1 2 --out runs/compare -- --dataset mnist5k --epochs 4
    python -m experiments.compare --grid methods-mini --out runs/methods

Every cell of the grid is a run of a training program with its folder in `OUT/cells`. A second call
with the same `--out` runs what is not finished. A run whose loss is not finite has diverged; one
that fails by another error is named, and the program then exits with status 1.
docs/guides/experiments.md says what the options do and what the tables show.
"""

import dataclasses
import hashlib
import itertools
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as RichProgress

from experiments import results
from experiments.compare.costs import choose_rates, find_costs, format_costs
from experiments.compare.figure import plot_curves
from experiments.compare.grids import Cell, Grid
from experiments.compare.options import CompareOptions, make_grid
from experiments.compare.table import (
    find_metric,
    format_markdown,
    is_fraction,
    print_table,
    summarize,
)
from experiments.options import parse_arguments
from experiments.program import exit_on_error
from experiments.results import describe_orders
from experiments.runner import (
    Devices,
    ProgressBar,
    Result,
    Run,
    find_devices,
    make_folder,
    make_run_bar,
    run_all,
)
from experiments.training.methods import find_source

CELLS = "cells"


class Progress(ProgressBar):
    """The bar of a comparison, which ends all runs if one has no such metric."""

    def __init__(self, grid: Grid, runs: Sequence[Run], bar: RichProgress, jobs: int):
        super().__init__(runs, bar, jobs)
        self._grid = grid

    def end(self, run: Run, result: Result) -> None:
        """Counts a run; raises `FatalError` if it has no such metric."""
        super().end(run, result)
        find_metric(self._grid, [result])


def measure(options: CompareOptions, grid: Grid, out: Path, console: Console) -> list[str]:
    """Runs the grid, and writes and prints its table; returns what failed.

    After Ctrl-C the table has what was finished.
    """
    devices = find_devices(options.jobs)
    trials: dict[Cell, Result] = {}
    ended: dict[Cell, Result] = {}
    is_whole = True
    with make_run_bar(console) as bar:
        try:
            run_cells(grid, list(grid.list_trials()), out, devices, bar, trials)
            chosen = choose_rates(grid, trials)
            # Those of the first seed have just ended.
            run_cells(grid, list(grid.list_cells(chosen)), out, devices, bar, ended)
        except KeyboardInterrupt:
            is_whole = False
            if not ended:  # what the trials have shown
                cells = grid.list_cells(choose_rates(grid, trials))
                ended |= {cell: trials[cell] for cell in cells if cell in trials}
    if ended or trials:
        write_tables(options, grid, ended, trials, out, console)
    if not is_whole:
        raise KeyboardInterrupt
    outcomes = trials | ended
    failed = [cell for cell, result in outcomes.items() if result.status == "failed"]
    return [f"{cell.name}: {outcomes[cell].error}" for cell in failed]


def run_cells(
    grid: Grid,
    cells: Sequence[Cell],
    out: Path,
    devices: Devices,
    bar: RichProgress,
    outcomes: dict[Cell, Result],
) -> None:
    """Runs cells, and adds how they ended to `outcomes`, also after Ctrl-C."""
    runs = [
        Run(cell.name, grid.program, cell.arguments, version=find_version(cell.arguments))
        for cell in cells
    ]
    if not runs:
        return
    progress = Progress(grid, runs, bar, len(devices))
    try:
        run_all(runs, out / CELLS, devices, progress)
    finally:
        # In the order of the grid, not in that in which they ended.
        results = progress.results
        outcomes |= {cell: results[cell.name] for cell in cells if cell.name in results}


def find_version(arguments: Sequence[str]) -> str:
    """Returns a digest of the files of the user's functions in these arguments; "" without any.

    A file that has changed makes another run, though its arguments are the same.
    """
    texts = [
        find_source(value.partition("@")[0], option).read_bytes()
        for option, value in itertools.pairwise(arguments)
        if option in ("--algorithm", "--task") and ":" in value
    ]
    return f"(source {hashlib.sha256(b''.join(texts)).hexdigest()[:12]})" if texts else ""


def write_tables(
    options: CompareOptions,
    grid: Grid,
    outcomes: Mapping[Cell, Result],
    trials: Mapping[Cell, Result],
    out: Path,
    console: Console,
) -> None:
    """Writes `summary.json`, the tables and the figure, and prints a table."""
    metric = find_metric(grid, [*outcomes.values(), *trials.values()])
    entries = summarize(grid, outcomes, metric)
    caption = describe(grid, metric, outcomes)
    costs = find_costs(grid, outcomes, trials, metric)
    cost_table = format_costs(costs, metric)
    text = format_markdown(grid, entries, caption)
    (out / "table.md").write_text(f"{text}\n{cost_table}")
    records = [
        {
            "row": row,
            "column": column,
            "metric": metric,
            "mean": entry.mean if entry.values else None,
        }
        | {"spread": entry.spread, **entry._asdict()}
        | costs[row, column].describe()
        for (row, column), entry in entries.items()
    ]
    results.write_summary(out, dataclasses.asdict(options), {}, records)
    print_table(grid, entries, caption, console)
    console.print(cost_table, markup=False, highlight=False, soft_wrap=True)
    plot_curves(grid, outcomes, metric, out / "curves.png")


def describe(grid: Grid, metric: str, outcomes: Mapping[Cell, Result]) -> str:
    """Returns the sentence below the table."""
    unit = ", in %" if is_fraction(metric) else ""
    seeds = f"mean ± standard deviation over {len(grid.seeds)} seed(s)"
    count = sum(outcome.status == "finished" for outcome in outcomes.values())
    total = len(list(grid.list_cells()))
    paper = f" Paper: {grid.paper.reference}, {grid.place}." if grid.paper is not None else ""
    orders = describe_orders(row.title.split(",")[0].split()[0] for row in grid.rows)
    return (
        f"{metric.capitalize()} of the average model{unit}, {seeds}; {count} of {total} runs have "
        f"finished.{paper} {orders}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs the grid, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    out = None
    failures: list[str] = []
    with exit_on_error(lambda: out):
        options = parse_arguments(CompareOptions, "experiments.compare", given[:end])
        grid = make_grid(options, given[end + 1 :])
        out = make_folder("compare", options.out, options.overwrite, CELLS)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        failures = measure(options, grid, out, Console())
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
