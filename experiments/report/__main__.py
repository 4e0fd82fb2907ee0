"""Repeats the papers' tables and figures in miniature, and writes what agrees.

    python -m experiments.report --quick
    python -m experiments.report --fashion-mnist FOLDER --out runs/report

Runs the programs that the sections need, several side by side, each once; with the same `--out` it
goes on where it stopped, and `--section` adds to what is there. The folder then holds `report.md`,
`report.html` (one page that needs no other file), `figures` (PNG and SVG), `summary.json`, and
`runs`, a folder for each run. A run that failed is shown with its error, and the program then exits
with status 1; one whose loss is not finite has diverged, which is a result.
"""

import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.program import exit_on_error
from experiments.report.chapters import (
    Chapter,
    find_ended,
    find_needs,
    list_runs,
    make_chapter,
    read_sections,
    remove_figures,
    remove_plots,
    write_summary,
)
from experiments.report.grid import list_once, run_grid
from experiments.report.options import RUNS, Options
from experiments.report.origin import Origin, find_origin
from experiments.report.pages import count_verdicts, format_html, format_markdown
from experiments.report.section import Scale, Section
from experiments.report.sections import SECTIONS
from experiments.results import Record
from experiments.runner import Result, find_devices, make_folder, take_runs

FIGURES = "figures"
COLORS = {"agrees": "green", "agrees in part": "yellow", "disagrees": "red", "error": "red"}


def choose_sections(options: Options) -> list[Section]:
    """Returns the sections of a report, in its order."""
    chosen = options.section or tuple(SECTIONS)
    return [section for name, section in SECTIONS.items() if name in chosen]


def print_sections(sections: Sequence[Section], scale: Scale, console: Console) -> None:
    """Prints names, titles, sources, and how many runs each needs, or which data."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("name", "title", "source", "runs: quick", "full"):
        table.add_column(column, no_wrap=column == "name")
    for section in sections:
        counts = []
        for is_quick in (True, False):
            sized = dataclasses.replace(scale, is_quick=is_quick)
            counts.append(f"{len(list_runs([section], sized)[section.name])}")
        if find_needs(section, scale):
            counts = [f"needs --{' --'.join(section.needs)}", ""]
        table.add_row(section.name, section.title, section.place, *counts)
    console.print(table)


def make_report(
    options: Options, sections: Sequence[Section], out: Path, command: str
) -> list[str]:
    """Runs everything, and writes and prints the report; returns what failed.

    Raises:
      KeyboardInterrupt: after Ctrl-C, when the report of what has ended is written.
    """
    console = Console()
    began = time.monotonic()
    runs = list_runs(sections, options.scale)
    all_runs = list_once(runs.values())
    sources = [folder / RUNS for folder in options.runs]
    taken = take_runs(all_runs, sources, out / RUNS)
    console.print(f"{len(sections)} sections, {len(all_runs)} runs. Report: {out}", soft_wrap=True)
    ended: dict[str, Result] = {}
    is_whole = True
    if all_runs:
        devices = find_devices(options.jobs)
        ended, is_whole = run_grid(all_runs, out / RUNS, devices, console, options.quick)
    remove_plots([run.name for run in all_runs], out / RUNS)
    wall_seconds = time.monotonic() - began
    entries = read_sections(out)
    remove_figures(entries, out / FIGURES)
    shown, results = add_earlier(sections, entries, ended, options.scale, out, console)
    origin = find_origin(command, options.scale, results, wall_seconds, tuple(taken))
    chapters = make_chapters(shown, results, options.scale, out / FIGURES)
    write_pages(chapters, origin, out)
    write_summary(out, options, origin, results, chapters)
    print_report(chapters, out, console)
    if not is_whole:
        raise KeyboardInterrupt
    failed = [run for run in all_runs if ended[run.name].status == "failed"]
    bugs = [f"{chapter.section.name}: {chapter.error}" for chapter in chapters if chapter.error]
    return [*(f"{run.name}: {ended[run.name].error}" for run in failed), *bugs]


def add_earlier(
    sections: Sequence[Section],
    entries: Sequence[Record],
    ended: Mapping[str, Result],
    scale: Scale,
    out: Path,
    console: Console,
) -> tuple[list[Section], dict[str, Result]]:
    """Adds the sections of an earlier call to those of this one, in the order of the report.

    Prints which cannot be shown any more, as the options of their runs were others.

    Args:
      sections, ended: of this call, with the results of their runs.
      entries: of `summary.json` of the earlier call.
      scale: of this call.
      out: the folder of the report.
      console: to print on.
    """
    chosen = {section.name for section in sections}
    names = [entry.get("section") for entry in entries]
    others = [SECTIONS[name] for name in SECTIONS if name in names and name not in chosen]
    earlier = find_ended(others, scale, out)
    lost = [section.name for section in others if section.name not in earlier]
    if lost:
        console.print(f"not shown, their runs had other options: {', '.join(lost)}", style="yellow")
    shown = [*sections, *(section for section in others if section.name in earlier)]
    results = {name: result for part in earlier.values() for name, result in part.items()}
    order = list(SECTIONS)
    return sorted(shown, key=lambda section: order.index(section.name)), results | dict(ended)


def make_chapters(
    sections: Sequence[Section], results: Mapping[str, Result], scale: Scale, folder: Path
) -> list[Chapter]:
    """Lets each section find what its runs say, and draw its figures."""
    folder.mkdir(exist_ok=True)
    runs = list_runs(sections, scale)
    return [
        make_chapter(section, runs[section.name], results, scale, folder) for section in sections
    ]


def write_pages(chapters: Sequence[Chapter], origin: Origin, out: Path) -> None:
    """Writes `report.md` and `report.html`."""
    (out / "report.md").write_text(format_markdown(chapters, origin))
    page = format_html(format_markdown(chapters, origin, suffix="svg"), out)
    (out / "report.html").write_text(page)


def print_report(chapters: Sequence[Chapter], out: Path, console: Console) -> None:
    """Prints the verdicts, and where the pages are."""
    table = Table(box=SIMPLE_HEAD, caption=count_verdicts(chapters))
    for column in ("section", "source", "verdict"):
        table.add_column(column)
    for chapter in chapters:
        color = COLORS.get(chapter.verdict.partition(" (")[0], "dim")
        verdict = f"[{color}]{chapter.verdict}[/{color}]"
        table.add_row(chapter.section.title, chapter.section.place, verdict)
    console.print(table)
    for name in ("report.html", "report.md", "summary.json"):
        console.print(f"{out / name}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs everything, and writes the report."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = None
    failures: list[str] = []
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.report",
            description=Options.__doc__,
            args=given,
        )
        sections = choose_sections(options)
        if options.list_sections:
            print_sections(sections, options.scale, Console())
            return
        out = make_folder("report", options.out, options.overwrite, RUNS)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ctrl-C is ignored in a shell's background
            signal.signal(number, signal.default_int_handler)
        command = shlex.join(["python", "-m", "experiments.report", *given])
        failures = make_report(options, sections, out, command)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
