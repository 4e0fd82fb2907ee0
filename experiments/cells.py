"""Runs a study: a grid of cells, each of which is measured for itself."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import results
from experiments.options import OutputOptions, parse_arguments
from experiments.program import exit_on_error
from experiments.results import Record

Options = TypeVar("Options", bound=OutputOptions)


def run_study(
    name: str,
    options_type: type[Options],
    start: Callable[[Options], tuple[Iterable[Any], Callable[..., Record]]],
    show: Callable[[Options, Sequence[Record], Path], Table],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the options, measures every cell, and prints the table.

    `start` loads the data, and returns the cells and the function that measures one. `summary.json`
    in `--out` has all records so far, so that an interrupted study loses one cell. `show` makes the
    table, and may draw into the folder.
    """
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(options_type, f"experiments.{name}", arguments)
        out = results.create_run_dir(name, options.out, options.overwrite)
        found, measure = start(options)
        cells = list(found)
        console = Console()
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            task = bar.add_task(name.replace("_", " "), total=len(cells), status="")
            for cell in cells:
                bar.update(task, status=", ".join(map(str, cell)))
                runs.append(measure(*cell))
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
                bar.advance(task)
        console.print(show(options, runs, out))


def show_seeds(values: Sequence[float], scale: float = 1.0, spec: str = ".1f") -> str:
    """Returns the mean over seeds, with the standard deviation if there are several.

    >>> show_seeds([0.5, 0.7], 100), show_seeds([2.0])
    ('60.0 ± 14.1', '2.0')
    """
    array = scale * np.asarray(values)
    spread = f" ± {array.std(ddof=1):{spec}}" if len(array) > 1 else ""
    return f"{array.mean():{spec}}{spread}"
