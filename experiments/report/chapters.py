"""A section with its runs and what it has found: what the pages show and `summary.json` holds."""

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import results as result_files
from experiments.report.drawing import Drawing, draw_figures
from experiments.report.options import RUNS, Options
from experiments.report.origin import Origin
from experiments.report.section import Findings, Scale, Section, judge
from experiments.results import LIST, Record, parse_object, read_text
from experiments.runner import Result, Run, Status, find_result, is_run

MISSING = Result(status="missing")
SUMMARY = "summary.json"
DATA = {
    "speech": "--speech, the folder of speech_languages.npz",
    "translation": "--translation, the folder of pairs of sentences",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chapter:
    """A section and its results.

    Attributes:
      section: what it is.
      text: what is done at the scale of the report.
      runs: that it asked for.
      results: how each of them ended, by name.
      findings: what it says; None if it could not say it.
      drawings: its figures.
      needs: options without which it was left out.
      error: the last line of the traceback of a bug in it; "" without one.
    """

    section: Section
    text: str = ""
    runs: tuple[Run, ...] = ()
    results: Mapping[str, Result] = dataclasses.field(default_factory=dict)
    findings: Findings | None = None
    drawings: tuple[Drawing, ...] = ()
    needs: tuple[str, ...] = ()
    error: str = ""

    @property
    def verdict(self) -> str:
        """The verdict, with the numbers of claims."""
        if self.findings is None:
            return "error" if self.error else "left out"
        verdicts = [judge(claim) for claim in self.findings.claims]
        unknown = verdicts.count(None)
        if unknown == len(verdicts):
            return self.findings.verdict
        rest = f", {unknown} not judged" if unknown else ""
        return f"{self.findings.verdict} ({verdicts.count(True)} of {len(verdicts)}{rest})"

    @property
    def sentence(self) -> str:
        """What is known of the causes where claims do not hold; or why there are none."""
        if self.needs:
            return f"Left out: it needs {' and '.join(self.needs)}."
        if self.findings is None:
            return "Its runs could not be read, which is a bug of this section."
        failed = [claim for claim in self.findings.claims if judge(claim) is False]
        return " ".join(dict.fromkeys(claim.if_not for claim in failed if claim.if_not))

    def list_names(self, status: Status) -> list[str]:
        """Returns the names of the runs that ended so."""
        return [run.name for run in self.runs if self.results[run.name].status == status]


def find_needs(section: Section, scale: Scale) -> tuple[str, ...]:
    """Returns the options without which a section has nothing to find."""
    return tuple(DATA[name] for name in section.needs if getattr(scale, name) is None)


def list_runs(sections: Sequence[Section], scale: Scale) -> dict[str, tuple[Run, ...]]:
    """Returns the runs of each section by its name; none of a section that is left out.

    Raises:
      RuntimeError: if two runs have one name; a bug of the sections.
    """
    runs: dict[str, tuple[Run, ...]] = {}
    by_name: dict[str, Run] = {}
    for section in sections:
        runs[section.name] = ()
        if not find_needs(section, scale):
            runs[section.name] = tuple(section.list_runs(scale))
        for run in runs[section.name]:
            other = by_name.setdefault(run.name, run)
            if other != run:
                raise RuntimeError(
                    f"a name must be that of one run, got {run.name} for `{run.command}` and "
                    f"`{other.command}`."
                )
    return runs


def make_chapter(
    section: Section, runs: Sequence[Run], results: Mapping[str, Result], scale: Scale, folder: Path
) -> Chapter:
    """Lets a section find what its runs say, and draws its figures.

    An error of the section is a bug, which is shown: the other sections are made all the same.

    Args:
      section: what it is.
      runs: those that it asked for.
      results: of all runs that have ended, by name.
      scale: of the report.
      folder: receives the figures.
    """
    ended = {run.name: results.get(run.name, MISSING) for run in runs}
    needs = find_needs(section, scale)
    text = section.write_text(scale)
    chapter = Chapter(section=section, text=text, runs=tuple(runs), results=ended, needs=needs)
    if needs:
        return chapter
    try:
        findings = section.find(scale, ended)
        chapter = dataclasses.replace(chapter, findings=findings)
        drawings = draw_figures(section.name, findings.figures, folder)
        return dataclasses.replace(chapter, drawings=drawings)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = traceback.format_exception_only(error)[-1].strip()
        place = f"{Path(last.filename).name}, line {last.lineno}"
        return dataclasses.replace(chapter, error=f"{message} ({place})")


def read_sections(out: Path) -> list[Record]:
    """Returns the entries of the sections in `summary.json`; none if it is not there or damaged."""
    path = out / SUMMARY
    try:
        summary = parse_object(read_text(path), f"{path}", {"sections": LIST})
    except (FileNotFoundError, ValueError):
        return []
    return [entry for entry in summary["sections"] if isinstance(entry, dict)]


def find_ended(
    sections: Sequence[Section], scale: Scale, out: Path
) -> dict[str, dict[str, Result]]:
    """Returns the results of those sections all of whose runs have ended in earlier calls.

    Args:
      sections: that are not run in this call.
      scale: of the report; runs of another scale are other calls.
      out: the folder of the report.
    """
    ended: dict[str, dict[str, Result]] = {}
    for name, runs in list_runs(sections, scale).items():
        found = {run.name: find_result(run, out / RUNS / run.name) for run in runs}
        results = {run: result for run, result in found.items() if result is not None}
        if len(results) == len(runs):
            ended[name] = results
    return ended


def remove_figures(entries: Sequence[Record], folder: Path) -> None:
    """Removes the figures that `summary.json` names, and nothing else."""
    for entry in entries:
        for name in entry.get("figures", ()):
            for suffix in (".png", ".svg"):
                (folder / Path(name).name).with_suffix(suffix).unlink(missing_ok=True)


def remove_plots(names: Sequence[str], folder: Path) -> None:
    """Removes the plots of a report's runs, which `experiments.plots` makes again."""
    for name in names:
        if is_run(folder / name):
            for path in (folder / name).rglob("*.png"):
                path.unlink()


def write_summary(
    out: Path,
    options: Options,
    origin: Origin,
    ended: Mapping[str, Result],
    chapters: Sequence[Chapter],
) -> None:
    """Writes `summary.json`: `runs` with how each ended, `sections` with what each has found."""
    runs = {run.name: run for chapter in chapters for run in chapter.runs}
    result_files.write_summary(
        out,
        dataclasses.asdict(options),
        origin._asdict(),
        [make_run_record(run, ended.get(run.name, MISSING)) for run in runs.values()],
        sections=[make_section_record(chapter) for chapter in chapters],
    )


def make_run_record(run: Run, result: Result) -> Record:
    """Returns the entry of a run."""
    return {
        "run": run.name,
        "command": run.command,
        "is_alone": run.is_alone,
        "status": result.status,
        "error": result.error,
        "seconds": result.seconds,
        "folder": f"{RUNS}/{run.name}",
    }


def make_section_record(chapter: Chapter) -> Record:
    """Returns the entry of a section."""
    findings = chapter.findings or Findings([])
    claims = [
        {
            "statement": claim.statement,
            "paper": claim.paper,
            "ours": claim.ours,
            "holds": judge(claim),
            "is_modelled": claim.is_modelled,
        }
        for claim in findings.claims
    ]
    return {
        "section": chapter.section.name,
        "title": chapter.section.title,
        "source": chapter.section.source,
        "verdict": chapter.verdict,
        "sentence": chapter.sentence,
        "claims": claims,
        "tables": [table._asdict() for table in findings.tables],
        "figures": [f"figures/{drawing.png.name}" for drawing in chapter.drawings],
        "runs": [run.name for run in chapter.runs],
        "error": chapter.error,
    }
