"""SGP-18, appendix A, and RAND-20, equations 6 and 12: how fast topologies average."""

import contextlib
import json
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure
from scipy import stats

from experiments.report.differences import CONFIDENCE, Difference
from experiments.report.section import (
    GAPS,
    Claim,
    Figure,
    Findings,
    Result,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from experiments.results import Record

RUN = "theory-averaging"
ROUNDS = 15
SEEDS = 400
PUBLISHED = {  # SGP-18, appendix A: topology -> what it is, "about" its sigma_2 squared
    "one_peer_exponential": ("one peer of the exponential graph, hops in turn", 0.0),
    "complete_cycle": ("one peer of the complete graph, hops in turn", 0.6),
    "random_peer_exponential": ("a random neighbor in the exponential graph", 0.4),
    "random_peer_complete": ("a random neighbor in the complete graph", 0.2),
}
DIGIT = 0.05  # to which the paper's figures are rounded
ROUNDING = 1e-9  # of float64
MIN_ERROR = 1e-5  # below it nothing is drawn but what is exact
MARKERS = "os^xvD*P<"
MARKER_INTERVAL = 3  # rounds; curves that coincide show their markers in turn


def list_runs(scale: Scale) -> list[Run]:
    """One call, of half a minute, the same at both scales: fewer seeds would leave claims open."""
    return [Run(RUN, "averaging", ("--rounds", f"{ROUNDS}", "--seeds", f"{SEEDS}"))]


def find(scale: Scale, results: Results) -> Findings:
    """Compares the factors, the eigenvalues and the bounds."""
    result = results[RUN]
    seeds = int(result.summary.get("options", {}).get("seeds", 0))
    factors = {record["topology"]: record for record in result.summary.get("sgp18_appendix_a", [])}
    rings = result.summary.get("rand20_rings", [])
    claims = [
        *(judge_factor(topology, factors.get(topology), seeds) for topology in PUBLISHED),
        judge_eigenvalues(rings),
        judge_bound(rings),
    ]
    gap = GAPS[result.status]
    tables = [make_factor_table(factors, gap), make_ring_table(rings, gap)]
    lines = read_lines(result)
    figures = []
    if lines:
        figures.append(
            Figure(
                "averaging",
                "Averaging error over 32 nodes, relative to the start: median over the seeds. "
                "A curve that leaves at the bottom is exact.",
                partial(draw_errors, lines),
            )
        )
    return Findings(claims, compose(claims), tables, figures)


def judge_factor(topology: str, record: Record | None, seeds: int) -> Claim:
    """Whether the mean of sigma_2 squared rounds to the paper's figure, or is 0."""
    title, paper = PUBLISHED[topology]
    if paper == 0:
        statement = f"With {title}, 5 rounds over 32 nodes average exactly."
    else:
        statement = (
            f"With {title}, sigma_2^2 of 5 rounds over 32 nodes is within {DIGIT} of {paper}."
        )
    published = f"{paper:g}" if paper == 0 else f"about {paper:g}"
    if record is None:
        return Claim(statement, published, "-", None)
    distance = Difference(abs(record["mean"] - paper), find_margin(record, seeds))
    holds = distance.is_at_most(DIGIT if paper else ROUNDING)
    return Claim(statement, published, format_factor(record, seeds), holds)


def find_margin(record: Record, seeds: int) -> float:
    """How far the mean over all seeds may be from that of these, to one side, by Student's t."""
    deviation = record["standard_deviation"]
    if deviation is None or seeds < 2:
        return 0.0
    return float(stats.t.ppf(CONFIDENCE, seeds - 1)) * deviation / math.sqrt(seeds)


def format_factor(record: Record, seeds: int) -> str:
    """The mean, with its margin if it is one over seeds."""
    if record["mean"] < ROUNDING:
        return "0"
    margin = find_margin(record, seeds)
    return f"{record['mean']:.3f}" + (f" ± {margin:.3f}" if margin else "")


def judge_eigenvalues(rings: Sequence[Record]) -> Claim:
    """Whether the ring's second eigenvalue is that of equation 6."""
    formula = "1/3 + 2/3 cos(2 pi / L)"
    statement = f"The second eigenvalue of the ring of L nodes is {formula}, up to {ROUNDING}."
    pairs = [(ring["second_eigenvalue"], ring["paper_second_eigenvalue"]) for ring in rings]
    holds = all(abs(ours - paper) <= ROUNDING for ours, paper in pairs) if pairs else None
    return Claim(
        statement,
        ", ".join(f"{paper:.4f}" for _, paper in pairs) or "RAND-20, equation 6",
        ", ".join(f"{ours:.4f}" for ours, _ in pairs) or "-",
        holds,
    )


def judge_bound(rings: Sequence[Record]) -> Claim:
    """Whether the randomized ring keeps equation 12 after every number of rounds."""
    rounds = min((len(ring["means_by_round"]) for ring in rings), default=0)
    statement = (
        "The expected distance of k rounds of randomized rings of L nodes to the exact average is "
        "at most sqrt(L - 1) / sqrt(3)^k, for each L and each k."
    )
    ratios = [
        mean / bound
        for ring in rings
        for mean, bound in zip(ring["means_by_round"], ring["paper_bounds_by_round"], strict=True)
    ]
    ours = "-"
    if ratios:
        sizes = ", ".join(f"{ring['nodes']}" for ring in rings)
        ours = (
            f"{min(ratios):.2f} to {max(ratios):.2f} of the bound (L = {sizes}; k = 1 to {rounds})"
        )
    return Claim(statement, "at most 1", ours, max(ratios) <= 1 if ratios else None)


def make_factor_table(factors: dict[str, Record], gap: str) -> Table:
    """The figures of SGP-18."""
    rows = []
    for topology, (title, paper) in PUBLISHED.items():
        record = factors.get(topology)
        cells = (gap, gap)
        if record is not None:
            deviation = record["standard_deviation"]
            ours = "0" if record["mean"] < ROUNDING else f"{record['mean']:.3f}"
            cells = (ours, "-" if deviation is None else f"{deviation:.3f}")
        rows.append((title, *cells, f"about {paper:g}" if paper else "0"))
    return Table(
        "sigma_2^2 of 5 rounds over 32 nodes",
        ("peer", "here, mean", "here, standard deviation", "SGP-18, appendix A"),
        tuple(rows),
        "Bounds the factor on the squared averaging error. Standard deviation over the seeds.",
    )


def make_ring_table(rings: Sequence[Record], gap: str) -> Table:
    """The figures of RAND-20; a row of gaps without rings."""
    rows = [
        (
            f"{ring['nodes']}",
            f"{ring['second_eigenvalue']:.6f}",
            f"{ring['paper_second_eigenvalue']:.6f}",
            f"{ring['ring_distance']:.4f}",
            f"{ring['mean']:.4f}",
            f"{ring['paper_bound']:.4f}",
        )
        for ring in rings
    ]
    rounds = rings[0]["rounds"] if rings else 10
    return Table(
        f"Rings, and their distance to the exact average after {rounds} rounds",
        (
            "nodes L",
            "ring: second eigenvalue",
            "RAND-20, eq. 6",
            "ring: distance",
            "randomized ring: distance, mean",
            "RAND-20, eq. 12: at most",
        ),
        tuple(rows) or ((gap,) * 6,),
        "Distances are spectral norms of the difference to the exact average.",
    )


def read_lines(result: Result) -> list[Record]:
    """The lines of `metrics.jsonl`; none if the run has not finished."""
    if result.folder is None or result.status != "finished":
        return []
    path = result.folder / "metrics.jsonl"
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be cut short
            lines.append(json.loads(text))
    return lines


def draw_errors(lines: Sequence[Record], figure: MatplotlibFigure) -> None:
    """A curve for each topology."""
    axes = figure.subplots()
    for index, topology in enumerate(dict.fromkeys(line["topology"] for line in lines)):
        shown = [line for line in lines if line["topology"] == topology]
        errors = np.maximum(MIN_ERROR / 100, [line["error_median"] for line in shown])
        axes.plot(
            [line["round"] for line in shown],
            errors,
            marker=MARKERS[index % len(MARKERS)],
            markevery=(index % MARKER_INTERVAL, MARKER_INTERVAL),
            markersize=4,
            linewidth=1.2,
            label=topology,
        )
    axes.set(yscale="log", ylim=(MIN_ERROR, 2), xlabel="rounds of averaging")
    axes.set(ylabel="error relative to the start", title="Averaging error over rounds, 32 nodes")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")


def compose(claims: Sequence[Claim]) -> str:
    """The sentence of the section."""
    judged = [claim for claim in claims if claim.holds is not None]
    if not judged:
        return "Nothing can be said: the run has not finished."
    failed = [claim for claim in judged if not claim.holds]
    ours = [claim.ours for claim in claims[: len(PUBLISHED)]]
    sentence = (
        f"The four factors of SGP-18 are {', '.join(ours[:-1])} and {ours[-1]} here, and the "
        "formulas of RAND-20 are compared on four sizes: "
    )
    if failed:
        return sentence + f"{len(failed)} of {len(judged)} statements do not hold."
    return sentence + (
        f"all {len(judged)} statements that can be judged hold. This is mathematics, so that "
        "agreement means that the schedules are those of the papers; what SGP-18 calls lambda_2 "
        "is the square of a singular value."
    )


SECTION = Section(
    name="averaging",
    title="How fast topologies average",
    source="SGP-18, appendix A; RAND-20, equations 6 and 12",
    write_text=lambda _: (
        "SGP-18 compares four ways to choose one peer in each round, by the factor that bounds the "
        "squared averaging error of 5 rounds over 32 nodes; RAND-20 gives the second eigenvalue of "
        "a ring and a bound for rings in random order. Here: the same from the schedules of the "
        "library, as dense matrices in float64 without any exchange, over 32 nodes and rings of 8 "
        f"to 64; random schedules over {SEEDS} seeds. The paper's figures are rounded "
        "to one digit, so that a figure within 0.05 of it, with a one-sided 90 % bound, agrees."
    ),
    list_runs=list_runs,
    find=find,
)
