"""SGP-19, Figure 2: distances of the nodes' parameters from their average."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

import gossipjax as gx
from experiments.plots import choose_colors
from experiments.report.drawing import Curve, label_axes, read_curves, use_log_scale
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Place,
    Results,
    Scale,
    Table,
    compare,
    exact,
    read_section,
)
from experiments.report.sections.sgp19 import find_sizes, list_size
from experiments.results import AFTER_MIXING, BEFORE_MIXING
from experiments.runner import Run

RUN = "sgp19-deviations"
SPARSE = "one peer"
DENSE = "all to all"
TOPOLOGIES = {SPARSE: "one_peer_exponential", DENSE: "complete"}
DECAYS = (1 / 3, 2 / 3, 8 / 9)
"""Parts of the run at which the rate falls to a tenth, as --lr-schedule step has them."""
RATES = ("rate", "/ 10", "/ 100", "/ 1000")
SETTLED = 0.5  # the part at the end of a level over which distances are averaged
MIN_EXCESS = 0.5
"""Of what the mixing alone adds to the distance with one peer: the part that counts as greater."""
MAX_RATIO = 2.15  # of the distances before the exchange; without hops in turn it is larger
SPREAD = 0.1  # standard deviation of the logarithm of a distance, where there is one
NO_CURVE = Curve((), ())

Levels = Sequence[Sequence[float]]
"""The distances with each learning rate, once settled; none if a rate has none."""


def list_runs(scale: Scale) -> list[Run]:
    """Returns a call of one seed, with more lines; a line costs one more gradient."""
    sizes = find_sizes(scale)
    size = list_size(scale, sizes.overlap, sizes.epochs, lines=120)
    algorithms = ("--algorithm", "sgp", "sgp@complete")
    return [Run(RUN, "image", (*algorithms, *size, "--placement", "vmap", "--seed", "0"))]


def find(scale: Scale, results: Results) -> Findings:
    """Compares the distances over the two graphs and at each learning rate."""
    nodes = find_sizes(scale).overlap
    before, after = (read_distances(results, field) for field in (BEFORE_MIXING, AFTER_MIXING))
    levels = {name: split_levels(curve) for name, curve in before.items()}
    drops = {}
    ratios = {}
    if all(levels.values()):
        for name, parts in levels.items():
            means = map(statistics.geometric_mean, parts)
            for number, (above, below) in enumerate(itertools.pairwise(means), start=1):
                drops[f"{name}, {number}"] = exact(above / below)
        for rate, sparse, dense in zip(RATES, levels[SPARSE], levels[DENSE], strict=True):
            ratios[rate] = compare(list(map(math.log, sparse)), list(map(math.log, dense)), SPREAD)
    random = bound_ratio(nodes, persists=False)
    bound = 1 + MIN_EXCESS * (random - 1)
    claims = [
        Claim(
            "When the rate falls to a tenth, the distance before the exchange falls by 5 to 20 "
            "times, at each decay and over both graphs.",
            '"by an order of magnitude, in concert with the learning rate"',
            drops,
            at_least=5.0,
            at_most=20.0,
            spec=".1f",
        ),
        Claim(  # no step has more than the 256 images from which the rate rises
            "The distance grows during the warm-up of the rate, which these runs do not have.",
            '"gradually increase ... following the learning rate warm-up"',
            {},
        ),
        Claim(
            f"Before the exchange the distance with one peer is at least {bound:.2f} times that of "
            "all to all, at each rate, in logarithms.",
            '"much greater deviation ... over sparse topologies"',
            ratios,
            at_least=math.log(bound),
            if_not=f"The mixing alone would make them {random:.2f} times as large if a node's "
            "updates were independent from step to step, and "
            f"{bound_ratio(nodes, persists=True):.2f} times if they stayed the same, so no large "
            "factor can be expected.",
        ),
    ]
    claims.append(
        Claim(
            f"With one peer it is at most {MAX_RATIO:g} times that: hops in turn leave no more. In "
            "logarithms.",
            f"{bound_ratio(nodes, persists=True):.2f} where updates stay the same, by arithmetic",
            ratios,
            at_most=math.log(MAX_RATIO),
        )
    )
    table = Table(
        f"Euclidean distance of a node's parameters from the average, mean over {nodes} nodes",
        ("graph", "exchange", "rate", "rate / 10", "rate / 100", "rate / 1000"),
        [
            (name, when, *format_levels(curves[name]))
            for name in TOPOLOGIES
            for when, curves in (("before", before), ("after", after))
        ],
        "Over the second half of the time with each rate. Before: after the gradient step, the "
        "paper's quantity. The paper shows it in a figure without a table.",
    )
    figure = Figure(
        "deviations",
        "Distance of a node's parameters from the average, mean over the nodes, before the "
        "exchange (lines) and after it (dotted; over the complete graph only rounding is left). "
        "Vertical lines: the decays of the rate.",
        partial(draw, before, after),
    )
    return Findings(claims, [table], [figure])


def read_distances(results: Results, field: str) -> dict[str, Curve]:
    """Returns distances over the steps, for each graph; empty without a run."""
    return {
        name: next(iter(read_curves(results, Place(RUN, "sgp", graph), field)), NO_CURVE)
        for name, graph in TOPOLOGIES.items()
    }


def split_levels(curve: Curve) -> Levels:
    """Returns the values with each learning rate, once settled; none if a rate has none.

    >>> split_levels(Curve(tuple(range(1, 10)), (1.0, 8.0, 8.0, 6.0, 4.0, 4.0, 3.0, 3.0, 1.0)))
    [[8.0, 8.0], [4.0, 4.0], [3.0, 3.0], [1.0]]
    """
    levels = []
    for begin, end in itertools.pairwise((0.0, *DECAYS, 1.0)):
        middle = end - SETTLED * (end - begin)
        values = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if middle < step / curve.steps[-1] <= end and value > 0
        ]
        levels.append(values)
    return levels if all(levels) else []


def format_levels(curve: Curve) -> list[str]:
    """Returns the distances at each learning rate for a table; zeros where nothing is left.

    >>> format_levels(Curve((1, 2), (0.0, 0.0))), format_levels(NO_CURVE)
    (['0', '0', '0', '0'], ['-', '-', '-', '-'])
    """
    levels = split_levels(curve)
    if levels:
        return [f"{statistics.geometric_mean(values):.2g}" for values in levels]
    return ["0" if curve.steps and not any(curve.values) else "-"] * len(RATES)


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
    center = np.eye(nodes) - 1 / nodes
    product = np.eye(nodes)
    products = [center]
    for matrix in gx.topology.one_peer_exponential(nodes).matrices():
        product = matrix @ product
        products.append(center @ product)
    squares = [float(np.square(part).sum()) for part in ([sum(products)] if persists else products)]
    return math.sqrt(sum(squares) / float(np.square(center).sum()))


def draw(before: Mapping[str, Curve], after: Mapping[str, Curve], figure: MatplotlibFigure) -> None:
    """Draws the distances over the run; those that are 0 are not on a logarithmic axis."""
    figure.set_size_inches(7.0, 4.0)
    axes = figure.add_subplot()
    styles = ((before, "-", "before the exchange"), (after, ":", "after"))
    for name, color in choose_colors(list(before)).items():
        for curves, style, when in styles:
            curve = curves[name]
            parts = [100 * step / curve.steps[-1] for step in curve.steps]
            if any(curve.values):
                axes.plot(parts, curve.values, style, color=color, label=f"{name}, {when}")
    for part in DECAYS:
        axes.axvline(100 * part, color="0.7", lw=0.8)
    use_log_scale(axes)
    label_axes(axes, "", "part of the run, %", "distance from the average")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=True, framealpha=1, edgecolor="none")


SECTION = read_section(
    name="sgp19-figure2",
    find_numbers=lambda scale: find_sizes(scale)._asdict(),
    list_runs=list_runs,
    find=find,
    judges_when_quick=True,
)
