"""SGP-19, Figure 2: distances of the nodes' parameters from their average."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

import gossipjax as gx
from experiments.report.differences import Difference, find_difference
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
from experiments.report.sections.curves import (
    COLORS,
    Curve,
    label_axes,
    read_curves,
    use_log_scale,
)
from experiments.report.sections.samples import format_verdicts
from experiments.report.sections.sgp19.grid import (
    DEVIATION_LINES,
    DEVIATIONS,
    Sizes,
    find_sizes,
    list_deviation_runs,
)
from experiments.report.sections.sgp19.readings import is_at_least
from experiments.report.sections.sgp19.task import refer_to_task
from experiments.results import AFTER_MIXING, BEFORE_MIXING
from experiments.training.optimization.learning_rates import STEP_BATCH_SIZE

SPARSE = "one peer"
DENSE = "all to all"
TOPOLOGIES = {SPARSE: "one_peer_exponential", DENSE: "complete"}
DECAYS = (1 / 3, 2 / 3, 8 / 9)
"""Parts of the run at which the rate falls to a tenth, as --lr-schedule step has them."""
SETTLED = 0.5  # the part at the end of a level over which distances are averaged
MIN_DROP = 5.0  # of a distance at a decay, "an order of magnitude"
MAX_DROP = 20.0
MIN_EXCESS = 0.5
"""Of what the mixing alone adds to the distance with one peer: the part that counts as greater."""
SPREAD = 0.1  # standard deviation of the logarithm of a distance, where there is one


def find(scale: Scale, results: Results) -> Findings:
    """Compares the distances over the two graphs and at each learning rate."""
    sizes = find_sizes(scale)
    nodes = sizes.overlap
    result = results.get(DEVIATIONS, Result(status="missing"))
    before = read_distances(result, BEFORE_MIXING)
    after = read_distances(result, AFTER_MIXING)
    ratios = find_ratios(before)
    claims = [judge_drops(before), judge_warmup(sizes), judge_ratio(ratios, nodes)]
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
        "Vertical lines: the decays of the rate.",
        partial(draw, before, after),
    )
    return Findings(claims, compose(claims, ratios, nodes), [table], [figure])


def read_distances(result: Result, field: str) -> dict[str, Curve]:
    """Returns distances over the steps, for each graph; empty without a run."""
    curves = dict.fromkeys(TOPOLOGIES, Curve((), ()))
    for name, topology in TOPOLOGIES.items():
        for run in result.runs:
            if run["topology"] == topology:
                curves[name] = read_curves(result.folder, run, field)
    return curves


def split_levels(curve: Curve) -> list[list[float]]:
    """Returns the values with each learning rate, once settled; none if a rate has none.

    >>> split_levels(Curve(tuple(range(1, 10)), (1.0, 8.0, 8.0, 6.0, 4.0, 4.0, 3.0, 3.0, 1.0)))
    [[8.0, 8.0], [4.0, 4.0], [3.0, 3.0], [1.0]]
    """
    ends = (*DECAYS, 1.0)
    begins = (0.0, *DECAYS)
    levels = []
    for begin, end in zip(begins, ends, strict=True):
        middle = end - SETTLED * (end - begin)
        values = [
            value
            for step, value in zip(curve.steps, curve.values, strict=True)
            if middle < step / curve.steps[-1] <= end and value > 0
        ]
        levels.append(values)
    return levels if all(levels) else []


def average_levels(curve: Curve) -> list[float]:
    """Returns the geometric mean with each learning rate."""
    return [statistics.geometric_mean(values) for values in split_levels(curve)]


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


def judge_drops(before: Mapping[str, Curve]) -> Claim:
    """Whether the distances fall as the rate does."""
    drops = {name: find_drops(average_levels(curve)) for name, curve in before.items()}
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


def judge_warmup(sizes: Sizes) -> Claim:
    """Whether the distances grow while the rate does, which needs more images than we have."""
    images = sizes.overlap * sizes.batch
    return Claim(
        "The distance grows during the warm-up of the rate.",
        '"gradually increase ... following the learning rate warm-up"',
        f"no warm-up: a step has {images} images, and the rate rises from that of "
        f"{STEP_BATCH_SIZE} to that of a step",
        None,
    )


def judge_ratio(ratios: list[Difference], nodes: int) -> Claim:
    """Whether the distances are greater over the sparse graph."""
    random = bound_ratio(nodes, persists=False)
    bound = 1 + MIN_EXCESS * (random - 1)
    texts = [
        f"{math.exp(ratio.mean):.2f} ± {math.exp(ratio.mean) * ratio.margin:.2f}"
        for ratio in ratios
    ]
    return Claim(
        f"Before the exchange the distance with one peer is at least {bound:.2f} times that of "
        f"all to all, at each rate (random updates: {random:.2f} times).",
        '"much greater deviation ... over sparse topologies"',
        ", ".join(texts) or "-",
        is_at_least(ratios, math.log(bound)),
    )


def find_ratios(before: Mapping[str, Curve]) -> list[Difference]:
    """Returns the logarithm of the distance with one peer in those of all to all, at each rate.

    The margin is that of the spread over the steps; nothing if a run is missing.
    """
    sparse, dense = (
        [[math.log(value) for value in level] for level in split_levels(before[name])]
        for name in (SPARSE, DENSE)
    )
    if not sparse or not dense:
        return []
    return [find_difference(*pair, SPREAD) for pair in zip(sparse, dense, strict=True)]


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
    for part in DECAYS:
        axes.axvline(100 * part, color="0.7", lw=0.8)
    use_log_scale(axes)
    label_axes(axes, "", "part of the run, %", "distance from the average")
    axes.legend(fontsize=8)


def compose(claims: list[Claim], ratios: list[Difference], nodes: int) -> str:
    """The sentence of the section, with what bounds the ratio if it is too small."""
    titles = [
        "the distances fall with the rate",
        "they grow in its warm-up, which these runs do not have",
        "those with one peer are greater",
    ]
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    sentence = f"{format_verdicts(holds)}."
    if ratios:
        factors = [math.exp(ratio.mean) for ratio in ratios]
        sentence += (
            f" Before the exchange those with one peer are {min(factors):.2f} to "
            f"{max(factors):.2f} times those of all to all; after it all to all leaves nothing."
        )
    if claims[-1].holds is False:
        sentence += (
            " The mixing alone would make them "
            f"{bound_ratio(nodes, persists=False):.2f} times as large if a node's updates were "
            f"independent from step to step and {bound_ratio(nodes, persists=True):.2f} times if "
            "they stayed the same, so no large factor can be expected."
        )
    return sentence


def write_text(scale: Scale) -> str:
    """The paper's experiment, and ours."""
    return (
        "The paper shows, for SGP over 16 nodes, the Euclidean distance between a node's "
        "parameters and the average, at the end of each epoch, after the last gradient step and "
        "before the exchange: with one peer at a time (sparse) and all to all (dense). "
        f"{refer_to_task(scale, [find_sizes(scale).overlap])}, in two more runs with one seed: the "
        f"same quantity, about {DEVIATION_LINES} times in a run, and the distance after the "
        "exchange, which the paper does not show."
    )


SECTION = Section(
    name="sgp19-figure2",
    title="Distances of the nodes from their average",
    source="SGP-19, Figure 2",
    write_text=write_text,
    list_runs=list_deviation_runs,
    find=find,
)
