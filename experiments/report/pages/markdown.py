"""The report as Markdown."""

import re
from collections.abc import Iterator, Sequence

from experiments.report.chapters import Chapter
from experiments.report.figures import Drawing
from experiments.report.pages.origin import Origin, format_seconds
from experiments.report.section import Claim, Table

TITLE = "The papers' tables and figures in miniature"
LEAD = (
    "Each section repeats a table, a figure or a theorem of a paper on machines and data that are "
    "at hand, with our figures beside the paper's. Its claims are the paper's, with bounds of the "
    "size of the paper's own differences, or an aim of this project where they say so. Sizes and "
    "learning rates were chosen after trial runs, the same for all methods unless a section says "
    "otherwise. A claim is not judged if the spread over the seeds, or a missing run, leaves it "
    "open. *(modelled)* marks figures of a model or of a simulation; all others were measured."
)
COMMANDS = "commands"  # of fenced blocks that the page folds
HOLDS = {True: "yes", False: "no", None: "not judged"}
VERDICTS = ("agrees", "agrees in part", "disagrees", "not judged", "left out", "error")


def format_markdown(chapters: Sequence[Chapter], origin: Origin, suffix: str = "png") -> str:
    """Returns the report as Markdown.

    Args:
      chapters: the sections.
      origin: how it was made.
      suffix: of the files of figures, `png` or `svg`.
    """
    blocks = [f"# {TITLE}", LEAD, f"**{count_verdicts(chapters)}.**"]
    rows = []
    for chapter in chapters:
        title = chapter.section.title
        link = f"[{escape(title)}](#{make_anchor(title)})"
        rows.append((link, escape(chapter.section.place), chapter.verdict))
    blocks.append(format_rows(("section", "source", "verdict"), rows))
    blocks.append("## How this was made")
    blocks.append("\n".join(f"- {title}: {text}" for title, text in origin.list_facts().items()))
    for chapter in chapters:
        blocks += format_chapter(chapter, suffix)
    return "\n\n".join(blocks) + "\n"


def count_verdicts(chapters: Sequence[Chapter]) -> str:
    """Returns how many sections have which verdict, and how many claims hold."""
    verdicts = [chapter.verdict.partition(" (")[0] for chapter in chapters]
    counts = [f"{verdicts.count(name)} {name}" for name in VERDICTS if name in verdicts]
    claims = [
        claim for chapter in chapters if chapter.findings for claim in chapter.findings.claims
    ]
    held = sum(claim.holds is True for claim in claims)
    unknown = sum(claim.holds is None for claim in claims)
    return (
        f"{len(chapters)} section(s): {', '.join(counts)}; {held} of {len(claims)} claims hold, "
        f"{unknown} not judged"
    )


def format_chapter(chapter: Chapter, suffix: str) -> Iterator[str]:
    """Yields the blocks of a section."""
    section = chapter.section
    yield f"## {escape(section.title)}"
    yield f"*{escape(section.source)}*"
    yield escape(chapter.text)
    yield f"**Verdict: {chapter.verdict}.** {escape(chapter.sentence)}"
    if chapter.error:
        yield f"**A bug of this section:** `{chapter.error}`"
    if chapter.findings is not None:
        if chapter.findings.claims:
            yield format_claims(chapter.findings.claims)
        for table in chapter.findings.tables:
            yield from format_table(table)
    for drawing in chapter.drawings:
        yield from format_drawing(drawing, suffix)
    yield from format_runs(chapter)


def format_claims(claims: Sequence[Claim]) -> str:
    """Returns the table of claims."""
    rows = [
        (
            claim.statement,
            claim.paper,
            f"{claim.ours or '-'}{' *(modelled)*' if claim.is_modelled else ''}",
            HOLDS[claim.holds],
        )
        for claim in claims
    ]
    return format_rows(("claim", "paper", "ours", "holds"), [tuple(map(escape, r)) for r in rows])


def format_table(table: Table) -> Iterator[str]:
    """Yields title, table and note."""
    yield f"**{escape(table.title)}**"
    yield format_rows(table.columns, [tuple(map(escape, row)) for row in table.rows])
    if table.note:
        yield escape(table.note)


def format_drawing(drawing: Drawing, suffix: str) -> Iterator[str]:
    """Yields a figure and its caption."""
    name = drawing.png.with_suffix(f".{suffix}").name
    text = re.sub(r"[\[\]]", "", escape(drawing.caption))
    yield f"![{text}](figures/{name})"
    yield f"*{escape(drawing.caption)}*"


def format_runs(chapter: Chapter) -> Iterator[str]:
    """Yields the commands of a section's runs, and what did not finish."""
    if not chapter.runs:
        return
    lines = []
    for run in chapter.runs:
        result = chapter.results[run.name]
        time = f", {format_seconds(result.seconds)}" if result.seconds else ""
        lines.append(f"# {run.name}: {result.status}{time}\n{run.command}")
    yield f"```{COMMANDS}\n" + "\n".join(lines) + "\n```"
    missing = [f"`{name}`" for name in chapter.list_names("missing")]
    if missing:
        yield f"Not begun, or interrupted: {', '.join(missing)}."
    for name in (*chapter.list_names("failed"), *chapter.list_names("diverged")):
        result = chapter.results[name]
        yield f"Run `{name}` {'has diverged' if result.status == 'diverged' else 'has failed'}."
        yield f"```text\n{result.error}\n```"


def format_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table; columns of numbers stand to the right.

    >>> print(format_rows(("", "accuracy"), [("SGP", "75.0"), ("AllReduce", "76.2")]))
    |  | accuracy |
    |---|---:|
    | SGP | 75.0 |
    | AllReduce | 76.2 |
    """
    lines = [f"| {' | '.join(map(escape, columns))} |"]
    sides = ["---"]
    for index in range(1, len(columns)):
        texts = [row[index] for row in rows]
        sides.append("---:" if texts and all(map(is_number, texts)) else "---")
    lines.append(f"|{'|'.join(sides)}|")
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def is_number(text: str) -> bool:
    """Whether a cell stands to the right: a number, perhaps with a unit or a spread, or a gap.

    >>> [is_number(text) for text in ("-1.5 ± 0.2", "12 %", "failed", "-", "3 of 4 hold")]
    [True, True, True, True, False]
    """
    if text in ("-", "", "failed", "diverged", "missing"):
        return True
    return re.fullmatch(r"[^a-zA-Z]*[0-9][^a-zA-Z]*( ?[a-zA-Z/]{1,4})?", text) is not None


def escape(text: str) -> str:
    """Returns a text that is Markdown, for a cell of a table too: no columns, no tags in it.

    >>> escape("E||grad f||^2, <b>")
    'E\\\\|\\\\|grad f\\\\|\\\\|^2, \\\\<b>'
    """
    one_line = " ".join(text.split())
    return re.sub(r"(?<!\\)(\||<(?=[A-Za-z/!?]))", r"\\\1", one_line)


def make_anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it.

    >>> make_anchor("Table 1: accuracy, by n")
    'table-1-accuracy-by-n'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
