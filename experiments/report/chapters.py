"""A section with its runs and what it has found: all that the pages show of it."""

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.report.figures import Drawing, draw_figures
from experiments.report.section import Findings, Result, Run, Scale, Section, Status

MISSING = Result(status="missing")
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
        """The verdict, with the numbers of claims.

        >>> parts = {"write_text": str, "list_runs": len, "find": max}
        >>> section = Section(name="a", title="", source="", **parts)
        >>> Chapter(section=section, needs=("--speech",)).verdict
        'left out'
        """
        if self.error and self.findings is None:
            return "error"
        if self.findings is None:
            return "left out"
        verdict = self.findings.verdict
        claims = self.findings.claims
        if all(claim.holds is None for claim in claims):
            return verdict
        held = sum(claim.holds is True for claim in claims)
        unknown = sum(claim.holds is None for claim in claims)
        rest = f", {unknown} not judged" if unknown else ""
        return f"{verdict} ({held} of {len(claims)}{rest})"

    @property
    def sentence(self) -> str:
        """What the section says in a sentence or two; or why it says nothing."""
        if self.findings is not None:
            return self.findings.sentence
        if self.needs:
            return f"Left out: it needs {' and '.join(self.needs)}."
        return "Its runs could not be read, which is a bug of this section."

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
    own = {run.name: results.get(run.name, MISSING) for run in runs}
    needs = find_needs(section, scale)
    chapter = Chapter(
        section=section,
        text=section.write_text(scale),
        runs=tuple(runs),
        results=own,
        needs=needs,
    )
    if needs:
        return chapter
    try:
        chapter = dataclasses.replace(chapter, findings=section.find(scale, own))
        assert chapter.findings is not None
        drawings = draw_figures(section.name, chapter.findings.figures, folder)
        return dataclasses.replace(chapter, drawings=drawings)
    except Exception as error:
        return dataclasses.replace(chapter, error=describe_error(error))


def describe_error(error: Exception) -> str:
    """Returns type, text and place of an error in a line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{text} ({Path(last.filename).name}, line {last.lineno})"
