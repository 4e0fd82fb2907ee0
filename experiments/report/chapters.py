"""A section with its runs and what it has found: what the pages show and `summary.json` holds."""

import collections
import dataclasses
import importlib.metadata
import platform
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments import results as result_files
from experiments.report.drawing import Drawing, draw_figures
from experiments.report.section import Findings, Results, Scale, Section, judge
from experiments.results import Record
from experiments.runner import Result, Run

MISSING = Result(status="missing")
RUNS = "runs"
PACKAGES = ("gossipjax", "jax", "optax", "flax", "numpy", "scipy")
DATA = {
    "speech": "--speech, the folder of speech_languages.npz",
    "translation": "--translation, the folder of pairs of sentences",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chapter:
    """A section and its results."""

    section: Section  # what it is
    scale: Scale  # of the report
    runs: tuple[Run, ...] = ()  # that it asked for
    results: Results = dataclasses.field(default_factory=dict)  # how each of them ended, by name
    findings: Findings | None = None  # what it says; None if it could not say it
    drawings: tuple[Drawing, ...] = ()  # its figures
    error: str = ""  # the last line of the traceback of a bug in it; "" without one

    @property
    def needs(self) -> tuple[str, ...]:
        """The options without which it was left out."""
        return find_needs(self.section, self.scale)

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
        if not self.section.judges(self.scale):
            return (
                "Not judged: runs as small as these cannot tell a broken method from a right one. "
                "The full scale can."
            )
        failed = [claim for claim in self.findings.claims if judge(claim) is False]
        return " ".join(dict.fromkeys(claim.if_not for claim in failed if claim.if_not))


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
        is_left_out = bool(find_needs(section, scale))
        runs[section.name] = () if is_left_out else tuple(section.list_runs(scale))
        for run in runs[section.name]:
            other = by_name.setdefault(run.name, run)
            if other != run:
                raise RuntimeError(
                    f"a name must be that of one run, got {run.name} for `{run.command}` and "
                    f"`{other.command}`."
                )
    return runs


def make_chapter(
    section: Section, runs: Sequence[Run], results: Results, scale: Scale, folder: Path
) -> Chapter:
    """Lets a section find what its runs say, and draws its figures.

    An error of the section is a bug, which is shown: the other sections are made all the same.
    """
    ended = {run.name: results.get(run.name, MISSING) for run in runs}
    chapter = Chapter(section=section, scale=scale, runs=tuple(runs), results=ended)
    if chapter.needs:
        return chapter
    try:
        findings = section.find(scale, ended)
        if not section.judges(scale):  # runs that are too small to tell
            findings = findings.drop_bounds()
        chapter = dataclasses.replace(chapter, findings=findings)
        drawings = draw_figures(section.name, findings.figures, folder)
        return dataclasses.replace(chapter, drawings=drawings)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = traceback.format_exception_only(error)[-1].strip()
        place = f"{Path(last.filename).name}, line {last.lineno}"
        return dataclasses.replace(chapter, error=f"{message} ({place})")


def find_origin(
    command: str, scale: Scale, results: Results, wall_seconds: float, is_kept: bool = False
) -> Record:
    """Returns how a report was made: command, versions, machine, data sets, time of this call.

    Kept runs do not say which versions they had.
    """
    versions = []
    if not is_kept:
        versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
        versions.insert(0, f"Python {platform.python_version()}")
    ended = [result for result in results.values() if result.folder is not None]
    images = "Fashion-MNIST" if scale.fashion_mnist else "5,000 MNIST digits"
    sets = {"speech": scale.speech, "translations": scale.translation}
    return {
        "command": command,
        "scale": "quick: small versions of all runs" if scale.is_quick else "full",
        "code": count_origins(result.code for result in ended),
        "versions": ", ".join(versions),
        "machine": count_origins(result.machine for result in ended),
        "data": ", ".join([images, *(name for name, folder in sets.items() if folder)]),
        "seconds": sum(result.seconds for result in results.values()),
        "wall_seconds": wall_seconds,
    }


def count_origins(texts: Iterable[str]) -> str:
    """Returns what runs say that they were made by, with their numbers where they differ.

    >>> count_origins(["b", "b"]), count_origins(["a", "a", "b", ""]), count_origins(["", ""])
    ('b', 'a (2), b (1), not known (1)', '')
    """
    counts = collections.Counter(texts)
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{text or 'not known'} ({count})" for text, count in counts.items())


def write_summary(
    out: Path, options: Record, origin: Record, results: Results, chapters: Sequence[Chapter]
) -> None:
    """Writes `summary.json`: `runs` with how each ended, `sections` with what each has found."""
    records = []
    for run in {run.name: run for chapter in chapters for run in chapter.runs}.values():
        result = results.get(run.name, MISSING)
        names = ("status", "error", "seconds")
        ended = {name: getattr(result, name) for name in names}
        records.append({"run": run.name, "command": run.command} | ended)
    sections = []
    for chapter in chapters:
        findings = chapter.findings or Findings([])
        names = ("statement", "paper", "ours", "is_modelled")
        claims = [
            {name: getattr(claim, name) for name in names} | {"holds": judge(claim)}
            for claim in findings.claims
        ]
        sections.append(
            {
                "section": chapter.section.name,
                "title": chapter.section.title,
                "source": chapter.section.source,
                "verdict": chapter.verdict,
                "sentence": chapter.sentence,
                "claims": claims,
                "tables": [table._asdict() for table in findings.tables],
                "figures": [drawing.path.name for drawing in chapter.drawings],
                "runs": [run.name for run in chapter.runs],
                "error": chapter.error,
            }
        )
    result_files.write_summary(out, options, origin, records, sections=sections)
