"""The table of the averaging experiment."""

from collections.abc import Sequence

from rich.table import Table

from experiments.results import Record
from experiments.tables import Cell, make_table

ROUNDING_ERROR = 1e-15  # a smaller error is only float64 rounding


def make_topology_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the list `runs` of `summary.json`."""
    columns: dict[str, Cell] = {
        "topology": "{topology}",
        "\nnodes": "{nodes}",
        "\npeers": "{peers_per_round}",
        "\nperiod": "{period}",
        "gap per\nround": "{spectral_gap_per_round:.4f}",
        "exact\nafter": lambda run: f"{run['rounds_to_exact_average'] or 'never'}",
        "error\nafter 5": lambda run: _format_error(run["error_after_5_rounds"]),
        "final\nerror": lambda run: _format_error(run["final_error"]),
    }
    caption = "errors: medians over the seeds; all others: seed 0"
    return make_table("Topologies", caption, columns, runs)


def _format_error(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" if error > ROUNDING_ERROR else f"<{ROUNDING_ERROR:.0e}"
