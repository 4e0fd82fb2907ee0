"""The table of compiled train steps: what they exchange, among which nodes, and beside what."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.results import Record
from experiments.speed.schedule.components import describe_components


def format_messages(messages: Sequence[Record]) -> str:
    """A line per kind of message: count, opcode, type and bytes."""
    counts: dict[tuple[str, str, int], int] = {}
    for message in messages:
        kind = (message["opcode"], message["dtype"], message["bytes"])
        counts[kind] = counts.get(kind, 0) + 1
    lines = [
        f"{count} {opcode} {dtype} {size:,}" for (opcode, dtype, size), count in counts.items()
    ]
    return "\n".join(lines) or "none"


def format_components(components: Sequence[Sequence[int]]) -> str:
    """A line per kind of permutation."""
    return "\n".join(map(describe_components, components)) or "-"


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    table = Table(
        title="Collectives of a compiled step, and matrix products between start and done",
        caption="collectives: of one node: count, kind, type and bytes of each; joined: nodes that "
        "a permute joins, components x nodes; no message: edges that carry none",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for header in ("target", "algorithm", "topology", "collectives", "joined", "as expected"):
        table.add_column(header, overflow="fold")
    for header in ("no message", "programs", "matmuls", "overlapped"):
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        expected = (
            f"NO: {format_messages(run['expected_messages'])}; joined: "
            f"{format_components(run['expected_components'])}"
        )
        table.add_row(
            run["target"],
            run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else ""),
            run["topology"].replace("_", " "),
            format_messages(run["messages"]),
            format_components(run["components"]),
            "yes" if run["matches_schedule"] else expected,
            f"{run['self_edges'] + run['fillers']}",
            f"{run['programs']}",
            f"{run['matmuls']}",
            f"{run['matmuls_overlapped']} ({run['fraction_overlapped']:.0%})",
        )
    return table
