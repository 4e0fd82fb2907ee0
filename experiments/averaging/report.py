"""Tables of the averaging experiment."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.results import Record

ROUNDING_ERROR = 1e-15  # a smaller error is only float64 rounding


def make_sgp18_table(factors: Sequence[Record]) -> Table:
    """Makes a table of the list `sgp18_appendix_a` of `summary.json`."""
    table = make_table(
        f"sigma_2 squared, {factors[0]['nodes']} nodes, {factors[0]['rounds']} rounds",
        "SGP-18: appendix A; a bound on the squared error. ±: standard deviation over the seeds",
        ("peer in each round", "ours", "SGP-18"),
    )
    for record in factors:
        table.add_row(record["label"], _format_mean(record, "{:.3f}"), record["paper"])
    return table


def make_rand20_table(rings: Sequence[Record]) -> Table:
    """Makes a table of the list `rand20_rings` of `summary.json`."""
    headers = ("nodes", "ring:\nlambda_2", "\nRAND-20", "ring:\ndistance", "\nRAND-20")
    table = make_table(
        f"Rings, distance to the exact average after {rings[0]['rounds']} rounds",
        "RAND-20: eqs. 6, 5, 12. ±: standard deviation over seeds",
        (*headers, "randomized:\ndistance", "bound\n(RAND-20)"),
    )
    for record in rings:
        table.add_row(
            f"{record['nodes']}",
            f"{record['second_eigenvalue']:.4f}",
            f"{record['paper_second_eigenvalue']:.4f}",
            f"{record['ring_distance']:.4f}",
            f"{record['paper_ring_distance']:.4f}",
            _format_mean(record, "{:.4f}"),
            f"{record['paper_bound']:.4f}",
        )
    return table


def make_topology_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the list `runs` of `summary.json`."""
    headers = ("topology", "\nnodes", "\npeers", "\nperiod", "spectral\ngap", "exact\nafter")
    table = make_table(
        "Topologies",
        "errors: medians over the seeds; all others: seed 0",
        (*headers, "error\nafter 5", "final\nerror"),
    )
    for run in runs:
        table.add_row(
            run["topology"],
            f"{run['nodes']}",
            f"{run['peers_per_round']}",
            f"{run['period']}",
            f"{run['spectral_gap']:.4f}",
            f"{run['rounds_to_exact_average'] or 'never'}",
            _format_error(run["error_after_5_rounds"]),
            _format_error(run["final_error"]),
        )
    return table


def make_table(title: str, caption: str, headers: Sequence[str], is_wrapped: bool = False) -> Table:
    """An empty table: the first column has text, the others numbers."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0, min_width=64)
    table.add_column(headers[0], overflow="fold", min_width=12)
    for header in headers[1:]:
        table.add_column(header, justify="right", no_wrap=not is_wrapped)
    return table


def _format_error(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" if error > ROUNDING_ERROR else f"<{ROUNDING_ERROR:.0e}"


def _format_mean(record: Record, number_format: str) -> str:
    mean = number_format.format(record["mean"])
    if 0 <= record["mean"] < 1e-12:
        mean = "<1e-12"
    deviation = record["standard_deviation"]
    return mean if deviation is None else f"{mean} ±{number_format.format(deviation)}"


def print_report(
    console: Console, runs: Sequence[Record], factors: Sequence[Record], rings: Sequence[Record]
) -> None:
    """Prints the tables."""
    console.print(make_sgp18_table(factors))
    console.print(make_rand20_table(rings))
    console.print(make_topology_table(runs))
