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
    GAPS,
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
    SLOPE,
    TITLES,
    find_target,
    format_estimate,
    judge_bound,
    judge_distances,
    judge_estimate,
    judge_excess,
    judge_ring,
    judge_slopes,
    judge_speedup,
)
from experiments.results import Record

RUN = "theory-rates"
SEEDS = 8
NODES = (4, 8, 16, 32)  # those of the program, without options
STEPS = (512, 2048, 8192, 32768, 131072)
QUICK_NODES = NODES[:3]
QUICK_STEPS = (256, 1024, 4096, 8192)


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
    distances = select_points(runs, SGP, "squared_distance")
    factor = QUICK_FACTOR if scale.is_quick else 1
    max_error = factor * MAX_SLOPE_ERROR
    slopes = judge_slopes(gradients[SGP], max_error)
    ring = judge_ring(gradients)
    claims = [
        judge_bound(runs),
        *slopes,
        judge_speedup(gradients[SGP], factor * MAX_INVERSE_ERROR),
        judge_distances(distances, factor * MAX_INVERSE_ERROR),
        judge_excess(gradients),
        ring,
    ]
    sentence = f"{compose(claims, gradients)}{explain(slopes, ring, gradients, max_error)}"
    tables = [make_slope_table(gradients, GAPS[results[RUN].status])]
    figures = []
    if runs:
        tables.append(make_value_table(runs, gradients))
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
    return Findings(claims, sentence, tables, figures)


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
    """How many statements hold, and the slope of SGP."""
    judged = [claim for claim in claims if claim.holds is not None]
    if not judged:
        return "Nothing can be said: the run has not finished."
    slope = fit_slope(select_regime(gradients[SGP]))
    held = sum(claim.holds is True for claim in claims)
    return (
        f"{held} of {len(judged)} statements that can be judged hold. The squared gradient of SGP "
        f"has the slope {format_estimate(slope)} in nK, where theorem 1 has -1/2."
    )


def explain(
    slopes: Sequence[Claim],
    ring: Claim,
    gradients: Mapping[str, Sequence[Point]],
    max_error: float,
) -> str:
    """What holds beside: that a ring has no linear speed-up yet, and from which K on SGP has one.

    Args:
      slopes: the claims on the slopes of SGP.
      ring: the claim that a ring is worse.
      gradients: of all methods.
      max_error: of a slope of -1/2.
    """
    text = ""
    in_nodes = fit_both_slopes(select_regime(gradients[RING]))[1]
    if ring.holds and judge_estimate(in_nodes, SLOPE, max_error) is False:
        text += (
            f" That of D-PSGD on a ring has {format_estimate(in_nodes)} in n: with these n and K "
            "it has no linear speed-up."
        )
    points = gradients[SGP]
    met = sum(point.steps >= sufficient_steps(point.nodes) for point in points)
    if all(claim.holds for claim in slopes):
        text += (
            f" The theorem's own condition on K, eq. 3, is met by {met or 'none'} of the "
            f"{len(points)} runs of SGP, even with its constants C = 1 and q = 0; here K >= n^3 "
            "was enough."
        )
    return text


def write_text(scale: Scale) -> str:
    """What the theorems say, and what is measured at a scale."""
    nodes = QUICK_NODES if scale.is_quick else NODES
    steps = QUICK_STEPS if scale.is_quick else STEPS
    sizes = f"{', '.join(map(str, nodes[:-1]))} and {nodes[-1]}"
    return (
        "Theorem 1 bounds the mean of E||grad f||^2 at the average model over K steps by a "
        "multiple of 1/sqrt(nK), with the learning rate sqrt(n/K); theorem 2 bounds the mean "
        "squared distance of the nodes' models to their average by O(1/K + 1/K^1.5). Here: both "
        "are measured on a smooth problem in 8 dimensions that is not convex, with a known optimum "
        f"and other data on each node, over {sizes} simulated nodes, {min(steps):,} to "
        f"{max(steps):,} steps, {SEEDS} seeds. A statement on a slope holds if the limits of 95 % "
        "of the bootstrap over the seeds are within the bound that it names. Slopes are fitted "
        "where K >= n^3, where the disagreement of the nodes matters little."
    )


SECTION = Section(
    name="rates",
    title="Rates: the gradient over steps and nodes",
    source="SGP-19, theorems 1 and 2; DPSGD-17, theorem 3",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
