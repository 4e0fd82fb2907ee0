"""Compares methods: a grid of runs in one command, and one table of them.

    python -m experiments.compare --algorithm sgp dpsgd allreduce --topology ring exponential \\
      --dirichlet-alpha 1 0.1 --seed 0 1 2 --out runs/compare -- --dataset mnist5k --epochs 4
    python -m experiments.compare --grid relaysgd-table2-mini --out runs/relaysgd

Every cell of the grid is a run of a training program, `--jobs` of them side by side, each with its
folder in `OUT/cells`. Run it again with the same `--out`, and only what is not finished is run. The
table has mean and standard deviation over the seeds, the best of each column marked, and the
paper's figures beside them; `table.md`, `table.tex` and `table.csv` hold it, `summary.json` all of
it. A run whose loss is not finite has diverged, and is counted as such; one that fails by another
error is named, and the program then exits with status 1.
"""

import dataclasses
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress as RichProgress

from experiments import results
from experiments.compare.grid import Cell, Grid
from experiments.compare.options import Options, describe_grids, make_grid
from experiments.compare.table import (
    Entry,
    find_metric,
    format_csv,
    format_latex,
    format_markdown,
    is_fraction,
    make_tables,
    summarize,
)
from experiments.compilation_cache import compilation_cache
from experiments.program import exit_on_error
from experiments.runner import Result, Run, find_devices, make_folder, run_all

CELLS = "cells"


class Progress:
    """The bar of a comparison; it keeps what has ended."""

    def __init__(self, grid: Grid, bar: RichProgress, jobs: int):
        self.outcomes: dict[Cell, Result] = {}
        self._grid = grid
        self._cells = {cell.name: cell for cell in grid.list_cells()}
        self._bar = bar
        self._task = bar.add_task(f"{jobs} side by side", total=len(self._cells), status="")

    def begin(self, run: Run) -> None:
        return

    def end(self, run: Run, result: Result) -> None:
        """Counts a run; raises `FatalError` if it has no such metric."""
        cell = self._cells[run.name]
        self.outcomes[cell] = result
        status = f"{len(self.outcomes)} of {len(self._cells)}: {cell.row}, {result.status}"
        self._bar.update(self._task, advance=1, status=status)
        find_metric(self._grid, {cell: result})


def measure(options: Options, grid: Grid, out: Path, console: Console) -> list[str]:
    """Runs the grid, and writes and prints its table; returns what failed.

    After Ctrl-C the table has what was finished.

    Raises:
      FatalError: if a run has no such metric, as soon as one has finished; or as `run_all` does.
    """
    devices = find_devices(options.jobs)
    with results.make_progress_bar(console) as bar, compilation_cache():
        progress = Progress(grid, bar, devices.jobs)
        runs = [Run(cell.name, grid.program, cell.arguments) for cell in grid.list_cells()]
        try:
            run_all(runs, out / CELLS, devices, progress)
        except KeyboardInterrupt:
            if progress.outcomes:
                write_tables(options, grid, progress.outcomes, out, console)
            raise
    # In the order of the grid, not in that in which they ended.
    outcomes = {cell: progress.outcomes[cell] for cell in grid.list_cells()}
    write_tables(options, grid, outcomes, out, console)
    return [
        f"{cell.name}: {outcome.error}"
        for cell, outcome in outcomes.items()
        if outcome.status == "failed"
    ]


def write_tables(
    options: Options, grid: Grid, outcomes: Mapping[Cell, Result], out: Path, console: Console
) -> None:
    """Writes `summary.json` and the tables, and prints one."""
    metric = find_metric(grid, outcomes)
    entries = summarize(grid, outcomes, metric)
    caption = describe(grid, metric, outcomes)
    (out / "table.md").write_text(format_markdown(grid, entries, caption))
    (out / "table.tex").write_text(format_latex(grid, entries, caption))
    (out / "table.csv").write_text(format_csv(grid, entries, metric))
    records = [make_record(key, entry, metric) for key, entry in entries.items()]
    results.write_summary(out, dataclasses.asdict(options), {}, records)
    for table in make_tables(grid, entries, caption, console):
        console.print(table, crop=False)


def describe(grid: Grid, metric: str, outcomes: Mapping[Cell, Result]) -> str:
    """Returns the sentence below the table."""
    unit = ", in %" if is_fraction(metric) else ""
    seeds = f"mean ± standard deviation over {len(grid.seeds)} seed(s)"
    count = sum(outcome.status == "finished" for outcome in outcomes.values())
    total = len(list(grid.list_cells()))
    paper = ""
    if grid.paper is not None:
        paper = f" Paper: {grid.paper.reference}, {grid.place}."
    note = f" {grid.note}" if grid.note else ""
    return (
        f"{metric.capitalize()} of the average model{unit}, {seeds}; {count} of {total} runs have "
        f"finished.{note}{paper}"
    )


def make_record(key: tuple[str, str], entry: Entry, metric: str) -> results.Record:
    """Returns the entry of a cell of the table in `summary.json`."""
    row, column = key
    numbers = {"mean": entry.mean if entry.values else None, "spread": entry.spread}
    return {"row": row, "column": column, "metric": metric, **numbers} | entry._asdict()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs the grid, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    out = None
    failures: list[str] = []
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.compare",
            description=Options.__doc__,
            args=given[:end],
        )
        if options.list_grids:
            print(describe_grids())
            return
        grid = make_grid(options, given[end + 1 :])
        out = make_folder("compare", options.out, options.overwrite, CELLS)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        failures = measure(options, grid, out, Console())
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
