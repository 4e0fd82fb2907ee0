"""The report as one page of HTML that needs no other file."""

import base64
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from experiments.report.pages.markdown import COMMANDS, TITLE, make_anchor

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
    """Returns a report as a page.

    Args:
      markdown: of it.
      folder: in which the SVG files are found by their paths in the text.
    """
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
