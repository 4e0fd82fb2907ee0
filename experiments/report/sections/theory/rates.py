"""SGP-19, theorems 1 and 2, on simulated nodes: how fast gradients and disagreement shrink."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

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
from experiments.report.sections.theory.rate_claims import (
    ALL_REDUCE,
    MAX_INVERSE_ERROR,
    MAX_SLOPE_ERROR,
    QUICK_FACTOR,
    RING,
    SGP,
    TITLES,
    find_target,
    format_estimate,
    judge_bound,
    judge_distances,
    judge_excess,
    judge_ring,
    judge_slopes,
    judge_speedup,
)
from experiments.results import Record

RUN = "theory-rates"


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


def make_slope_table(gradients: Mapping[str, Sequence[Point]], gap: str) -> Table:
    """The slopes of all methods."""
    rows: list[tuple[str, ...]] = [("theorem 1", "-1/2", "-1/2", "-1/2", "-1")]
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
    write_text=lambda _: (
        "Theorem 1 bounds the mean of E||grad f||^2 at the average model over K steps by a "
        "multiple of 1/sqrt(nK), with the learning rate sqrt(n/K); theorem 2 bounds the mean "
        "squared distance of the nodes' models to their average by O(1/K + 1/K^1.5). Here: both "
        "are measured on a smooth problem in 8 dimensions that is not convex, with a known optimum "
        "and other data on each node, over simulated nodes; 4, 8, 16 and 32 nodes, 512 to 131,072 "
        "steps, 8 seeds (quick: up to 16 nodes and 8,192 steps). A statement on a slope holds if "
        "the limits of 95 % of the bootstrap over the seeds are within the bound that it names. "
        "Slopes are fitted where K >= n^3, where the disagreement of the nodes matters little."
    ),
    list_runs=list_runs,
    find=find,
)
