"""Tables of measurements on a wire."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from experiments.results import Record
from experiments.tables import Cell, make_table, scale

MEGA = 1e6

ROW_COLUMNS: dict[str, Cell] = {
    "algorithm": lambda run: (
        run["algorithm"].replace("@", " ").replace("_", " ") + "*" * run["overlaps"]
    ),
    "wire": "{wire}",
    "seconds per\niteration": "{seconds:.3f} [{seconds_p10:.2f}-{seconds_p90:.2f}]",
    "MB\nsent": scale("sent_bytes", MEGA, ".2f"),
    "MB\non NIC": scale("nic_bytes", MEGA, ".2f"),
    "sum\n(s)": "{limit_sum_seconds:.3f}",
    "max\n(s)": "{limit_max_seconds:.3f}",
    "x\nbound": "{ratio_to_limit:.2f}",
    "x\nmodel": lambda run: format_inverse(run["modelled_ratio"], ".2f"),
}
ROW_LEGEND = (
    "computation without exchange {computation_seconds:.3f} "
    "[{computation_seconds_p10:.2f}-{computation_seconds_p90:.2f}] s "
    "({examples_per_host} examples per host)\n"
    "plain TCP stream {all_links:.3g} MB/s on all links at once, {one_link:.3g} on one\n"
    "seconds: median of the slowest host (async: mean over hosts and iterations), 10-90 %\n"
    "MB: of the host that sends most\n"
    "sum: computation + bytes / faster stream; max: the larger of the two\n"
    "x bound: seconds / sum; seconds / max with *, where the exchange can overlap\n"
    "x model: seconds / those of the cost model, with the processor time measured here"
)
STRAGGLER_COLUMNS: dict[str, Cell] = {
    "slowness": "{slowness}",
    "algorithm": "{algorithm}",
    "examples\n/s": "{examples_per_second:,.0f}",
    "x\nnone": scale("ratio_to_none", 1, ".3f"),
    "x\nideal": scale("ratio_to_ideal", 1, ".3f"),
    "x\nbound": scale("ratio_to_limit", 1, ".3f"),
    "x\nmodel": lambda run: format_inverse(run["modelled_ratio"], ".3f"),
    "steps of\nslowest": "{steps_min}",
    "steps,\nmedian": "{steps_median:g}",
}
STRAGGLER_CAPTION = (
    "Computation is a sleep of {compute_seconds:g} s per step, as of a device that does not share "
    "these cores. examples/s: in lockstep, until all have ended; "
    "async-, each node's until its last step ended, summed. x none: over those of the "
    "algorithm without slow nodes. x ideal: that ratio over what it is if only computation takes "
    "time. x bound: examples/s over those if only computation takes time. x model: over those of a "
    "simulation with the same factors."
)


def format_inverse(ratio: float | None, digits: str) -> str:
    """Measured over modelled, from modelled over measured; - of what is not modelled."""
    return "-" if ratio is None else f"{1 / ratio:{digits}}"


def report_rows(
    configurations: Sequence[Record],
    runs: Sequence[Record],
    left_out: Mapping[str, Mapping[str, str]],
    console: Console,
) -> None:
    """Prints a table for each number of hosts and bandwidth, and what was left out."""
    for configuration in configurations:
        fields = ("hosts", "bandwidth", "computation")
        rows = [run for run in runs if all(run[x] == configuration[x] for x in fields)]
        link = configuration["bandwidth"] or "loopback"
        megabytes = 4 * configuration["parameters"] / MEGA
        title = (
            f"{configuration['hosts']} hosts, {link}, computation {configuration['computation']}, "
            f"{megabytes:.3g} MB of parameters"
        )
        console.print(make_table(title, "", ROW_COLUMNS, [make_stream_row(configuration), *rows]))
        goodputs = {
            name: configuration[f"goodput_{name}"] / MEGA for name in ("all_links", "one_link")
        }
        console.print(ROW_LEGEND.format(**configuration, **goodputs))
    for nodes, reasons in left_out.items():
        for name, reason in reasons.items():
            console.print(f"left out ({nodes}): {name}: {reason}", soft_wrap=True)


def make_stream_row(configuration: Record) -> Record:
    """The row of plain TCP: a stream of the model's bytes from each host to the next at once."""
    sent = 4 * configuration["parameters"]
    scaled = sent / configuration["stream_bytes"]
    quantiles = ("", "_p10", "_p90")
    row = {f"seconds{x}": scaled * configuration[f"stream_seconds{x}"] for x in quantiles}
    row |= dict.fromkeys(("limit_sum_seconds", "limit_max_seconds"), row["seconds"])
    row |= {"algorithm": "a TCP stream", "wire": "float32", "overlaps": False}
    return row | {
        "sent_bytes": sent, "nic_bytes": None, "ratio_to_limit": 1.0, "modelled_ratio": None
    }  # fmt: skip


def report_stragglers(runs: Sequence[Record], console: Console) -> None:
    """Prints the table of slow nodes."""
    first = runs[0]
    order = list(dict.fromkeys(run["slowness"] for run in runs))
    rows = sorted(runs, key=lambda run: order.index(run["slowness"]))
    title = f"{first['nodes']} nodes, {first['steps']} steps of each on average"
    caption = STRAGGLER_CAPTION.format(**first)
    console.print(make_table(title, caption, STRAGGLER_COLUMNS, rows, texts=2))
