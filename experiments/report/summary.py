"""The report as data: `summary.json`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import results
from experiments.report.chapters import Chapter
from experiments.report.options import RUNS, Options
from experiments.report.pages.origin import Origin
from experiments.report.section import Result, Run
from experiments.results import Record


def write_summary(
    out: Path,
    options: Options,
    origin: Origin,
    ended: Mapping[str, Result],
    chapters: Sequence[Chapter],
) -> None:
    """Writes `summary.json`: `runs` with how each ended, `sections` with what each has found."""
    runs = {run.name: run for chapter in chapters for run in chapter.runs}
    results.write_summary(
        out,
        dataclasses.asdict(options),
        origin._asdict(),
        [make_run_record(run, ended.get(run.name)) for run in runs.values()],
        sections=[make_section_record(chapter) for chapter in chapters],
    )


def make_run_record(run: Run, result: Result | None) -> Record:
    """Returns the entry of a run."""
    return {
        "run": run.name,
        "command": run.command,
        "is_alone": run.is_alone,
        "status": result.status if result else "missing",
        "error": result.error if result else "",
        "seconds": result.seconds if result else 0.0,
        "folder": f"{RUNS}/{run.name}",
    }


def make_section_record(chapter: Chapter) -> Record:
    """Returns the entry of a section."""
    findings = chapter.findings
    return {
        "section": chapter.section.name,
        "title": chapter.section.title,
        "source": chapter.section.source,
        "verdict": chapter.verdict,
        "sentence": chapter.sentence,
        "claims": [claim._asdict() for claim in findings.claims] if findings else [],
        "tables": [table._asdict() for table in findings.tables] if findings else [],
        "figures": [f"figures/{drawing.png.name}" for drawing in chapter.drawings],
        "runs": [run.name for run in chapter.runs],
        "error": chapter.error,
    }
