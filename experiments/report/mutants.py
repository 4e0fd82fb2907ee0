"""Which sections of the report notice that the library is wrong.

Each section names mutations that it must notice, and the runs that are made with them. The other
runs are those of the finished report. A mutation is noticed if a claim that held fails, or if a
loss is no longer finite.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.report.section import Claim, Results, Scale, Section, judge
from experiments.runner import Result, Run, find_result

MUTANTS = "mutants"
PROGRAM = "report.mutate"
MISSING = Result(status="missing")


class Mutant(NamedTuple):
    """A section, and a library that is wrong in one way."""

    section: Section
    mutation: str  # a name of `mutate.MUTATIONS`
    runs: dict[str, Run]  # the name of a run of the section -> the same with the wrong library
    results: Results  # how the runs of the finished report ended


class Verdict(NamedTuple):
    """What a section said of a mutant."""

    section: str  # its name
    mutation: str
    failed: tuple[str, ...]  # the claims that held and do not hold now
    diverged: tuple[str, ...]  # the runs that did not stay finite

    @property
    def is_noticed(self) -> bool:
        """Whether anything tells that the library is wrong."""
        return bool(self.failed or self.diverged)


def list_mutants(sections: Sequence[Section], scale: Scale, folder: Path) -> list[Mutant]:
    """Returns the mutants of the sections that have been run; `folder` is that of their runs."""
    mutants = []
    for section in sections:
        runs = {run.name: run for run in section.list_runs(scale)}
        results = {name: find_result(run, folder / name) or MISSING for name, run in runs.items()}
        if any(result.status == "missing" for result in results.values()):
            continue
        for mutation, names in section.mutants.items():
            changed = {name: mutate(runs[name], mutation) for name in names if name in runs}
            if names and not changed:
                continue  # the runs of another scale
            if not names:
                changed = {section.name: make_section_run(section, mutation, scale, folder.parent)}
            mutants.append(Mutant(section, mutation, changed, results))
    return mutants


def mutate(run: Run, mutation: str) -> Run:
    """Returns a run with the wrong library.

    >>> mutate(Run("a", "image", ("--nodes", "4")), "hop-1").command
    'python -m experiments.report.mutate hop-1 image --nodes 4'
    """
    return run._replace(
        name=f"{mutation}-{run.name}",
        program=PROGRAM,
        arguments=(mutation, run.program, *run.arguments),
    )


def make_section_run(section: Section, mutation: str, scale: Scale, report: Path) -> Run:
    """Returns the run of a section alone, whose own computations are wrong; its runs are there."""
    rest = ("--runs", f"{report}", *scale.list_options())
    arguments = (mutation, "report", "--section", section.name, *rest)
    return Run(f"{mutation}-{section.name}", PROGRAM, arguments)


def judge_mutant(mutant: Mutant, ended: Results, scale: Scale) -> Verdict:
    """Compares what the section says of the runs of the report and of the mutant's."""
    section, mutation, runs, results = mutant
    changed = {name: ended[run.name] for name, run in runs.items()}
    before = section.find(scale, results).claims
    held = {claim.statement for claim in before if judge(claim)}
    if section.name in changed:
        (entry,) = changed[section.name].summary.get("sections", [{"claims": []}])
        lost = [claim["statement"] for claim in entry["claims"] if claim["holds"] is False]
    else:
        after: Sequence[Claim] = section.find(scale, {**results, **changed}).claims
        lost = [claim.statement for claim in after if judge(claim) is False]
    diverged = [name for name, result in changed.items() if result.status == "diverged"]
    failed = tuple(statement for statement in lost if statement in held)
    return Verdict(section.name, mutation, failed, tuple(diverged))


def read_mutants(path: Path) -> list[Verdict]:
    """Reads the verdicts of an earlier call; none if there was no such call."""
    entries = json.loads(path.read_text()) if path.is_file() else []
    return [Verdict(**entry) for entry in entries]


def write_mutants(verdicts: Sequence[Verdict], path: Path) -> None:
    """Writes all verdicts; those of other sections that are there stay."""
    chosen = {verdict.section for verdict in verdicts}
    others = [verdict for verdict in read_mutants(path) if verdict.section not in chosen]
    entries = [verdict._asdict() for verdict in (*others, *verdicts)]
    path.write_text(json.dumps(entries, indent=2))


def tabulate_mutants(verdicts: Sequence[Verdict]) -> Table:
    """Returns a table: who noticed which mutation, and by what."""
    table = Table(box=SIMPLE_HEAD, title="Which sections notice a wrong library")
    for column in ("section", "mutation", "noticed", "by"):
        table.add_column(column)
    for verdict in verdicts:
        by = [*(f"{name} diverged" for name in verdict.diverged), *verdict.failed]
        noticed = "[green]yes[/green]" if verdict.is_noticed else "[red]no[/red]"
        table.add_row(verdict.section, verdict.mutation, noticed, "\n".join(by) or "-")
    return table
