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
    "Each section repeats a table, a figure or a theorem of a paper on machines and data that are "
    "at hand, with our figures beside the paper's. Its claims are the paper's, with bounds of the "
    "size of the paper's own differences, or an aim of this project where they say so. Sizes and "
    "learning rates were chosen after trial runs, the same for all methods unless a section says "
    "otherwise. A claim is not judged if the spread over the seeds, or a missing run, leaves it "
    "open. *(modelled)* marks figures of a model or of a simulation; all others were measured."
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
    section = chapter.section
    yield f"## {escape(section.title)}"
    yield f"*{escape(section.source)}*"
    yield escape(chapter.text)
    yield f"**Verdict: {chapter.verdict}.** {escape(chapter.sentence)}".rstrip()
    if chapter.error:
        yield f"**A bug of this section:** `{chapter.error}`"
    if chapter.findings is not None:
        if claims := list_claims(chapter):
            yield format_table(("claim", "paper", "ours", "holds"), claims)
        for table in chapter.findings.tables:
            yield f"**{escape(table.title)}**"
            yield format_table(table.columns, table.rows)
            if table.note:
                yield escape(table.note)
    for drawing in chapter.drawings:
        caption = escape(drawing.caption)
        yield f"![{re.sub('[][]', '', caption)}](figures/{drawing.path.name})"
        yield f"*{caption}*"
    yield from format_runs(chapter)


def list_claims(chapter: Chapter) -> list[tuple[str, str, str, str]]:
    """Returns the statement of each claim, the paper's figures, ours, and whether it holds."""
    return [
        (
            claim.statement,
            claim.paper,
            f"{claim.ours}{' *(modelled)*' if claim.is_modelled else ''}",
            HOLDS[judge(claim)],
        )
        for claim in (chapter.findings.claims if chapter.findings else ())
    ]


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
    """Returns every claim with the published figure, ours, its verdict, and its commands.

    After them comes what did not hold or could not be judged.
    """
    shown = [chapter for chapter in chapters if chapter.findings is not None]
    blocks = [
        "# Results",
        f"{LEAD} A published figure is what the paper prints; seeds are in the commands. "
        f"{format_seconds(origin['seconds'])} of runs, one after the other; {origin['machine']}.",
        f"**{count_verdicts(chapters)}.**",
    ]
    nulls = []
    for chapter in shown:
        section = chapter.section
        blocks += [f"## {escape(section.title)}", f"*{escape(section.source)}*"]
        blocks.append(f"**{chapter.verdict}.** {escape(chapter.sentence)}".rstrip())
        rows = list_claims(chapter)
        blocks.append(format_table(("claim", "published", "ours", "holds"), rows))
        claims = chapter.findings.claims if chapter.findings else ()
        for claim, (statement, published, ours, _) in zip(claims, rows, strict=True):
            if not judge(claim):
                cause = (
                    claim.if_not or "-" if judge(claim) is False else "the spread leaves it open"
                )
                nulls.append((section.title, statement, ours, published, cause))
        if chapter.runs:
            commands = "\n".join(run.command for run in chapter.runs)
            blocks.append(f"```sh\n{commands}\n```")
    blocks.append("## What did not hold, or could not be judged")
    columns = ("section", "claim", "ours", "published", "cause")
    blocks.append(format_table(columns, nulls))
    return "\n\n".join(blocks) + "\n"


def make_anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it.

    >>> make_anchor("Table 1: accuracy, by n")
    'table-1-accuracy-by-n'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
