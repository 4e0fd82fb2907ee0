"""SGP-18, appendix A, and RAND-20, equations 6 and 12: how fast topologies average."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure
from scipy import stats

from experiments.report.drawing import read_lines
from experiments.report.estimates import CONFIDENCE, GAPS, Estimate, exact
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.results import Record
from experiments.runner import Run

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
    del scale
    return [Run(RUN, "averaging", ("--rounds", f"{ROUNDS}", "--seeds", f"{SEEDS}"))]


def find(scale: Scale, results: Results) -> Findings:
    """Compares the factors, the eigenvalues and the bounds."""
    del scale
    result = results[RUN]
    seeds = int(result.summary.get("options", {}).get("seeds", 0))
    factors = {record["topology"]: record for record in result.summary.get("sgp18_appendix_a", [])}
    rings = result.summary.get("rand20_rings", [])
    claims = [
        *(judge_factor(topology, factors.get(topology), seeds) for topology in PUBLISHED),
        Claim(
            "The second eigenvalue of the ring of L nodes is 1/3 + 2/3 cos(2 pi / L), up to "
            f"{ROUNDING}.",
            "RAND-20, equation 6",
            {
                f"L = {ring['nodes']}: differs by": exact(
                    ring["second_eigenvalue"] - ring["paper_second_eigenvalue"]
                )
                for ring in rings
            },
            at_least=-ROUNDING,
            at_most=ROUNDING,
            spec="+.0e",
        ),
        Claim(
            "The expected distance of k rounds of randomized rings of L nodes to the exact average "
            "is at most sqrt(L - 1) / sqrt(3)^k, for each L and each k.",
            "at most 1",
            {f"L = {ring['nodes']}: up to": exact(find_largest_part(ring)) for ring in rings},
            at_most=1.0,
            spec=".2f",
        ),
    ]
    gap = GAPS[result.status]
    tables = [tabulate_factors(factors, gap), tabulate_rings(rings, gap)]
    lines = read_lines(result.folder) if result.status == "finished" else []
    figure = Figure(
        "averaging",
        "Averaging error over 32 nodes, relative to the start: median over the seeds. A curve that "
        "leaves at the bottom is exact.",
        partial(draw_errors, lines),
    )
    return Findings(claims, tables, [figure] if lines else [])


def judge_factor(topology: str, record: Record | None, seeds: int) -> Claim:
    """Returns the claim that the mean of sigma_2 squared rounds to the paper's figure, or is 0."""
    title, paper = PUBLISHED[topology]
    statement = f"With {title}, sigma_2^2 of 5 rounds over 32 nodes is within {DIGIT} of {paper}."
    if paper == 0:
        statement = f"With {title}, 5 rounds over 32 nodes average exactly."
    rows = {} if record is None else {"": estimate_mean(record, seeds)}
    bound = DIGIT if paper else ROUNDING
    published = f"about {paper:g}" if paper else "0"
    return Claim(statement, published, rows, paper - bound, paper + bound, spec=".3f")


def estimate_mean(record: Record, seeds: int) -> Estimate:
    """Returns the mean over seeds, with the limits of Student's t."""
    deviation = record["standard_deviation"]
    if deviation is None or seeds < 2:
        return exact(record["mean"])
    margin = float(stats.t.ppf(CONFIDENCE, seeds - 1)) * deviation / math.sqrt(seeds)
    return Estimate(record["mean"], record["mean"] - margin, record["mean"] + margin)


def find_largest_part(ring: Record) -> float:
    """Returns the largest part of the bound of equation 12 that is reached in any round."""
    pairs = zip(ring["means_by_round"], ring["paper_bounds_by_round"], strict=True)
    return max(mean / bound for mean, bound in pairs)


def tabulate_factors(factors: dict[str, Record], gap: str) -> Table:
    """Returns the figures of SGP-18."""
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
        rows,
        "Bounds the factor on the squared averaging error. Standard deviation over the seeds. What "
        "SGP-18 calls lambda_2 is the square of a singular value.",
    )


def tabulate_rings(rings: Sequence[Record], gap: str) -> Table:
    """Returns the figures of RAND-20; a row of gaps without rings."""
    columns = {  # of the table -> field, format
        "nodes L": ("nodes", ""),
        "ring: second eigenvalue": ("second_eigenvalue", ".6f"),
        "RAND-20, eq. 6": ("paper_second_eigenvalue", ".6f"),
        "ring: distance": ("ring_distance", ".4f"),
        "randomized ring: distance, mean": ("mean", ".4f"),
        "RAND-20, eq. 12: at most": ("paper_bound", ".4f"),
    }
    rows = [[format(ring[field], spec) for field, spec in columns.values()] for ring in rings]
    return Table(
        f"Rings, and their distance to the exact average after {rings[0]['rounds']} rounds"
        if rings
        else "Rings, and their distance to the exact average",
        tuple(columns),
        rows or [[gap] * len(columns)],
        "Distances are spectral norms of the difference to the exact average.",
    )


def draw_errors(lines: Sequence[Record], figure: MatplotlibFigure) -> None:
    """Draws a curve for each topology."""
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


SECTION = Section(
    name="averaging",
    title="How fast topologies average",
    source="SGP-18, appendix A; RAND-20, equations 6 and 12",
    text="""
    SGP-18 compares four ways to choose one peer in each round, by the factor that bounds the
    squared averaging error of 5 rounds over 32 nodes; RAND-20 gives the second eigenvalue of a ring
    and a bound for rings in random order. Here: the same from the schedules of the library, as
    dense matrices in float64 without any exchange, over 32 nodes and rings of 8 to 64; random
    schedules over {seeds} seeds. This is mathematics, so that agreement means that the schedules
    are those of the papers. The paper's figures are rounded to one digit, so that a figure within
    0.05 of it, with a one-sided 90 % bound, agrees.
    """,
    find_numbers=lambda _: {"seeds": SEEDS},
    list_runs=list_runs,
    find=find,
)
