"""Lists the presets, with the figures of the papers.

    python -m experiments.presets
    python -m experiments.presets --name sgp19-table1-sgp-32

`--name` prints everything about one.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.options import option_name
from experiments.presets.preset import Preset
from experiments.presets.registry import PRESETS, find_preset
from experiments.program import exit_on_error


@dataclasses.dataclass(frozen=True)
class PresetOptions:
    """Lists the presets: recipes and figures of published rows."""

    name: str | None = None
    """Print everything about this preset."""


def print_list(console: Console) -> None:
    """Prints a table for each table of a paper, below its source, its task and a command.

    The command, of the first row, has the program of all.
    """
    reference = None
    for _, group in itertools.groupby(PRESETS.values(), lambda one: (one.source, one.task)):
        rows = list(group)
        first = rows[0]
        if first.paper and first.paper.reference != reference:
            reference = first.paper.reference
            console.print(Text(f"{first.paper.name}: {reference}\n"))
        title = f"{first.source or 'of no paper'}: {first.task}"
        console.print(Text(title, style="bold"))
        console.print(Text(f"$ {first.command}", style="dim"), soft_wrap=True)
        table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
        table.add_column("preset", no_wrap=True)
        table.add_column("what")
        table.add_column("paper's figure")
        for preset in rows:
            table.add_row(preset.name, preset.method, preset.figure or "-")
        console.print(table)
        console.print()
    console.print("--name NAME prints all of one.")


def print_details(preset: Preset, console: Console) -> None:
    """Prints everything about a preset: what is published, and its options."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in (
        ("preset", preset.name),
        ("trains", f"{preset.task}: {preset.method}"),
        ("figure", preset.figure or "none"),
        ("source", preset.source or "none"),
        ("", preset.paper.reference if preset.paper else "-"),
        ("hardware", preset.hardware or "two cores, in minutes"),
        *((option_name(name), f"{value}") for name, value in preset.options.items()),
        *(("note", note) for note in preset.notes),
    ):
        table.add_row(label, text)
    console.print(table)
    console.print(Text(f"\n{preset.command}", style="bold"), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, and prints."""
    console = Console(highlight=False)
    with exit_on_error():
        options = tyro.cli(PresetOptions, prog="python -m experiments.presets", args=arguments)
        if options.name is None:
            print_list(console)
        else:
            print_details(find_preset(options.name), console)


if __name__ == "__main__":
    main()
