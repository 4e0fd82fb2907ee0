"""Repeats the papers' tables and figures in miniature, and writes what agrees.

    python -m experiments.report --quick
    python -m experiments.report --fashion-mnist FOLDER --out runs/report

Runs the programs that the sections need, several side by side, each once; with the same `--out` it
goes on where it stopped. The folder then holds `report.md`, `results.md` (the claims, and what did
not hold), their figures, `summary.json`, and `runs`, a folder for each run. A run that has failed
is shown with its error, and the program then exits with status 1. A run whose loss is not finite
has diverged, which is a result.

`--kept` makes the last full report again from small files in the repository, without training.
"""

import dataclasses
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.data.idx import missing_idx_files
from experiments.data.speech import DATASET
from experiments.options import OptionalPath, RunsOptions, parse_arguments
from experiments.program import exit_on_error
from experiments.report.chapters import (
    MISSING,
    RUNS,
    Chapter,
    find_origin,
    list_runs,
    make_chapter,
    write_summary,
)
from experiments.report.keep import KEPT, keep_runs, name_data, unpack_runs
from experiments.report.pages import count_verdicts, format_report, format_results
from experiments.report.section import DATA, Scale, Section
from experiments.report.sections import SECTIONS
from experiments.runner import (
    ProgressBar,
    Result,
    Run,
    find_devices,
    find_result,
    make_folder,
    make_run_bar,
    run_all,
)

RESULTS = "results.md"
SPLITS = ("train", "valid", "test")
MAX_SECONDS = 4 * 3600.0  # of a run; the longest counts steps over 1,024 nodes
MAX_QUICK_SECONDS = 300.0
COLORS = {"agrees": "green", "agrees in part": "yellow", "disagrees": "red", "error": "red"}


@dataclasses.dataclass(frozen=True)
class ReportOptions(RunsOptions):
    """Runs the papers' experiments in miniature, and writes one report of what agrees."""

    quick: bool = False
    """Small versions of all runs: the whole report in less than ten minutes on two cores."""
    section: tuple[str, ...] = ()
    """One or several names of sections; if not given, all of them."""
    fashion_mnist: OptionalPath = None
    """Folder of the four files of Fashion-MNIST; if not given, 5,000 MNIST digits take its place.
    """
    speech: OptionalPath = None
    """Folder of speech_languages.npz; if not given, what needs it is left out."""
    translation: OptionalPath = None
    """Folder of train, valid and test files of pairs of sentences (.tsv or .tsv.gz); if not given,
    what needs them is left out."""
    keep: bool = False
    """Write the finished runs as small files into experiments/report/kept as well."""
    kept: bool = False
    """Make the report from those files, in seconds: nothing is run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.section:
            if name not in SECTIONS:
                raise ValueError(f"--section must be one of {', '.join(SECTIONS)}, got {name!r}.")
        if len(set(self.section)) < len(self.section):
            raise ValueError(f"--section must be different names, got {self.section}.")
        others = ("quick", "keep", *DATA)
        given = [f"--{name.replace('_', '-')}" for name in others if getattr(self, name)]
        if self.kept and given:
            raise ValueError(
                f"--kept must come without {', '.join(given)}: what was kept is a finished report "
                "of the full scale. Leave one of them out."
            )
        speech = list_missing(self.speech, [DATASET], [".npz"])
        pairs = list_missing(self.translation, SPLITS, [".tsv", ".tsv.gz"])
        images = missing_idx_files(self.fashion_mnist) if self.fashion_mnist else []
        for option, files, missing in (
            ("fashion-mnist", "the four files of the data set", images),
            ("speech", f"{DATASET}.npz", speech),
            ("translation", "train, valid and test.tsv or .tsv.gz", pairs),
        ):
            if missing:
                raise ValueError(
                    f"--{option} must be a folder that holds {files}, got one without "
                    f"{', '.join(missing)}: give another folder, or leave the option out."
                )

    @property
    def scale(self) -> Scale:
        """What the sections are given."""
        if self.kept:
            return name_data()
        return Scale(
            is_quick=self.quick,
            fashion_mnist=self.fashion_mnist,
            speech=self.speech,
            translation=self.translation,
        )


def list_missing(folder: Path | None, names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Returns the files that a folder has with none of the suffixes."""
    if folder is None:
        return []
    return [
        f"{name}{suffixes[0]}"
        for name in names
        if not any((folder / f"{name}{suffix}").is_file() for suffix in suffixes)
    ]


def make_report(
    options: ReportOptions, sections: Sequence[Section], out: Path, command: str
) -> list[str]:
    """Runs everything, and writes and prints the report; returns what failed.

    Raises:
      KeyboardInterrupt: after Ctrl-C, when the report of what has ended is written.
    """
    console = Console()
    began = time.monotonic()
    runs_of = list_runs(sections, options.scale)
    runs = list({run.name: run for part in runs_of.values() for run in part}.values())
    if options.kept:
        unpack_runs(out, KEPT)
    console.print(f"{len(sections)} sections, {len(runs)} runs. Report: {out}", soft_wrap=True)
    ended: dict[str, Result] = {}
    is_whole = True
    if options.kept:
        found = {run.name: find_result(run, out / RUNS / run.name) for run in runs}
        ended = {name: result or MISSING for name, result in found.items()}
    elif runs:
        ended, is_whole = run_grid(runs, options, out / RUNS, console)
    chapters = [
        make_chapter(section, runs_of[section.name], ended, options.scale, out)
        for section in sections
    ]
    wall_seconds = time.monotonic() - began
    origin = find_origin(command, options.scale, ended, wall_seconds, options.kept)
    (out / "report.md").write_text(format_report(chapters, origin))
    (out / RESULTS).write_text(format_results(chapters, origin))
    write_summary(out, dataclasses.asdict(options), origin, ended, chapters)
    if options.keep:
        keep_runs(runs, out, options.scale, KEPT)
    print_report(chapters, out, console)
    if not is_whole:
        raise KeyboardInterrupt
    failed = [run for run in runs if ended[run.name].status == "failed"]
    bugs = [f"{chapter.section.name}: {chapter.error}" for chapter in chapters if chapter.error]
    return [*(f"{run.name}: {ended[run.name].error}" for run in failed), *bugs]


def run_grid(
    runs: Sequence[Run], options: ReportOptions, folder: Path, console: Console
) -> tuple[dict[str, Result], bool]:
    """Runs what has not ended before.

    Returns:
      How each ended, by name; and whether all were run: Ctrl-C ends those that run, and keeps what
      has ended.
    """
    devices = find_devices(options.jobs)
    with make_run_bar(console) as bar:
        progress = ProgressBar(runs, bar, len(devices))
        limit = MAX_QUICK_SECONDS if options.quick else MAX_SECONDS
        try:
            run_all(runs, folder, devices, progress, replaces=True, max_seconds=limit)
        except KeyboardInterrupt:
            return progress.results, False
    return progress.results, True


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
    for name in ("report.md", RESULTS, "summary.json"):
        console.print(f"{out / name}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs everything, and writes the report."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = None
    failures: list[str] = []
    with exit_on_error(lambda: out):
        options = parse_arguments(ReportOptions, "experiments.report", given)
        chosen = options.section or tuple(SECTIONS)
        sections = [section for name, section in SECTIONS.items() if name in chosen]
        out = make_folder("report", options.out, options.overwrite, RUNS)
        for number in (signal.SIGTERM, signal.SIGINT):  # Ctrl-C is ignored in a shell's background
            signal.signal(number, signal.default_int_handler)
        command = shlex.join(["python", "-m", "experiments.report", *given])
        failures = make_report(options, sections, out, command)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
