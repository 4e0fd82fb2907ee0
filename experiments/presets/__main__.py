"""Lists the presets, with the figures of the papers.

    python -m experiments.presets
    python -m experiments.presets --match table1
    python -m experiments.presets --name sgp19-table1-sgp-32

`--match` lists some of them, with the exact commands; `--name` prints everything about one.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.options import option_name
from experiments.presets.preset import Preset, Program
from experiments.presets.registry import PRESETS, find_preset
from experiments.program import exit_on_error


@dataclasses.dataclass(frozen=True)
class PresetOptions:
    """Lists the presets: recipes and figures of published rows."""

    name: str | None = None
    """Print everything about this preset."""
    match: str | None = None
    """List those with this text in name, description or source, whatever the case."""
    program: Program | None = None
    """List those of this program."""

    def is_met(self, preset: Preset) -> bool:
        """Whether a preset is to be listed."""
        text = f"{preset.name} {preset.description} {preset.source}".lower()
        is_match = self.match is None or self.match.lower() in text
        return is_match and self.program in (None, preset.program)


def print_list(presets: Iterable[Preset], console: Console) -> None:
    """Prints a table for each table of a paper, below its source, its task and a command.

    The command, of the first row, has the program of all.
    """
    reference = None
    for _, group in itertools.groupby(presets, lambda preset: (preset.source, preset.task)):
        rows = list(group)
        first = rows[0]
        if first.paper and first.paper.reference != reference:
            reference = first.paper.reference
            console.print(Text(f"{first.paper.name}: {reference}\n"))
        title = f"{first.source or 'of no paper'}: {first.task}"
        console.print(Text(title, style="bold"))
        console.print(Text(f"$ {first.command}", style="dim"), soft_wrap=True)
        console.print(make_table(rows))
        console.print()


def make_table(presets: Sequence[Preset]) -> Table:
    """Returns a table with a row per preset."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("what")
    table.add_column("paper's figure")
    for preset in presets:
        table.add_row(preset.name, preset.method, preset.figure or "-")
    return table


def print_details(preset: Preset, console: Console) -> None:
    """Prints everything about a preset: what is published, and its options."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = [
        ("preset", preset.name),
        ("trains", preset.description),
        ("figure", preset.figure or "none"),
        ("source", preset.source or "none"),
        ("", preset.paper.reference if preset.paper else ""),
        ("hardware", preset.hardware or "two cores, in minutes"),
        *((option_name(name), f"{value}") for name, value in preset.options.items()),
        *(("note" if number == 0 else "", note) for number, note in enumerate(preset.notes)),
    ]
    for label, text in rows:
        if text:
            table.add_row(label, text)
    console.print(table)
    console.print(Text(f"\n{preset.command}", style="bold"), soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, and prints."""
    console = Console(highlight=False)
    with exit_on_error():
        options = tyro.cli(PresetOptions, prog="python -m experiments.presets", args=arguments)
        if options.name is not None:
            print_details(find_preset(options.name), console)
            return
        presets = [preset for preset in PRESETS.values() if options.is_met(preset)]
        if not presets:
            raise ValueError(
                f"--match and --program must fit one preset or more, got {options.match!r} and "
                f"{options.program}: run it without them."
            )
        print_list(presets, console)
        if len(presets) < len(PRESETS):
            for preset in presets:
                console.print(Text(preset.command), soft_wrap=True)
        else:
            console.print("--match TEXT and --program list some, --name NAME prints all of one.")


if __name__ == "__main__":
    main()
