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

from experiments import results
from experiments.compare.grid import Cell, Grid
from experiments.compare.options import Options, describe_grids, make_grid
from experiments.compare.runner import Outcome, find_devices, remove_cells, run_cells
from experiments.compare.statistics import Entry, find_metric, is_fraction, summarize
from experiments.compare.tables import format_csv, format_latex, format_markdown, make_tables
from experiments.compilation_cache import compilation_cache
from experiments.program import exit_on_error

CELLS = "cells"


def measure(options: Options, grid: Grid, out: Path, console: Console) -> list[str]:
    """Runs the grid, and writes and prints its table; returns what failed.

    After Ctrl-C the table has what was finished.

    Raises:
      FatalError: if a run has no such metric, as soon as one has finished; or as `run_cells` does.
    """
    cells = list(grid.list_cells())
    outcomes: dict[Cell, Outcome] = {}
    devices = find_devices(options.jobs)
    try:
        with results.make_progress_bar(console) as bar, compilation_cache():
            task = bar.add_task(f"{devices.jobs} side by side", total=len(cells), status="")

            def report(cell: Cell, outcome: Outcome) -> None:
                outcomes[cell] = outcome
                status = f"{len(outcomes)} of {len(cells)}: {cell.row}, {outcome.status}"
                bar.update(task, advance=1, status=status)
                find_metric(grid, {cell: outcome})

            run_cells(grid.program, cells, out / CELLS, devices, report)
    except KeyboardInterrupt:
        if outcomes:
            write_tables(options, grid, outcomes, out, console)
        raise
    write_tables(options, grid, outcomes, out, console)
    return [
        f"{cell.name}: {outcome.error}"
        for cell, outcome in outcomes.items()
        if outcome.status == "failed"
    ]


def write_tables(
    options: Options, grid: Grid, outcomes: Mapping[Cell, Outcome], out: Path, console: Console
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


def describe(grid: Grid, metric: str, outcomes: Mapping[Cell, Outcome]) -> str:
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


def make_folder(options: Options) -> Path:
    """Makes the folder of a comparison, with one for its runs, by which a later call knows it."""
    if options.out is not None and options.overwrite:
        remove_cells(options.out / CELLS)
    is_new = options.out is None or not (options.out / CELLS).exists()
    out = results.create_run_dir("compare", options.out, options.overwrite, resume=not is_new)
    (out / CELLS).mkdir(exist_ok=not is_new)
    metrics = out / "metrics.jsonl"  # made for a run; its lines are in the runs' folders
    if not metrics.read_text():
        metrics.unlink()
    return out


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
        out = make_folder(options)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        failures = measure(options, grid, out, Console())
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
