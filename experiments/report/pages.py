"""The pages of the report, in Markdown: all of it, and the results alone."""

import re
from collections.abc import Iterator, Sequence

from experiments.markdown import escape, format_table
from experiments.report.chapters import Chapter
from experiments.report.section import judge
from experiments.results import Record
from experiments.runner import format_seconds

TITLE = "The papers' tables and figures in miniature"
LEAD = (
    "Each section repeats a table, a figure or a theorem of a paper on the machines and data that "
    "we had, and shows our figures next to the paper's. A claim is a statement of the paper, or "
    "an aim of this project if the claim says so. The bounds of a claim are about as wide as the "
    "paper's own differences. SGP is stochastic gradient push. Nodes of SGP adapt, then combine; "
    "so do those of D-PSGD where its command says `adapt-then-combine`, and elsewhere D-PSGD "
    "combines while adapting.\n\nWe chose sizes and learning rates after trial runs, the same for "
    "all methods unless a section says otherwise. A claim is not judged if the spread over the "
    "seeds, or a missing run, leaves it open. *(modelled)* marks figures that a model or a "
    "simulation gave. We measured all other figures."
)
COMMAND = (
    "`python -m experiments.report --fashion-mnist FOLDER --speech FOLDER --translation FOLDER` "
    "makes this page. It also makes `report.md`, which has all tables, and all commands with their "
    "seeds. `--section NAME` makes one section. `--kept` makes all of them in seconds, from the "
    "runs that the repository keeps."
)
HOLDS = {True: "yes", False: "no", None: "not judged"}
VERDICTS = ("agrees", "agrees in part", "disagrees", "not judged", "left out", "error")


def format_report(chapters: Sequence[Chapter], origin: Record) -> str:
    """Returns the report: every section with its claims, tables, figures and runs."""
    rows = []
    for chapter in chapters:
        title = chapter.section.title
        link = f"[{escape(title)}](#{make_anchor(title)})"
        rows.append((link, chapter.section.place, chapter.verdict))
    facts = {
        "command": f"`{origin['command']}`",
        **{name: origin[name] for name in ("scale", "code", "versions", "machine", "data")},
        "time": f"{format_seconds(origin['seconds'])} of runs, one after the other; "
        f"{format_seconds(origin['wall_seconds'])} in this call",
    }
    blocks = [
        f"# {TITLE}",
        LEAD,
        f"**{count_verdicts(chapters)}.**",
        format_table(("section", "source", "verdict"), rows),
        "## How this was made",
        "\n".join(f"- {title}: {text}" for title, text in facts.items() if text),
    ]
    for chapter in chapters:
        blocks += format_chapter(chapter)
    return "\n\n".join(blocks) + "\n"


def count_verdicts(chapters: Sequence[Chapter]) -> str:
    """Returns how many sections have which verdict, and how many claims hold."""
    verdicts = [chapter.verdict.partition(" (")[0] for chapter in chapters]
    plurals = {name: name.replace("agrees", "agree") for name in VERDICTS}
    counts = [
        f"{count} {name if count == 1 else plurals[name]}"
        for name in VERDICTS
        if (count := verdicts.count(name))
    ]
    findings = [chapter.findings for chapter in chapters if chapter.findings is not None]
    judged = [judge(claim) for found in findings for claim in found.claims]
    return (
        f"{len(chapters)} section{'s' * (len(chapters) != 1)}: {', '.join(counts)}; "
        f"{judged.count(True)} of {len(judged)} claims hold, {judged.count(None)} not judged"
    )


def format_chapter(chapter: Chapter) -> Iterator[str]:
    """Yields the blocks of a section."""
    yield from format_claims(chapter, escape(chapter.section.write_text(chapter.scale)))
    for table in chapter.findings.tables if chapter.findings else ():
        yield f"**{escape(table.title)}**"
        yield format_table(table.columns, table.rows)
        if table.note:
            yield escape(table.note)
    yield from format_runs(chapter)


def format_claims(chapter: Chapter, *text: str) -> Iterator[str]:
    """Yields the title, text, verdict, figures and claims; in a cell, each number has a line."""
    yield from (f"## {escape(chapter.section.title)}", f"*{escape(chapter.section.source)}*", *text)
    yield f"**{chapter.verdict}.** {escape(chapter.sentence)}".rstrip()
    if chapter.error:
        yield f"**A bug of this section:** `{chapter.error}`"
    for drawing in chapter.drawings:
        caption = escape(drawing.caption)
        yield f"![{re.sub('[][]', '', caption)}]({drawing.path.name})"
        yield f"*{caption}*"
    rows = []
    for claim in chapter.findings.claims if chapter.findings else ():
        ours = f"{claim.ours}{'; *(modelled)*' if claim.is_modelled else ''}"
        paper = claim.paper.split("; ")
        if len(paper) == len(claim.rows):  # line by line beside ours, where the titles are
            titles = (f"{title} " for title in claim.rows)
            paper = map(str.removeprefix, paper, titles)
        cells = ("<br>".join(paper), ours.replace("; ", "<br>"))
        rows.append((claim.statement, *cells, HOLDS[judge(claim)]))
    if rows:
        yield format_table(("claim", "published", "ours", "holds"), rows)


def format_runs(chapter: Chapter) -> Iterator[str]:
    """Yields the commands of a section's runs, and what did not finish."""
    if not chapter.runs:
        return
    lines = []
    for run in chapter.runs:
        result = chapter.results[run.name]
        time = f", {format_seconds(result.seconds)}" if result.seconds else ""
        lines.append(f"# {run.name}: {result.status}{time}\n{run.command}")
    yield "```sh\n" + "\n".join(lines) + "\n```"
    ended = chapter.results.items()
    missing = [f"`{name}`" for name, result in ended if result.status == "missing"]
    if missing:
        yield f"Not begun, or interrupted: {', '.join(missing)}."
    for name, result in ended:
        if result.status in ("failed", "diverged"):
            yield f"Run `{name}` has {result.status}."
            yield f"```text\n{result.error}\n```"


def format_results(chapters: Sequence[Chapter], origin: Record) -> str:
    """Returns every claim with the published figure, ours, its verdict, and the section's name.

    After them comes what did not hold or could not be judged.
    """
    blocks = [
        "# Results",
        f"{LEAD} The paper prints the published figures.\n\n{COMMAND} The runs took "
        f"{format_seconds(origin['seconds'])}, one after the other."
        + (f" The machine: {origin['machine']}." if origin["machine"] else ""),
        f"**{count_verdicts(chapters)}.**",
    ]
    nulls = [
        "## What did not hold, or could not be judged",
        "The sections say what is known of the causes. Where a claim is not judged, the spread "
        "over the seeds leaves it open.",
    ]
    for chapter in chapters:
        if chapter.findings is None:
            continue
        blocks += format_claims(chapter)
        if chapter.runs:
            blocks.append(f"*`--section {chapter.section.name}`*")
        causes = []
        for claim in chapter.findings.claims:
            if not judge(claim):
                verdict = HOLDS[judge(claim)].capitalize()
                causes.append(f"- {claim.statement} **{verdict}.**")
        if causes:
            title = chapter.section.title
            nulls.append(f"**[{escape(title)}](#{make_anchor(title)})**")
            nulls.append("\n".join(map(escape, causes)))
    return "\n\n".join([*blocks, *nulls]) + "\n"


def make_anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it.

    >>> make_anchor("Table 1: accuracy, by n")
    'table-1-accuracy-by-n'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
