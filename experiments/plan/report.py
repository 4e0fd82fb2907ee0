"""The table and the plots of a plan."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.plan.candidates import Candidate
from experiments.plan.choice import Plan, Row, Situation
from gossipjax.cost_model import Network, predict_step

COLORS = matplotlib.color_sequences["petroff10"]
MARKERS = "os^vDP"
MEGA = 1e6
PLOTTED = ("allreduce", "sgp", "sgp-cwa", "async-sgp", "dpsgd@ring", "streaming-diloco")
DECADES = 2  # of bandwidth, to each side
POINTS = 41
MAX_PLAIN = 1e8  # beyond it a number in the table has three digits


def make_table(plan: Plan) -> Table:
    """A row per method, the cheapest first."""
    table = Table(
        title=describe_situation(plan.chosen.situation),
        caption="Modelled, not measured. counted: seconds for what AllReduce learns in a step, "
        "assumed. sigma: of the first log2(N) steps, 0 is an exact average, - if busy links leave "
        "exchanges out. late: steps until what a node has learned is at all others. MB: of a node, "
        "sent per step; kept beside the usual. (): not in gossipjax.",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", overflow="fold", min_width=16)
    headers = ("s per\nstep", "coun-\nted", "examples\nper s", "effi-\nciency", "MB\nsent")
    for header in (*headers, "sig-\nma", "stale\nsteps", "\nlate", "MB\nkept"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_format_row(row), style="bold" if row is plan.chosen else "")
    return table


def _format_row(row: Row) -> list[str]:
    label = row.candidate.label
    record = row.make_record()
    return [
        label if row.candidate.is_here else f"({label})",
        f"{row.seconds:.3g}",
        f"{row.priced_seconds:.3g}",
        _format_large(record["examples_per_second"]),
        f"{record['efficiency']:.0%}",
        f"{record['sent_bytes'] / MEGA:,.4g}",
        "-" if row.sigma is None else f"{row.sigma:.2f}",
        f"{row.staleness:.3g}",
        f"{row.lateness:.3g}",
        _format_large(record["kept_bytes"] / MEGA),
    ]


def _format_large(value: float) -> str:
    return f"{value:,.0f}" if value < MAX_PLAIN else f"{value:.3g}"


def describe_situation(situation: Situation) -> str:
    """What the plan is for, in a line."""
    network = situation.network
    slowness = situation.slowness
    if situation.is_even:
        slow = ""
    elif slowness.kind == "constant":
        slow = f", one {slowness.factor:g}x slow"
    else:
        slow = f", {slowness.kind} slowness"
    return (
        f"{situation.nodes} node{'s' * (situation.nodes > 1)}{slow}, "
        f"{situation.workload.model_bytes / MEGA:,.4g} MB of parameters, "
        f"{situation.workload.compute_seconds:g} s of computation, "
        f"{network.name or format_bandwidth(network.bandwidth)}"
    )


def describe_reason(plan: Plan) -> str:
    """The choice and its reason, in two or three lines."""
    reason = plan.reason
    if reason.cause == "one node":
        return "Choice: single. One node has nobody to exchange with."
    lines = [
        f"Choice: {plan.chosen.candidate.label}: {reason.cause}. It takes "
        f"{format_seconds(reason.seconds)} a step, AllReduce "
        f"{format_seconds(reason.allreduce_seconds)}; counted, the gain over AllReduce is "
        f"{reason.gain:+.0%}."
    ]
    if reason.bucketed_seconds is not None:
        lines.append(
            f"Other libraries all-reduce beside the backward pass: "
            f"{format_seconds(reason.bucketed_seconds)} if the overlap is perfect."
        )
    if reason.evidence is not None:
        lines.append(f"Measured by others: {reason.evidence}.")
    return "\n".join(lines)


def format_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in words, in bits per second below 20 GB/s and in bytes from there on.

    >>> format_bandwidth(1.25e9), format_bandwidth(25e6), format_bandwidth(450e9)
    ('10 Gbit/s', '200 Mbit/s', '450 GB/s')
    """
    if bytes_per_second >= 2e10:
        return f"{bytes_per_second / 1e9:.4g} GB/s"
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.4g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"


def format_seconds(seconds: float) -> str:
    """Seconds in words, to a millisecond where that says something, else of three digits.

    >>> format_seconds(0.2284), format_seconds(3e-6), format_seconds(2.5e12), format_seconds(0.0)
    ('0.228 s', '3e-06 s', '2.5e+12 s', '0.000 s')
    """
    is_plain = seconds == 0 or 1e-3 <= seconds < 1e5
    return f"{seconds:.3f} s" if is_plain else f"{seconds:.3g} s"


def plot_seconds_over_bandwidth(plan: Plan, path: Path) -> None:
    """Plots the predicted seconds per iteration over the bandwidth, all nodes equally fast."""
    network = plan.chosen.situation.network
    factors = np.logspace(-DECADES, DECADES, POINTS)
    faster = [_scale_bandwidth(network, factor) for factor in factors]
    nodes = plan.chosen.situation.nodes
    curves = {
        candidate.label: {one.bandwidth: (candidate, one, nodes) for one in faster}
        for candidate in _choose_plotted(plan)
    }
    figure, axes = _draw(plan, curves, f"{nodes} nodes")
    axes.axvline(network.bandwidth, color="black", linestyle=":", label="of the plan")
    axes.set_xlabel("bandwidth of a link (bytes per second, one way)")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path)


def plot_seconds_over_nodes(
    plan: Plan, list_candidates: Callable[[int], Sequence[Candidate]], path: Path
) -> None:
    """Plots the predicted seconds per iteration over the number of nodes, all equally fast.

    Args:
      plan: gives the methods.
      list_candidates: the methods for a number of nodes.
      path: of the plot.
    """
    situation = plan.chosen.situation
    sizes = [2**k for k in range(1, max(1, math.ceil(math.log2(situation.nodes))) + 1)]
    found = {(n, one.label): one for n in sizes for one in list_candidates(n)}
    curves = {
        candidate.label: {
            n: (found[n, candidate.label], situation.network, n)
            for n in sizes
            if (n, candidate.label) in found
        }
        for candidate in _choose_plotted(plan)
    }
    figure, axes = _draw(plan, curves, describe_situation(situation))
    axes.set_xlabel("nodes")
    axes.set_xticks(sizes, [f"{n}" for n in sizes], minor=False)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path)


Curve = dict[float, tuple[Candidate, Network, int]]  # x -> the method, its network and its nodes


def _draw(plan: Plan, curves: dict[str, Curve], title: str) -> tuple[Figure, Axes]:
    workload = plan.chosen.situation.workload
    figure = Figure((7, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for index, (label, curve) in enumerate(curves.items()):
        seconds = [
            predict_step(candidate.method, workload, network, nodes).seconds
            for candidate, network, nodes in curve.values()
        ]
        look = {"color": COLORS[index], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(list(curve), seconds, label=label, markevery=max(1, len(curve) // 8), **look)
    axes.set_title(f"Modelled time per iteration, {title}", fontsize="medium", wrap=True)
    axes.set(xscale="log", yscale="log")
    axes.set_ylabel("seconds per iteration (no node slow)")
    axes.grid(alpha=0.3, which="both")
    return figure, axes


def _choose_plotted(plan: Plan) -> list[Candidate]:
    """The choice and well-known methods, by name; at most as many as there are colours."""
    chosen = plan.chosen.candidate
    others = [
        row.candidate
        for row in plan.rows
        if row.candidate.name.split(",")[0] in PLOTTED and row.candidate.label != chosen.label
    ]
    return [chosen, *sorted(others, key=lambda candidate: candidate.label)][: len(COLORS)]


def _scale_bandwidth(network: Network, factor: float) -> Network:
    """The same network with links that are `factor` times as fast."""
    gossip = network.gossip_bandwidth
    return dataclasses.replace(
        network,
        bandwidth=network.bandwidth * factor,
        gossip_bandwidth=None if gossip is None else gossip * factor,
    )
