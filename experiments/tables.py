"""Makes tables of runs for the terminal."""

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.results import Record

Cell = str | Callable[[Record], str]
"""A format of a run's fields, for example "{seconds:.2f}", or a function of the run."""


def make_table(
    title: str, caption: str, columns: Mapping[str, Cell], runs: Sequence[Record], texts: int = 1
) -> Table:
    """Makes a table with a row per run; the first `texts` columns are texts, the rest numbers."""
    table = Table(title=title, caption=caption or None, box=SIMPLE_HEAD, padding=0)
    for index, header in enumerate(columns):
        if index < texts:
            table.add_column(header, overflow="fold", min_width=6)
        else:
            table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            *(c.format(**run) if isinstance(c, str) else c(run) for c in columns.values())
        )
    return table


def scale(field: str, unit: float, digits: str) -> Cell:
    """Makes a cell with a field in other units, or "-" if a run has no such field."""
    return lambda run: "-" if run.get(field) is None else f"{run[field] / unit:{digits}}"
