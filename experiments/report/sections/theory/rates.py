"""SGP-19, theorems 1 and 2, on simulated nodes: how fast gradients and disagreement shrink."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.rates.fits import (
    Estimate,
    Point,
    find_steps_needed,
    fit_both_slopes,
    fit_slope,
    fit_steps_needed,
    log_means,
    select_points,
    select_regime,
)
from experiments.rates.problem import sufficient_steps
from experiments.rates.report import draw_rates
from experiments.report.differences import find_difference
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from experiments.results import Record

RUN = "theory-rates"
SGP = "sgp@one_peer_exponential"
RING = "dpsgd@ring"
ALL_REDUCE = "allreduce@complete"
TITLES = {SGP: "SGP, one-peer exponential", RING: "D-PSGD, ring", ALL_REDUCE: "AllReduce"}
SLOPE = -0.5
MAX_SLOPE_ERROR = 0.05
MAX_INVERSE_ERROR = 0.1  # of a slope of -1
QUICK_FACTOR = 2  # of both, with fewer steps and nodes
MAX_EXCESS = 0.05  # over AllReduce
TARGET = 1.1  # times what the fewest nodes reach with the most steps: all are there before the end
SINGLE_SPREAD = 0.05  # of a ratio, of one seed


def list_runs(scale: Scale) -> list[Run]:
    """One call: three methods, four numbers of nodes (quick: three) and five of steps (four)."""
    if not scale.is_quick:
        return [Run(RUN, "rates", ("--seeds", "8"))]
    sizes = ("--nodes", "4", "8", "16", "--steps", "256", "1024", "4096", "8192")
    return [Run(RUN, "rates", (*sizes, "--seeds", "8"))]


def find(scale: Scale, results: Results) -> Findings:
    """Fits the slopes and compares the methods."""
    runs = results[RUN].runs
    gradients = {label: select_points(runs, label, "squared_gradient") for label in TITLES}
    distances = select_points(runs, SGP, "squared_distance")
    factor = QUICK_FACTOR if scale.is_quick else 1
    claims = [
        judge_bound(runs),
        *judge_slopes(gradients[SGP], factor * MAX_SLOPE_ERROR),
        judge_speedup(gradients[SGP], factor * MAX_INVERSE_ERROR),
        judge_distances(distances, factor * MAX_INVERSE_ERROR),
        judge_excess(gradients),
        judge_ring(gradients),
    ]
    gap = "-" if results[RUN].status in ("finished", "missing") else results[RUN].status
    tables = [make_slope_table(gradients, gap)]
    figures = []
    if runs:
        tables.append(make_value_table(runs, gradients))
        figures = [
            Figure(
                "rates",
                "Left: the mean squared gradient over nK, with the slope -1/2 of theorem 1. Right: "
                "the squared distance to the mean over K, with the slope -1 of theorem 2. "
                "Simulated nodes.",
                partial(draw_rates, runs),
            ),
            Figure(
                "speedup",
                "Steps until the mean squared gradient is as small as "
                f"{find_target(gradients[SGP]):.3g}, interpolated; simulated nodes.",
                partial(draw_speedup, gradients),
            ),
        ]
    return Findings(claims, compose(claims, gradients), tables, figures)


def judge_estimate(estimate: Estimate, target: float, bound: float) -> bool | None:
    """Whether the value is within `bound` of `target`; None if its limits leave that open."""
    if math.isnan(estimate.value):
        return None
    if abs(estimate.low - target) <= bound and abs(estimate.high - target) <= bound:
        return True
    if estimate.low > target + bound or estimate.high < target - bound:
        return False
    return None


def format_estimate(estimate: Estimate) -> str:
    """The estimate with its limits, or a gap."""
    return "-" if math.isnan(estimate.value) else f"{estimate}"


def judge_bound(runs: Sequence[Record]) -> Claim:
    """Whether all means of SGP are below the bound of theorem 1."""
    ratios = [
        float(np.mean(run["squared_gradient"])) / run["bound"]
        for run in runs
        if run["label"] == SGP
    ]
    return Claim(
        "The mean squared gradient of SGP is at most 12 (f(0) - f* + L sigma^2 / 2) / sqrt(nK) for "
        "each n and K.",
        "at most 1",
        f"{min(ratios):.3f} to {max(ratios):.3f} of the bound" if ratios else "-",
        max(ratios) <= 1 if ratios else None,
    )


def judge_slopes(points: Sequence[Point], bound: float) -> list[Claim]:
    """Whether the squared gradient falls with the slope -1/2 in nK, in K and in n."""
    regime = select_regime(points)
    in_steps, in_nodes = fit_both_slopes(regime)
    cases = [
        ("in nK", fit_slope(regime)),
        ("in the steps K", in_steps),
        ("in the nodes n (linear speed-up)", in_nodes),
    ]
    return [
        Claim(
            f"Where K >= n^3, the mean squared gradient of SGP has a slope within {bound} of -1/2 "
            f"{variable}.",
            "-1/2 (theorem 1)",
            format_estimate(estimate),
            judge_estimate(estimate, SLOPE, bound),
        )
        for variable, estimate in cases
    ]


def find_target(points: Sequence[Point]) -> float:
    """Slightly above what the fewest nodes reach with the most steps; not a number of no points."""
    if not points:
        return math.nan
    fewest = min(points, key=lambda point: (point.nodes, -point.steps))
    return TARGET * float(fewest.values.mean())


def judge_speedup(points: Sequence[Point], bound: float) -> Claim:
    """Whether the steps that are needed are inverse to the nodes."""
    statement = (
        "The steps that SGP needs for one mean squared gradient are inverse to n: a slope within "
        f"{bound} of -1."
    )
    needed = find_steps_needed(points, log_means(points), find_target(points)) if points else {}
    if len(needed) < 2:
        return Claim(statement, "-1 (theorem 1)", "-", None)
    estimate = fit_steps_needed(points, find_target(points))
    few = min(needed)
    many = max(needed)
    ours = (
        f"{format_estimate(estimate)}; {many / few:g} times the nodes need "
        f"{needed[few] / needed[many]:.1f} times fewer steps"
    )
    holds = judge_estimate(estimate, -1, bound)
    return Claim(statement, "-1 (theorem 1)", ours, holds)


def judge_distances(points: Sequence[Point], bound: float) -> Claim:
    """Whether the distance to the mean is inverse to the steps for each number of nodes."""
    regime = select_regime(points)
    estimates = {}
    for nodes in sorted({point.nodes for point in points}):
        # At one n, the slope in nK is that in K.
        estimates[nodes] = fit_slope([point for point in regime if point.nodes == nodes])
    verdicts = {judge_estimate(estimate, -1, bound) for estimate in estimates.values()}
    return Claim(
        "The squared distance of SGP's models to their mean falls with K with a slope within "
        f"{bound} of -1 for each n, where K >= n^3.",
        "-1 (theorem 2)",
        "; ".join(f"n = {n}: {format_estimate(one)}" for n, one in estimates.items()) or "-",
        combine(verdicts),
    )


def combine(verdicts: set[bool | None]) -> bool | None:
    """False if one is; None if one is open, or there are none; else True."""
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def find_excess(points: Sequence[Point], others: Sequence[Point]) -> dict[int, np.ndarray]:
    """How much larger the values are than those of the others with as many nodes and steps.

    Returns:
      K -> `[S]`, relative, for the largest n; both had the same data and noise.
    """
    largest = max((point.nodes for point in points), default=0)
    found = {other.steps: other.values for other in others if other.nodes == largest}
    return {
        point.steps: point.values / found[point.steps] - 1
        for point in sorted(points, key=lambda point: point.steps)
        if point.nodes == largest and point.steps in found
    }


def judge_excess(gradients: Mapping[str, Sequence[Point]]) -> Claim:
    """Whether SGP comes near AllReduce as K grows."""
    excess = find_excess(gradients[SGP], gradients[ALL_REDUCE])
    statement = (
        "Over the most nodes SGP comes near AllReduce as K grows: its squared gradient is less "
        f"above it with the most steps than with the fewest, and then at most {MAX_EXCESS:.0%}."
    )
    paper = "the term 1/sqrt(nK) dominates for large K"
    if len(excess) < 2:
        return Claim(statement, paper, "-", None)
    first, *_, last = excess.values()
    shrinks = find_difference(first.tolist(), last.tolist(), SINGLE_SPREAD).exceeds(0)
    zeros = [0.0] * len(last)
    is_large = find_difference(last.tolist(), zeros, SINGLE_SPREAD).exceeds(MAX_EXCESS)
    ours = f"{format_excess(excess)} (n = {max(point.nodes for point in gradients[SGP])})"
    return Claim(
        statement, paper, ours, combine({shrinks, None if is_large is None else not is_large})
    )


def format_excess(excess: Mapping[int, np.ndarray]) -> str:
    """The means over the seeds, from the first to the last K."""
    parts = [f"{values.mean():+.1%} with K = {steps}" for steps, values in excess.items()]
    return ", ".join([parts[0], parts[-1]]) if parts else "-"


def judge_ring(gradients: Mapping[str, Sequence[Point]]) -> Claim:
    """Whether the ring is farther from AllReduce than the exponential graph."""
    sgp = find_excess(gradients[SGP], gradients[ALL_REDUCE])
    ring = find_excess(gradients[RING], gradients[ALL_REDUCE])
    verdicts = {
        find_difference(ring[steps].tolist(), sgp[steps].tolist(), SINGLE_SPREAD).exceeds(0)
        for steps in sgp
        if steps in ring
    }
    return Claim(
        "The worse a graph connects, the later the linear speed-up begins: over the most nodes "
        "D-PSGD on the ring is farther above AllReduce than SGP, for each K.",
        "K grows with (1 - q)^-4 (theorem 1); on a ring n = O(K^(1/13)) (DPSGD-17, theorem 3)",
        f"ring {format_excess(ring)}; SGP {format_excess(sgp)}" if ring and sgp else "-",
        combine(verdicts),
    )


def make_slope_table(gradients: Mapping[str, Sequence[Point]], gap: str) -> Table:
    """The slopes of all methods."""
    rows = [("theorem 1", "-1/2", "-1/2", "-1/2", "-1")]
    for label, title in TITLES.items():
        points = gradients[label]
        regime = select_regime(points)
        slopes = [fit_slope(regime), *fit_both_slopes(regime)]
        slopes.append(fit_steps_needed(points, find_target(gradients[SGP])))
        cells = [f"{slope}" if not math.isnan(slope.value) else gap for slope in slopes]
        rows.append((title, *cells))
    return Table(
        "Slopes in logarithms",
        (
            "method",
            "squared gradient over nK",
            "over K",
            "over n",
            "steps needed for one squared gradient, over n",
        ),
        tuple(rows),
        "Brackets: 95 % of the bootstrap over the seeds. The first three are of the runs with "
        "K >= n^3; the steps needed are interpolated between all runs.",
    )


def make_value_table(runs: Sequence[Record], gradients: Mapping[str, Sequence[Point]]) -> Table:
    """What was measured with the most nodes."""
    largest = max(run["nodes"] for run in runs)
    distances = {label: select_points(runs, label, "squared_distance") for label in TITLES}
    rows = []
    for steps in sorted({run["steps"] for run in runs}):
        row = [f"{steps}" if steps >= largest**3 else f"{steps}*"]
        for quantity in (gradients, distances):
            for label, points in quantity.items():
                values = [p.values for p in points if (p.nodes, p.steps) == (largest, steps)]
                if quantity is gradients or label != ALL_REDUCE:
                    row.append(f"{values[0].mean():.3g}" if values else "-")
        rows.append(tuple(row))
    return Table(
        f"Means over the steps and the seeds, {largest} nodes",
        (
            "steps K",
            *(f"squared gradient: {title}" for title in TITLES.values()),
            *(f"squared distance: {TITLES[label]}" for label in (SGP, RING)),
        ),
        tuple(rows),
        "*: K < n^3, in no slope. The models of AllReduce are equal.",
    )


def draw_speedup(gradients: Mapping[str, Sequence[Point]], figure: MatplotlibFigure) -> None:
    """The steps needed over the nodes, and the line of a linear speed-up."""
    axes = figure.subplots()
    target = find_target(gradients[SGP])
    first: tuple[int, float] | None = None
    sizes = sorted({point.nodes for points in gradients.values() for point in points})
    for (label, points), marker in zip(gradients.items(), "os^", strict=True):
        if points:
            needed = find_steps_needed(points, log_means(points), target)
            axes.plot(list(needed), list(needed.values()), marker=marker, label=TITLES[label])
            first = first or next(iter(needed.items()), None)
    if first is not None:
        line = [first[1] * first[0] / nodes for nodes in sizes]
        axes.plot(sizes, line, "k--", linewidth=1, label="linear speed-up")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{nodes}" for nodes in sizes])
    axes.set(xlabel="nodes n", ylabel="steps needed", title=f"Steps to {target:.3g}, simulated")
    axes.grid(alpha=0.3)
    axes.legend()


def compose(claims: Sequence[Claim], gradients: Mapping[str, Sequence[Point]]) -> str:
    """The sentence of the section."""
    judged = [claim for claim in claims if claim.holds is not None]
    if not judged:
        return "Nothing can be said: the run has not finished."
    slope = fit_slope(select_regime(gradients[SGP]))
    ring = fit_both_slopes(select_regime(gradients[RING]))[1]
    held = sum(claim.holds is True for claim in claims)
    sentence = (
        f"{held} of {len(judged)} statements that can be judged hold: the squared gradient of SGP "
        f"has the slope {format_estimate(slope)} in nK, where theorem 1 has -1/2"
    )
    if not math.isnan(ring.value):
        sentence += (
            f", while that of D-PSGD on a ring has {format_estimate(ring)} in n: its linear "
            "speed-up begins much later"
        )
    points = gradients[SGP]
    met = sum(point.steps >= sufficient_steps(point.nodes) for point in points)
    return (
        f"{sentence}. The theorem's own condition on K, eq. 3, is met by {met or 'none'} of the "
        f"{len(points)} runs of SGP, even with its constants C = 1 and q = 0; here K >= n^3 was "
        "enough."
    )


SECTION = Section(
    name="rates",
    title="Rates: the gradient over steps and nodes",
    source="SGP-19, theorems 1 and 2; DPSGD-17, theorem 3",
    text=(
        "Theorem 1 bounds the mean of E||grad f||^2 at the average model over K steps by a "
        "multiple of 1/sqrt(nK), with the learning rate sqrt(n/K); theorem 2 bounds the mean "
        "squared distance of the nodes' models to their average by O(1/K + 1/K^1.5). Here: both are "
        "measured on a smooth problem in 8 dimensions that is not convex, with a known optimum and "
        "other data on each node, over simulated nodes; 4, 8, 16 and 32 nodes, 512 to 131,072 "
        "steps, 8 seeds (quick: up to 16 nodes and 8,192 steps). A statement on a slope holds if "
        "the limits of 95 % of the bootstrap over the seeds are within the bound that it names. "
        "Slopes are fitted where K >= n^3, where the disagreement of the nodes matters little."
    ),
    list_runs=list_runs,
    find=find,
)
