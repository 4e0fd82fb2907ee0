"""Whether the statements of SGP-19's theorems hold for rates that were measured."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.rates.fits import (
    Estimate,
    Point,
    find_steps_needed,
    fit_both_slopes,
    fit_slope,
    fit_steps_needed,
    log_means,
    select_regime,
)
from experiments.report.differences import find_difference
from experiments.report.section import Claim
from experiments.report.sections.samples import join_all
from experiments.results import Record

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
    verdicts = [judge_estimate(estimate, -1, bound) for estimate in estimates.values()]
    return Claim(
        "The squared distance of SGP's models to their mean falls with K with a slope within "
        f"{bound} of -1 for each n, where K >= n^3.",
        "-1 (theorem 2)",
        "; ".join(f"n = {n}: {format_estimate(one)}" for n, one in estimates.items()) or "-",
        join_all(verdicts),
    )


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
    is_small = find_difference(last.tolist(), zeros, SINGLE_SPREAD).is_at_most(MAX_EXCESS)
    ours = f"{format_excess(excess)} (n = {max(point.nodes for point in gradients[SGP])})"
    return Claim(statement, paper, ours, join_all([shrinks, is_small]))


def format_excess(excess: Mapping[int, np.ndarray]) -> str:
    """The means over the seeds, from the first to the last K."""
    parts = [f"{values.mean():+.1%} with K = {steps}" for steps, values in excess.items()]
    return ", ".join([parts[0], parts[-1]]) if parts else "-"


def judge_ring(gradients: Mapping[str, Sequence[Point]]) -> Claim:
    """Whether the ring is farther from AllReduce than the exponential graph."""
    sgp = find_excess(gradients[SGP], gradients[ALL_REDUCE])
    ring = find_excess(gradients[RING], gradients[ALL_REDUCE])
    verdicts = [
        find_difference(ring[steps].tolist(), sgp[steps].tolist(), SINGLE_SPREAD).exceeds(0)
        for steps in sgp
        if steps in ring
    ]
    return Claim(
        "The worse a graph connects, the later the linear speed-up begins: over the most nodes "
        "D-PSGD on the ring is farther above AllReduce than SGP, for each K.",
        "K grows with (1 - q)^-4 (theorem 1); on a ring n = O(K^(1/13)) (DPSGD-17, theorem 3)",
        f"ring {format_excess(ring)}; SGP {format_excess(sgp)}" if ring and sgp else "-",
        join_all(verdicts),
    )
