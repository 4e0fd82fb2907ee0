"""A view of a running job: `python -m gossipjax.asynchronous HOST:PORT`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any

from gossipjax.asynchronous._messages import is_address
from gossipjax.asynchronous._settings import may_connect

ANSWER_SECONDS = 5.0
EVERY_SECONDS = 1.0
# The rate is of steps a second, `heard` is seconds ago, and bytes are sent and received.
COLUMNS = ("place", "address", "steps", "rate", "weight", "heard", "sent", "received", "doing")


def main(arguments: list[str] | None = None) -> int:
    """Shows the nodes of a job until Ctrl-C; returns the exit status, 1 if no node answers."""
    parser = argparse.ArgumentParser(
        prog="python -m gossipjax.asynchronous",
        description="Show the nodes of a running job until Ctrl-C. GOSSIPJAX_SECRET must be the "
        "secret of the job. docs/guides/asynchronous.md says more.",
    )
    parser.add_argument("address", metavar="HOST:PORT", help="where a node of the job listens")
    help_json = "print a JSON object for each node each second, for a log"
    parser.add_argument("--json", action="store_true", help=help_json)
    options = parser.parse_args(arguments)
    secret = os.environ.get("GOSSIPJAX_SECRET")
    if not is_address(options.address):
        parser.error(f"the address must be HOST:PORT, got {options.address!r}: as in a.org:5000")
    if not may_connect(options.address, secret):
        parser.error(f"GOSSIPJAX_SECRET must be that of the node at {options.address}, got none")
    from gossipjax.asynchronous._observer import Observer  # which needs pyzmq

    end = time.monotonic() + ANSWER_SECONDS
    opened = contextlib.closing(Observer(options.address, secret))
    with opened as observer, contextlib.suppress(KeyboardInterrupt):
        while not (rows := observer.look(EVERY_SECONDS)):
            if time.monotonic() > end:
                print(f"gossipjax: {observer.explain_silence()}", file=sys.stderr)
                return 1
        while True:
            rows = [{name: row.get(name) for name in COLUMNS} for row in rows]
            if options.json:
                for row in rows:
                    print(json.dumps({"time": time.time()} | row), flush=True)
            else:
                show(rows)
            rows = observer.look(EVERY_SECONDS)
    return 0


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a table of the nodes: by `rich` if that is installed, else as aligned columns."""
    lines = [[*COLUMNS], *([make_cell(value) for value in row.values()] for row in rows)]
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(map(str.ljust, line, widths)).rstrip(), flush=True)
        return
    table = Table(*lines[0])
    for line in lines[1:]:
        table.add_row(*line)
    console = Console(markup=False)
    console.clear()  # on a terminal
    console.print(table)


def make_cell(value: Any) -> str:
    """Returns the text of a cell of the table, for a value of any type.

    >>> make_cell(2400), make_cell(0.54321), make_cell(None)
    ('2,400', '0.543', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


if __name__ == "__main__":
    sys.exit(main())
