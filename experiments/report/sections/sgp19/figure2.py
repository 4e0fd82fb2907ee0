"""SGP-19, Figure 2: distances of the nodes' parameters from their average."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

import gossipjax as gx
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Result,
    Results,
    Scale,
    Section,
    Table,
)
from experiments.report.sections.curves import COLORS, Curve, label_axes, read_curves
from experiments.report.sections.samples import format_verdicts
from experiments.report.sections.sgp19.grid import (
    DEVIATIONS,
    find_sizes,
    list_deviation_runs,
)
from experiments.results import AFTER_MIXING, BEFORE_MIXING

SPARSE = "one peer"
DENSE = "all to all"
TOPOLOGIES = {SPARSE: "one_peer_exponential", DENSE: "complete"}
WARMUP = 1 / 18
DECAYS = (1 / 3, 2 / 3, 8 / 9)
"""Parts of the run at which the rate falls to a tenth, as --lr-schedule step has them."""
SETTLED = 0.5  # the part at the end of a level over which distances are averaged
MIN_DROP = 5.0  # of a distance at a decay, "an order of magnitude"
MAX_DROP = 20.0
MIN_RATIO = 2.0  # "much greater" deviations over the sparse graph


def find(scale: Scale, results: Results) -> Findings:
    """Compares the distances over the two graphs and at each learning rate."""
    nodes = find_sizes(scale).overlap
    result = results.get(DEVIATIONS, Result(status="missing"))
    before = read_distances(result, BEFORE_MIXING)
    after = read_distances(result, AFTER_MIXING)
    levels = {name: average_levels(curve) for name, curve in before.items()}
    claims = [judge_drops(levels), judge_warmup(before), judge_ratio(levels)]
    rows = []
    for name in TOPOLOGIES:
        for when, curves in (("before", before), ("after", after)):
            rows.append((name, when, *format_levels(curves[name])))
    table = Table(
        f"Euclidean distance of a node's parameters from the average, mean over {nodes} nodes",
        (
            "graph",
            "exchange",
            "rate",
            *(f"rate / {10**index}" for index in range(1, len(DECAYS) + 1)),
        ),
        tuple(rows),
        "Over the second half of the time with each rate. Before: after the gradient step, the "
        "paper's quantity. The paper shows it in a figure without a table.",
    )
    figure = Figure(
        "deviations",
        "Distance of a node's parameters from the average, mean over the nodes, before the "
        "exchange (lines) and after it (dotted; over the complete graph only rounding is left). "
        "Vertical lines: the end of the warm-up, and the decays of the rate.",
        partial(draw, before, after),
    )
    return Findings(claims, compose(claims, levels, nodes), [table], [figure])


def read_distances(result: Result, field: str) -> dict[str, Curve]:
    """Returns distances over the steps, for each graph; empty without a run."""
    curves = dict.fromkeys(TOPOLOGIES, Curve((), ()))
    for name, topology in TOPOLOGIES.items():
        for run in result.runs:
            if run["topology"] == topology:
                curves[name] = read_curves(result.folder, run, field)
    return curves


def average_levels(curve: Curve) -> list[float]:
    """Returns the geometric mean at each learning rate; none without a curve that has them all.

    >>> steps = tuple(range(1, 10))
    >>> levels = average_levels(Curve(steps, (1.0, 8.0, 8.0, 6.0, 4.0, 4.0, 3.0, 3.0, 1.0)))
    >>> [round(level, 2) for level in levels]
    [8.0, 4.0, 3.0, 1.0]
    """
    ends = (*DECAYS, 1.0)
    begins = (0.0, *DECAYS)
    means = []
    for begin, end in zip(begins, ends, strict=True):
        middle = end - SETTLED * (end - begin)
        values = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if middle < step / curve.steps[-1] <= end and value > 0
        ]
        if not values:
            return []
        means.append(statistics.geometric_mean(values))
    return means


def format_levels(curve: Curve) -> list[str]:
    """Returns the distances at each learning rate for a table; zeros where nothing is left.

    >>> format_levels(Curve((1, 2), (0.0, 0.0))), format_levels(Curve((), ()))
    (['0', '0', '0', '0'], ['-', '-', '-', '-'])
    """
    gap = "0" if curve.steps and not any(curve.values) else "-"
    return [f"{level:.2g}" for level in average_levels(curve)] or [gap] * (1 + len(DECAYS))


def find_drops(levels: Sequence[float]) -> list[float]:
    """Returns the factor by which the distance falls at each decay.

    >>> find_drops([8.0, 4.0, 1.0])
    [2.0, 4.0]
    """
    return [above / below for above, below in itertools.pairwise(levels)]


def judge_drops(levels: Mapping[str, list[float]]) -> Claim:
    """Whether the distances fall as the rate does."""
    drops = {name: find_drops(values) for name, values in levels.items()}
    all_drops = [drop for values in drops.values() for drop in values]
    is_whole = all(drops.values())
    texts = {
        name: ", ".join(f"{drop:.1f}" for drop in values) or "-" for name, values in drops.items()
    }
    return Claim(
        "When the rate falls to a tenth, the distance before the exchange falls by "
        f"{MIN_DROP:g} to {MAX_DROP:g} times, at each of the {len(DECAYS)} decays and over both "
        "graphs.",
        '"by an order of magnitude, in concert with the learning rate"',
        "; ".join(f"{name}: {text} times" for name, text in texts.items()),
        all(MIN_DROP <= drop <= MAX_DROP for drop in all_drops) if is_whole else None,
    )


def judge_warmup(before: Mapping[str, Curve]) -> Claim:
    """Whether the distances grow while the rate does."""
    growth = {}
    for name, curve in before.items():
        values = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if step <= WARMUP * curve.steps[-1]
        ]
        if len(values) > 1:
            growth[name] = values[-1] / values[0]
    return Claim(
        "The distance grows during the warm-up of the rate.",
        '"gradually increase ... following the learning rate warm-up"',
        "; ".join(
            f"{name}: {growth[name]:.1f} times" if name in growth else f"{name}: -"
            for name in before
        ),
        all(value > 1 for value in growth.values()) if len(growth) == len(before) else None,
    )


def judge_ratio(levels: Mapping[str, list[float]]) -> Claim:
    """Whether the distances are much greater over the sparse graph."""
    ratios = find_ratios(levels)
    return Claim(
        f"Before the exchange the distance with one peer is at least {MIN_RATIO:g} times that of "
        "all to all, at each rate.",
        '"much greater deviation ... over sparse topologies"',
        ", ".join(f"{ratio:.2f}" for ratio in ratios) or "-",
        all(ratio >= MIN_RATIO for ratio in ratios) if ratios else None,
    )


def find_ratios(levels: Mapping[str, list[float]]) -> list[float]:
    """Returns the distance with one peer in those of all to all, at each rate."""
    if not all(levels.values()):
        return []
    pairs = zip(levels[SPARSE], levels[DENSE], strict=True)
    return [sparse / dense for sparse, dense in pairs]


def bound_ratio(nodes: int, persists: bool) -> float:
    """Returns the ratio of the distances before the exchange that follows from the mixing alone.

    The updates of a node are random and independent of those of others. Over the complete graph
    the distance is that of one update. With one peer, earlier updates are left in it:

        d = sum_k (P_k ... P_1 u_k)

    Args:
      nodes: N.
      persists: whether a node's update stays the same, `u_k = u`; else all are independent.

    >>> f"{bound_ratio(16, False):.2f} {bound_ratio(16, True):.2f}"
    '1.32 1.97'
    """
    matrices = gx.topology.one_peer_exponential(nodes).matrices()
    center = np.eye(nodes) - 1 / nodes
    product = np.eye(nodes)
    products = [center @ product]
    for matrix in matrices:
        product = matrix @ product
        products.append(center @ product)
    squares = [float(np.square(part).sum()) for part in ([sum(products)] if persists else products)]
    return math.sqrt(sum(squares) / float(np.square(center).sum()))


def draw(before: Mapping[str, Curve], after: Mapping[str, Curve], figure: MatplotlibFigure) -> None:
    """Draws the distances over the run."""
    figure.set_size_inches(7.0, 4.0)
    axes = figure.add_subplot()
    styles = ((before, "-", "before the exchange"), (after, ":", "after"))
    for number, name in enumerate(before):
        for curves, style, when in styles:
            curve = curves[name]
            parts = [100 * step / curve.steps[-1] for step in curve.steps]
            axes.plot(parts, curve.values, style, color=COLORS[number], label=f"{name}, {when}")
    for part in (WARMUP, *DECAYS):
        axes.axvline(100 * part, color="0.7", lw=0.8)
    axes.set_yscale("log")
    label_axes(axes, "", "part of the run, %", "distance from the average")
    axes.legend(fontsize=8)


def compose(claims: list[Claim], levels: Mapping[str, list[float]], nodes: int) -> str:
    """The sentence of the section, with what bounds the ratio."""
    titles = [
        "the distances follow the decays of the rate",
        "and its warm-up",
        "those with one peer are much greater",
    ]
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    sentence = f"{format_verdicts(holds)}.".capitalize()
    ratios = find_ratios(levels)
    if ratios:
        sentence += (
            f" Before the exchange one peer's are {min(ratios):.2f} to {max(ratios):.2f} times "
            "those of all to all, whose distance is that of one step's own updates. The mixing "
            f"alone gives {bound_ratio(nodes, False):.2f} if a node's updates are independent from "
            f"step to step and {bound_ratio(nodes, True):.2f} if they stay the same, so no large "
            "factor can be expected; after the exchange all to all leaves nothing."
        )
    return sentence


SECTION = Section(
    name="sgp19-figure2",
    title="Distances of the nodes from their average",
    source="SGP-19, Figure 2",
    write_text=lambda _: (
        "The paper shows, for SGP over 16 nodes, the Euclidean distance between a node's "
        "parameters and the average, at the end of each epoch, after the last gradient step and "
        "before the exchange: with one peer at a time (sparse) and all to all (dense). Here: the "
        "same quantity of the same runs as Table 1's, seed 0, at more steps; and the distance "
        "after the exchange, which the paper does not show."
    ),
    list_runs=list_deviation_runs,
    find=find,
)
