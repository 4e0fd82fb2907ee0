"""SGP-19, theorems 1 and 2, on simulated nodes: how fast gradients and disagreement shrink."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.rates.fits import (
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
from experiments.report.estimates import GAPS, Estimate, compare, exact
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.results import Record
from experiments.runner import Run

RUN = "theory-rates"
SEEDS = 8
NODES = (4, 8, 16, 32)  # those of the program, without options
STEPS = (512, 2048, 8192, 32768, 131072)
QUICK_NODES = NODES[:3]
QUICK_STEPS = (256, 1024, 4096, 8192)
SGP = "sgp@one_peer_exponential"
RING = "dpsgd@ring"
ALL_REDUCE = "allreduce@complete"
TITLES = {SGP: "SGP, one-peer exponential", RING: "D-PSGD, ring", ALL_REDUCE: "AllReduce"}
MAX_SLOPE_ERROR = 0.05  # of a slope of -1/2
MAX_INVERSE_ERROR = 0.1  # of a slope of -1
QUICK_FACTOR = 2  # of both, with fewer steps and nodes
MAX_EXCESS = 0.05  # over AllReduce
TARGET = 1.1  # times what the fewest nodes reach with the most steps: all are there before the end
SINGLE_SPREAD = 0.05  # of a ratio, of one seed

Gradients = Mapping[str, Sequence[Point]]
"""Method -> the mean squared gradients for each number of nodes and steps."""


def list_runs(scale: Scale) -> list[Run]:
    """One call: three methods, four numbers of nodes (quick: three) and five of steps (four)."""
    sizes: tuple[str, ...] = ()
    if scale.is_quick:
        sizes = ("--nodes", *map(str, QUICK_NODES), "--steps", *map(str, QUICK_STEPS))
    return [Run(RUN, "rates", (*sizes, "--seeds", f"{SEEDS}"))]


def find(scale: Scale, results: Results) -> Findings:
    """Fits the slopes and compares the methods."""
    runs = results[RUN].runs
    gradients = {label: select_points(runs, label, "squared_gradient") for label in TITLES}
    factor = QUICK_FACTOR if scale.is_quick else 1
    max_error = factor * MAX_INVERSE_ERROR
    claims = [
        judge_bound(runs),
        *judge_slopes(gradients[SGP], factor * MAX_SLOPE_ERROR),
        Claim(
            "The steps that SGP needs for one mean squared gradient are inverse to n: a slope "
            f"within {max_error} of -1.",
            "-1 (theorem 1)",
            fit_speedup(gradients[SGP]),
            at_least=-1 - max_error,
            at_most=-1 + max_error,
            spec=".3f",
        ),
        Claim(
            "The squared distance of SGP's models to their mean falls with K with a slope within "
            f"{max_error} of -1 for each n, where K >= n^3.",
            "-1 (theorem 2)",
            fit_distances(select_points(runs, SGP, "squared_distance")),
            at_least=-1 - max_error,
            at_most=-1 + max_error,
            spec=".3f",
        ),
        judge_excess(gradients),
        judge_ring(gradients),
    ]
    tables = [tabulate_slopes(gradients, GAPS[results[RUN].status])]
    figures = []
    if runs:
        tables.append(tabulate_values(runs, gradients))
        figures = [
            Figure(
                "rates",
                "Left: the mean squared gradient over nK, with the slope -1/2 of theorem 1. Right: "
                "the squared distance to the mean over K, with the slope -1 of theorem 2. "
                "Simulated nodes.",
                partial(draw_rates, [run | {"label": TITLES[run["label"]]} for run in runs]),
            ),
            Figure(
                "speedup",
                "Steps until the mean squared gradient is as small as "
                f"{find_target(gradients[SGP]):.3g}, interpolated; simulated nodes.",
                partial(draw_speedup, gradients),
            ),
        ]
    return Findings(claims, tables, figures)


def judge_bound(runs: Sequence[Record]) -> Claim:
    """Returns the claim that all means of SGP are below the bound of theorem 1."""
    return Claim(
        "The mean squared gradient of SGP is at most 12 (f(0) - f* + L sigma^2 / 2) / sqrt(nK) for "
        "each n and K.",
        "at most 1",
        {
            f"n = {run['nodes']}, K = {run['steps']}:": exact(
                float(np.mean(run["squared_gradient"])) / run["bound"]
            )
            for run in runs
            if run["label"] == SGP
        },
        at_most=1.0,
        spec=".3f",
    )


def judge_slopes(points: Sequence[Point], bound: float) -> list[Claim]:
    """Returns the claims on the slope -1/2 of the squared gradient in nK, in K and in n."""
    regime = select_regime(points)
    titles = ("in nK", "in the steps K", "in the nodes n (linear speed-up)")
    return [
        Claim(
            f"Where K >= n^3, the mean squared gradient of SGP has a slope within {bound} of -1/2 "
            f"{title}.",
            "-1/2 (theorem 1)",
            {"": Estimate(*slope)},
            at_least=-0.5 - bound,
            at_most=-0.5 + bound,
            spec=".3f",
        )
        for title, slope in zip(titles, (fit_slope(regime), *fit_both_slopes(regime)), strict=True)
    ]


def find_target(points: Sequence[Point]) -> float:
    """Returns slightly more than the fewest nodes reach with the most steps."""
    if not points:
        return math.nan
    fewest = min(points, key=lambda point: (point.nodes, -point.steps))
    return TARGET * float(fewest.values.mean())


def fit_speedup(points: Sequence[Point]) -> dict[str, Estimate]:
    """Returns the slope in n of the steps needed; none where less than two n reach the target."""
    target = find_target(points)
    needed = find_steps_needed(points, log_means(points), target) if points else {}
    return {} if len(needed) < 2 else {"": Estimate(*fit_steps_needed(points, target))}


def fit_distances(points: Sequence[Point]) -> dict[str, Estimate]:
    """Returns the slope of the distances in K for each n; at one n it is that in nK."""
    regime = select_regime(points)
    return {
        f"n = {nodes}:": Estimate(*fit_slope([point for point in regime if point.nodes == nodes]))
        for nodes in sorted({point.nodes for point in points})
    }


def find_excess(points: Sequence[Point], others: Sequence[Point]) -> dict[int, np.ndarray]:
    """Returns how much larger values are than those of others with as many nodes and steps.

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


def subtract(first: Sequence[float] | np.ndarray, second: np.ndarray) -> Estimate:
    """Returns the difference of two relative excesses over the seeds."""
    return compare(list(map(float, first)), second.tolist(), SINGLE_SPREAD)


def judge_excess(gradients: Gradients) -> Claim:
    """Returns the claim that SGP comes near AllReduce as K grows."""
    excess = find_excess(gradients[SGP], gradients[ALL_REDUCE])
    rows = {}
    if len(excess) > 1:
        first, *_, last = excess.values()
        rows["falls by"] = subtract(first, last)
        rows[f"ends below {MAX_EXCESS:.0%} by"] = subtract([MAX_EXCESS] * len(last), last)
    return Claim(
        "Over the most nodes SGP comes near AllReduce as K grows: its squared gradient is less "
        f"above it with the most steps than with the fewest, and then at most {MAX_EXCESS:.0%}.",
        "the term 1/sqrt(nK) dominates for large K",
        rows,
        at_least=0.0,
        spec=".1%",
    )


def judge_ring(gradients: Gradients) -> Claim:
    """Returns the claim that the ring is farther from AllReduce than the exponential graph."""
    sgp = find_excess(gradients[SGP], gradients[ALL_REDUCE])
    ring = find_excess(gradients[RING], gradients[ALL_REDUCE])
    return Claim(
        "The worse a graph connects, the later the linear speed-up begins: over the most nodes "
        "D-PSGD on the ring is farther above AllReduce than SGP, for each K.",
        "K grows with (1 - q)^-4 (theorem 1); on a ring n = O(K^(1/13)) (DPSGD-17, theorem 3)",
        {f"K = {k}: farther by": subtract(ring[k], sgp[k]) for k in sgp if k in ring},
        at_least=0.0,
        spec=".1%",
    )


def tabulate_slopes(gradients: Gradients, gap: str) -> Table:
    """Returns the slopes of all methods."""
    rows: list[tuple[str, ...]] = [("theorem 1", "-1/2", "-1/2", "-1/2", "-1")]
    for label, title in TITLES.items():
        regime = select_regime(gradients[label])
        slopes = [fit_slope(regime), *fit_both_slopes(regime)]
        slopes.append(fit_steps_needed(gradients[label], find_target(gradients[SGP])))
        rows.append((title, *(gap if math.isnan(slope.value) else f"{slope}" for slope in slopes)))
    return Table(
        "Slopes in logarithms",
        (
            "method",
            "squared gradient over nK",
            "over K",
            "over n",
            "steps needed for one squared gradient, over n",
        ),
        rows,
        "Brackets: 95 % of the bootstrap over the seeds. The first three are of the runs with "
        "K >= n^3; the steps needed are interpolated between all runs.",
    )


def tabulate_values(runs: Sequence[Record], gradients: Gradients) -> Table:
    """Returns what was measured with the most nodes."""
    largest = max(run["nodes"] for run in runs)
    distances = {label: select_points(runs, label, "squared_distance") for label in (SGP, RING)}
    rows = []
    for steps in sorted({run["steps"] for run in runs}):
        row = [f"{steps}" if steps >= largest**3 else f"{steps}*"]
        for points in (*gradients.values(), *distances.values()):
            values = [p.values for p in points if (p.nodes, p.steps) == (largest, steps)]
            row.append(f"{values[0].mean():.3g}" if values else "-")
        rows.append(row)
    return Table(
        f"Means over the steps and the seeds, {largest} nodes",
        (
            "steps K",
            *(f"squared gradient: {TITLES[label]}" for label in gradients),
            *(f"squared distance: {TITLES[label]}" for label in distances),
        ),
        rows,
        "*: K < n^3, in no slope. The models of AllReduce are equal.",
    )


def draw_speedup(gradients: Gradients, figure: MatplotlibFigure) -> None:
    """Draws the steps needed over the nodes, and the line of a linear speed-up."""
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


def find_numbers(scale: Scale) -> dict[str, object]:
    """Returns the sizes of the text."""
    nodes, steps = (QUICK_NODES, QUICK_STEPS) if scale.is_quick else (NODES, STEPS)
    ends = {"fewest": min(steps), "most": max(steps)}
    needed = sufficient_steps(min(nodes))
    return {"nodes": ", ".join(map(str, nodes)), "seeds": SEEDS, "needed": needed, **ends}


SECTION = Section(
    name="rates",
    title="Rates: the gradient over steps and nodes",
    source="SGP-19, theorems 1 and 2; DPSGD-17, theorem 3",
    text="""
    Theorem 1 bounds the mean of E||grad f||^2 at the average model over K steps by a multiple of
    1/sqrt(nK), with the learning rate sqrt(n/K); theorem 2 bounds the mean squared distance of the
    nodes' models to their average by O(1/K + 1/K^1.5). Here: both are measured on a smooth problem
    in 8 dimensions that is not convex, with a known optimum and other data on each node, over
    {nodes} simulated nodes, {fewest:,} to {most:,} steps, {seeds} seeds. A statement on a slope
    holds if the limits of 95 % of the bootstrap over the seeds are within the bound that it names.
    Slopes are fitted where K >= n^3, where the disagreement of the nodes matters little; the
    theorem's own condition on K, eq. 3, needs {needed:.1e} steps over the fewest nodes, even with
    its constants C = 1 and q = 0.
    """,
    find_numbers=find_numbers,
    list_runs=list_runs,
    find=find,
)
