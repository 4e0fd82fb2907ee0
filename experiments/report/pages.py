"""The pages of the report: Markdown, and the same as one page of HTML that needs no other file."""

import base64
import html
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

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
COMMANDS = "commands"  # of fenced blocks that the page folds
HOLDS = {True: "yes", False: "no", None: "not judged"}
VERDICTS = ("agrees", "agrees in part", "disagrees", "not judged", "left out", "error")


def format_markdown(chapters: Sequence[Chapter], origin: Record, suffix: str = "png") -> str:
    """Returns the report as Markdown; figures are files of that suffix, `png` or `svg`."""
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
        "taken from other reports": f"{len(origin['taken'])} runs" if origin["taken"] else "",
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
        blocks += format_chapter(chapter, suffix)
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


def format_chapter(chapter: Chapter, suffix: str) -> Iterator[str]:
    """Yields the blocks of a section."""
    section = chapter.section
    yield f"## {escape(section.title)}"
    yield f"*{escape(section.source)}*"
    yield escape(chapter.text)
    yield f"**Verdict: {chapter.verdict}.** {escape(chapter.sentence)}".rstrip()
    if chapter.error:
        yield f"**A bug of this section:** `{chapter.error}`"
    if chapter.findings is not None:
        claims = [
            (
                claim.statement,
                claim.paper,
                f"{claim.ours}{' *(modelled)*' if claim.is_modelled else ''}",
                HOLDS[judge(claim)],
            )
            for claim in chapter.findings.claims
        ]
        if claims:
            yield format_table(("claim", "paper", "ours", "holds"), claims)
        for table in chapter.findings.tables:
            yield f"**{escape(table.title)}**"
            yield format_table(table.columns, table.rows)
            if table.note:
                yield escape(table.note)
    for drawing in chapter.drawings:
        caption = escape(drawing.caption)
        name = drawing.png.with_suffix(f".{suffix}").name
        yield f"![{re.sub('[][]', '', caption)}](figures/{name})"
        yield f"*{caption}*"
    yield from format_runs(chapter)


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
        rows = []
        for claim in chapter.findings.claims if chapter.findings else ():
            ours = f"{claim.ours}{' *(modelled)*' if claim.is_modelled else ''}"
            rows.append((claim.statement, claim.paper, ours, HOLDS[judge(claim)]))
            if not judge(claim):
                cause = (
                    claim.if_not or "-" if judge(claim) is False else "the spread leaves it open"
                )
                nulls.append((section.title, claim.statement, ours, claim.paper, cause))
        blocks.append(format_table(("claim", "published", "ours", "holds"), rows))
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


STYLE = """
:root { color-scheme: light dark; --line: #d4d4d8; --soft: #f4f4f5; --muted: #52525b;
  --yes: #15803d; --no: #b91c1c; --part: #a16207; --link: #1d4ed8; }
@media (prefers-color-scheme: dark) { :root { --line: #3f3f46; --soft: #27272a; --muted: #a1a1aa;
  --yes: #4ade80; --no: #f87171; --part: #facc15; --link: #93c5fd; } }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.5;
  font-family: system-ui, sans-serif; }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 3.5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h2 + p { color: var(--muted); }
a { color: var(--link); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.92rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--soft); }
img { display: block; max-width: 100%; margin: 1rem 0 0.3rem; padding: 0.5rem; background: white;
  border: 1px solid var(--line); border-radius: 0.4rem; }
pre { overflow-x: auto; padding: 0.7rem; background: var(--soft); border-radius: 0.4rem;
  font-size: 0.8rem; }
code { font-size: 0.9em; }
summary { cursor: pointer; color: var(--muted); }
.yes, .agrees { color: var(--yes); font-weight: 600; }
.no, .disagrees, .error { color: var(--no); font-weight: 600; }
.part { color: var(--part); font-weight: 600; }
.open { color: var(--muted); }
td:is(.yes, .no, .open) { white-space: nowrap; }
"""
CLASSES = {
    "agrees in part": "part",
    "agrees": "agrees",
    "disagrees": "disagrees",
    "not judged": "open",
    "left out": "open",
    "error": "error",
    "yes": "yes",
    "no": "no",
}
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


class Renderer(RendererHTML):
    """Puts figures into the page, and folds commands."""

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A figure, as a data URI."""
        token = tokens[idx]
        content = (env["folder"] / str(token.attrs["src"])).read_bytes()
        source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
        return f'<img src="{source}" alt="{html.escape(token.content)}">'

    def fence(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A block of code; commands are shown when they are asked for."""
        token = tokens[idx]
        block = f"<pre><code>{html.escape(token.content)}</code></pre>\n"
        if token.info != COMMANDS:
            return block
        count = sum(line.startswith("# ") for line in token.content.splitlines())
        return f"<details><summary>Commands of its {count} run(s)</summary>\n{block}</details>\n"

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """A table scrolls where the page is narrow."""
        return '<div class="scroll"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """The end of a table."""
        return "</table></div>\n"


def format_html(markdown: str, folder: Path) -> str:
    """Returns a report as a page; its SVG files are found in the folder."""
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=Renderer).enable("table")
    tokens = parser.parse(markdown)
    for token, following in itertools.pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", make_anchor(following.content))
        if token.type == "td_open":
            name = following.content.partition(" (")[0]
            if name in CLASSES:
                token.attrSet("class", CLASSES[name])
    body = parser.renderer.render(tokens, parser.options, {"folder": folder})
    return PAGE.format(title=html.escape(TITLE), style=STYLE, body=body)
