"""The table of a grid: in the terminal, as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from experiments.compare.grid import Grid
from experiments.compare.statistics import Entry

Entries = Mapping[tuple[str, str], Entry]
LATEX_ESCAPES = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"})
CSV_FIELDS = ("row", "column", "metric", "mean", "spread", "finished", "diverged", "failed")


def format_entry(entry: Entry | None, plus_minus: str = " ± ") -> str:
    """Returns mean and spread, and what did not finish.

    >>> format_entry(Entry((84.0, 86.0), 0, 0))
    '85.00 ± 1.41'
    >>> format_entry(Entry((84.0,), 2, 0)), format_entry(Entry((), 3, 0)), format_entry(None)
    ('84.00 (2 diverged)', 'diverged', '-')
    """
    if entry is None:
        return "-"
    lost = [
        f"{count} {word}"
        for word, count in (("diverged", entry.diverged), ("failed", entry.failed))
        if count
    ]
    if not entry.values:
        return ", ".join(lost) if len(lost) > 1 else lost[0].partition(" ")[2]
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


def make_table(grid: Grid, entries: Entries, caption: str) -> Table:
    """Makes the table for the terminal; the best of a column is bold, the paper's below ours."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=grid.title, caption=caption, show_lines=False
    )
    table.add_column("")
    for column in grid.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row in grid.rows:
        cells = []
        for column in grid.columns:
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
    lines = [
        "\\begin{table}",
        f"  \\caption{{{f'{grid.title}. {caption}'.translate(LATEX_ESCAPES)}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(headers) - 1)}}}",
        "    \\toprule",
        f"    {' & '.join(header.translate(LATEX_ESCAPES) for header in headers)} \\\\",
        "    \\midrule",
    ]
    for row in grid.rows:
        cells = [row.title.translate(LATEX_ESCAPES)]
        for text, best in list_texts(grid, entries, row.title):
            cell = text.translate(LATEX_ESCAPES).replace("±", "$\\pm$")
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
            numbers = [entry.mean if entry.values else "", entry.spread or ""]
            counts = [len(entry.values), entry.diverged, entry.failed]
            values = " ".join(map(repr, entry.values))
            writer.writerow(
                [row.title, column.title, metric, *numbers, *counts, entry.figure, values]
            )
    return output.getvalue()
