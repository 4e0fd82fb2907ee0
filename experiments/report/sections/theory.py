"""Theory: how fast topologies average, and how fast gradients and disagreement shrink."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.rates.fits import (
    Point,
    fit_both_slopes,
    fit_slope,
    fit_steps_needed,
    select_points,
    select_regime,
)
from experiments.rates.problem import sufficient_steps
from experiments.report.section import (
    CONFIDENCE,
    GAPS,
    Estimate,
    Findings,
    Results,
    Scale,
    Table,
    compare,
    exact,
    read_claims,
    read_section,
    read_table,
)
from experiments.results import Record
from experiments.runner import Run

# SGP-18, appendix A, and RAND-20, equations 6 and 12

AVERAGING = "theory-averaging"
ROUNDS = 60
RANDOM = "random_peer_exponential"
AVERAGING_SEEDS = 400  # fewer would leave claims open
TOPOLOGIES = (  # of SGP-18, appendix A
    *("one_peer_exponential", "complete_cycle", "random_peer_exponential", "random_peer_complete"),
)


def find_averaging(scale: Scale, results: Results) -> Findings:
    """Compares the factors, the eigenvalues and the bounds."""
    del scale
    result = results[AVERAGING]
    seeds = int(result.summary.get("options", {}).get("seeds", 0))
    factors = {record["topology"]: record for record in result.summary.get("sgp18_appendix_a", [])}
    rings = result.summary.get("rand20_rings", [])
    errors = [run["final_error"] for run in result.runs if run["topology"] == RANDOM]
    figures = {
        name: {"": estimate_mean(factors[name], seeds)} if name in factors else {}
        for name in TOPOLOGIES
    }
    figures["eigenvalues"] = {
        f"L = {ring['nodes']}: differs by": exact(
            ring["second_eigenvalue"] - ring["paper_second_eigenvalue"]
        )
        for ring in rings
    }
    figures["bounds"] = {
        f"L = {ring['nodes']}: up to": exact(
            max(np.divide(ring["means_by_round"], ring["paper_bounds_by_round"]).tolist())
        )
        for ring in rings
    }
    figures["push-sum"] = {"": exact(max(errors))} if errors else {}
    return Findings(read_claims("averaging", figures))


def estimate_mean(record: Record, seeds: int) -> Estimate:
    """Returns the mean over seeds, with the limits of Student's t."""
    deviation = record["standard_deviation"]
    if deviation is None or seeds < 2:
        return exact(record["mean"])
    margin = float(stats.t.ppf(CONFIDENCE, seeds - 1)) * deviation / math.sqrt(seeds)
    return Estimate(record["mean"], record["mean"] - margin, record["mean"] + margin)


AVERAGING_SECTION = read_section(
    name="averaging",
    list_runs=lambda _: [
        Run(AVERAGING, "averaging", ("--rounds", f"{ROUNDS}", "--seeds", f"{AVERAGING_SEEDS}"))
    ],
    find=find_averaging,
    judges_when_quick=True,
)

# SGP-19, theorems 1 and 2

RATES = "theory-rates"
RATES_SEEDS = 8
NODES = (4, 8, 16, 32)  # those of the program, without options
STEPS = (512, 2048, 8192, 32768, 131072)
QUICK_NODES = NODES[:3]
QUICK_STEPS = (256, 1024, 4096, 8192)
SGP = "sgp@one_peer_exponential"
RING = "dpsgd@ring"
ALL_REDUCE = "allreduce@complete"
TITLES = {SGP: "SGP, one-peer exponential", RING: "D-PSGD, ring", ALL_REDUCE: "AllReduce"}
MAX_EXCESS = 0.05  # over AllReduce
TARGET = 1.1  # times what the fewest nodes reach with the most steps: all are there before the end
RATIO_SPREAD = 0.05  # of a ratio, of one seed


def list_rates_runs(scale: Scale) -> list[Run]:
    """One call: three methods, four numbers of nodes (quick: three) and five of steps (four)."""
    sizes: tuple[str, ...] = ()
    if scale.is_quick:
        sizes = ("--nodes", *map(str, QUICK_NODES), "--steps", *map(str, QUICK_STEPS))
    return [Run(RATES, "rates", (*sizes, "--seeds", f"{RATES_SEEDS}"))]


def find_rates(scale: Scale, results: Results) -> Findings:
    """Fits the slopes and compares the methods."""
    runs = results[RATES].runs
    gradients = {label: select_points(runs, label, "squared_gradient") for label in TITLES}
    target = find_target(gradients[SGP])
    slopes = {label: find_slopes(points, target) for label, points in gradients.items()}
    settled = select_regime(select_points(runs, SGP, "squared_distance"))
    excess = {label: find_excess(gradients[label], gradients[ALL_REDUCE]) for label in (SGP, RING)}
    nearer = {}
    if len(excess[SGP]) > 1:
        first, *_, last = excess[SGP].values()
        nearer["falls by"] = subtract(first, last)
        nearer["ends below 5% by"] = subtract(np.full(len(last), MAX_EXCESS), last)
    names = ("slope in nK", "slope in K", "slope in n", "slope of the steps")
    figures: dict[str, Any] = dict(zip(names, slopes[SGP], strict=True))
    figures |= {
        "bound": {
            f"n = {run['nodes']}, K = {run['steps']}:": exact(
                float(np.mean(run["squared_gradient"])) / run["bound"]
            )
            for run in runs
            if run["label"] == SGP
        },
        "distances": {
            f"n = {nodes}:": Estimate(*fit_slope([x for x in settled if x.nodes == nodes]))
            for nodes in sorted({point.nodes for point in settled})
        },
        "nearer": nearer,
        "farther": {
            f"K = {k}: farther by": subtract(excess[RING][k], excess[SGP][k])
            for k in excess[SGP]
            if k in excess[RING]
        },
    }
    half, whole = (0.1, 0.2) if scale.is_quick else (0.05, 0.1)  # errors of the slopes
    claims = read_claims("rates", figures, {"half": half, "whole": whole})
    tables = [tabulate_slopes(slopes, GAPS[results[RATES].status])]
    return Findings(claims, tables)


def find_target(points: Sequence[Point]) -> float:
    """Returns slightly more than the fewest nodes reach with the most steps."""
    if not points:
        return math.nan
    fewest = min(points, key=lambda point: (point.nodes, -point.steps))
    return TARGET * float(fewest.values.mean())


def find_slopes(points: Sequence[Point], target: float) -> list[Estimate]:
    """Returns the slopes of the gradient in nK, in K and in n, and that of the steps needed."""
    regime = select_regime(points)
    found = (fit_slope(regime), *fit_both_slopes(regime), fit_steps_needed(points, target))
    return [Estimate(*slope) for slope in found]


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


def subtract(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Returns the difference of two relative excesses over the seeds."""
    return compare(first.tolist(), second.tolist(), RATIO_SPREAD)


def tabulate_slopes(slopes: Mapping[str, Sequence[Estimate]], gap: str) -> Table:
    """Returns the slopes of all methods."""
    rows: list[tuple[str, ...]] = [("theorem 1", "-1/2", "-1/2", "-1/2", "-1")]
    for label, title in TITLES.items():
        texts = [
            f"{x.value:.3f} ({x.low:.3f} to {x.high:.3f})" if x.value == x.value else gap
            for x in slopes[label]
        ]
        rows.append((title, *texts))
    return read_table("rates", rows)


def find_rates_numbers(scale: Scale) -> dict[str, object]:
    """Returns the sizes of the text."""
    nodes, steps = (QUICK_NODES, QUICK_STEPS) if scale.is_quick else (NODES, STEPS)
    return {
        "nodes": ", ".join(map(str, nodes)),
        "fewest": steps[0],
        "most": steps[-1],
        "needed": sufficient_steps(nodes[0]),
    }


RATES_SECTION = read_section(
    name="rates",
    find_numbers=find_rates_numbers,
    list_runs=list_rates_runs,
    find=find_rates,
    judges_when_quick=True,
)
