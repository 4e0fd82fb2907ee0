"""The table of a grid: in the terminal, as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from experiments.compare.grid import Grid, Line
from experiments.compare.statistics import Entry

Entries = Mapping[tuple[str, str], Entry]
LATEX_ESCAPES = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$"}
)
MIN_TITLE = 24  # characters of a row's title on a line of the terminal
ANY_WIDTH = 10**6
CSV_FIELDS = ("row", "column", "metric", "mean", "spread", "finished", "diverged", "failed")


def format_entry(entry: Entry | None, plus_minus: str = " ± ") -> str:
    """Returns mean and spread, and what did not finish.

    >>> format_entry(Entry((84.0, 86.0), 0, 0, 2)), format_entry(Entry((84.0,), 0, 0, 3))
    ('85.00 ± 1.41', '84.00 (1 of 3)')
    >>> format_entry(Entry((84.0,), 2, 0, 3)), format_entry(Entry((), 3, 0, 3)), format_entry(None)
    ('84.00 (2 diverged)', 'diverged', '-')
    >>> format_entry(Entry((84.0,), 1, 0, 3)), format_entry(Entry((), 1, 0, 3))
    ('84.00 (1 of 3, 1 diverged)', '1 diverged of 3')
    """
    if entry is None:
        return "-"
    lost = [
        f"{count} {word}"
        for word, count in (("diverged", entry.diverged), ("failed", entry.failed))
        if count
    ]
    has_ended = len(entry.values) + entry.diverged + entry.failed == entry.runs
    if not entry.values:
        if not has_ended:
            return f"{', '.join(lost)} of {entry.runs}"
        return ", ".join(lost) if len(lost) > 1 else lost[0].partition(" ")[2]
    if not has_ended:
        lost.insert(0, f"{len(entry.values)} of {entry.runs}")
    spread = "" if entry.spread is None else f"{plus_minus}{entry.spread:.2f}"
    return f"{entry.mean:.2f}{spread}" + (f" ({', '.join(lost)})" if lost else "")


def list_headers(grid: Grid) -> list[str]:
    """Returns the titles of the columns; each is followed by the paper's, if it has figures."""
    headers = []
    for column in grid.columns:
        headers.append(column.title)
        if has_figures(grid, column.title):
            headers.append("paper")
    return headers


def has_figures(grid: Grid, column: str) -> bool:
    """Whether the paper has a figure in this column."""
    return any(key[1] == column for key in grid.figures)


def list_texts(grid: Grid, entries: Entries, row: str) -> list[tuple[str, bool]]:
    """Returns the texts of a row, and whether each is the best of its column."""
    texts = []
    for column in grid.columns:
        entry = entries.get((row, column.title))
        texts.append((format_entry(entry), entry is not None and entry.is_best))
        if has_figures(grid, column.title):
            texts.append((grid.figures.get((row, column.title), "-"), False))
    return texts


def make_tables(grid: Grid, entries: Entries, caption: str, console: Console) -> Iterator[Table]:
    """Yields the table for the terminal, as several of some columns where it is too wide."""
    wide = console.options.update(width=ANY_WIDTH)
    rest = grid.columns
    while rest:
        count = len(rest)
        table = _make_table(grid, rest, entries)
        while count > 1 and Measurement.get(console, wide, table).minimum > console.width:
            count -= 1
            table = _make_table(grid, rest[:count], entries)
        table.title = grid.title if rest is grid.columns else None
        rest = rest[count:]
        table.caption = None if rest else caption
        yield table


def _make_table(grid: Grid, columns: Sequence[Line], entries: Entries) -> Table:
    """Makes a table of some columns; the best of a column is bold, the paper's below ours."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_lines=False)
    table.add_column("", min_width=min(MIN_TITLE, max(len(row.title) for row in grid.rows)))
    for column in columns:
        texts = [format_entry(entries.get((row.title, column.title))) for row in grid.rows]
        width = max(map(len, [column.title, *texts]))
        table.add_column(column.title, justify="right", no_wrap=True, min_width=width)
    for row in grid.rows:
        cells = []
        for column in columns:
            entry = entries.get((row.title, column.title))
            is_best = entry is not None and entry.is_best
            cell = Text(format_entry(entry), style="bold green" if is_best else "")
            figure = grid.figures.get((row.title, column.title))
            cells.append(Text.assemble(cell, f"\npaper {figure}") if figure else cell)
        table.add_row(row.title, *cells)
    return table


def format_markdown(grid: Grid, entries: Entries, caption: str) -> str:
    """Returns the table as Markdown; the best of a column is bold."""
    headers = ["", *list_headers(grid)]
    lines = [f"**{grid.title}**", "", f"| {' | '.join(headers)} |"]
    lines.append(f"|---|{'---:|' * (len(headers) - 1)}")
    for row in grid.rows:
        texts = list_texts(grid, entries, row.title)
        cells = [f"**{text}**" if best else text for text, best in texts]
        lines.append(f"| {' | '.join([row.title, *cells])} |")
    return "\n".join([*lines, "", caption, ""])


def format_latex(grid: Grid, entries: Entries, caption: str) -> str:
    """Returns the table as LaTeX, for the package booktabs; the best of a column is bold."""
    headers = ["", *list_headers(grid)]
    label = re.sub(r"[^\w.]+", "-", grid.title.partition(":")[0])
    lines = [
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{f'{grid.title}. {caption}'.translate(LATEX_ESCAPES)}}}",
        f"  \\label{{tab:{label}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(headers) - 1)}}}",
        "    \\toprule",
        f"    {' & '.join(header.translate(LATEX_ESCAPES) for header in headers)} \\\\",
        "    \\midrule",
    ]
    for row in grid.rows:
        cells = [row.title.translate(LATEX_ESCAPES)]
        for text, best in list_texts(grid, entries, row.title):
            cell = text.translate(LATEX_ESCAPES)
            cells.append(f"\\textbf{{{cell}}}" if best else cell)
        lines.append(f"    {' & '.join(cells)} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(lines)


def format_csv(grid: Grid, entries: Entries, metric: str) -> str:
    """Returns a line for each cell of the table, with numbers in full, and the values by seed."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([*CSV_FIELDS, "paper", "values"])
    for row in grid.rows:
        for column in grid.columns:
            entry = entries.get((row.title, column.title))
            if entry is None:
                continue
            numbers = [
                entry.mean if entry.values else "",
                "" if entry.spread is None else entry.spread,
            ]
            counts = [len(entry.values), entry.diverged, entry.failed]
            values = " ".join(map(repr, entry.values))
            writer.writerow(
                [row.title, column.title, metric, *numbers, *counts, entry.figure, values]
            )
    return output.getvalue()
