"""Makes tables in Markdown."""

import re
from collections.abc import Sequence


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in which columns of numbers, except the first column, are right-aligned.

    >>> print(format_table(("", "accuracy"), [("SGP", "75.0"), ("AllReduce", "76.2")]))
    |  | accuracy |
    |---|---:|
    | SGP | 75.0 |
    | AllReduce | 76.2 |
    """
    sides = ["---"]
    for index in range(1, len(columns)):
        texts = [row[index] for row in rows]
        sides.append("---:" if texts and all(map(is_number, texts)) else "---")
    lines = [f"| {' | '.join(map(escape, row))} |" for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(sides)}|", *lines[1:]])


def is_number(text: str) -> bool:
    """Whether a cell is a number, perhaps with unit or spread, or says why there is no number.

    >>> [is_number(text) for text in ("-1.5 ± 0.2", "12 %", "failed", "-", "3 of 4 hold")]
    [True, True, True, True, False]
    """
    if text in ("-", "", "failed", "diverged", "missing"):
        return True
    return re.fullmatch(r"[^a-zA-Z]*[0-9][^a-zA-Z]*( ?[a-zA-Z/]{1,4})?", text) is not None


def escape(text: str) -> str:
    """Returns a text on one line, in which no `|` begins a column and no `<` begins a tag.

    Characters that are escaped already stay as they are, and so does `<br>`, a new line in a cell.

    >>> escape("E||grad f||^2, <b>")
    'E\\\\|\\\\|grad f\\\\|\\\\|^2, \\\\<b>'
    """
    one_line = " ".join(text.split())
    return re.sub(r"(?<!\\)(\||<(?!br>)(?=[A-Za-z/!?]))", r"\\\1", one_line)
