"""SGP-19, Table 3: two peers, and hybrids that begin with more communication."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import TABLE_3
from experiments.report.section import Claim, Figure, Findings, Results, Run, Scale, Section, Table
from experiments.report.sections.curves import draw_bars
from experiments.report.sections.samples import Sample, format_verdicts
from experiments.report.sections.sgp19 import grid
from experiments.report.sections.sgp19.grid import Cell
from experiments.report.sections.sgp19.readings import (
    NAMES,
    compare,
    describe,
    find_bounds,
    is_at_least,
    is_at_most,
    join_nodes,
    make_panels,
    read_accuracies,
    title_cell,
)
from experiments.report.sections.sgp19.task import count_seeds, refer_to_task

PUBLISHED = {{"1p": "sgp"}.get(row, row): columns for row, columns in TABLE_3.items()}
ABOVE_ONE = ("2p", "ar-1p", "2p-1p")
"""Rows that are above one peer in the paper."""
TITLES = NAMES | {"sgp": "1P-SGP"}


def list_runs(scale: Scale) -> list[Run]:
    """The calls of Table 1, which have these rows too."""
    return grid.list_runs(scale, "table3")


def find(scale: Scale, results: Results) -> Findings:
    """Compares two peers and the hybrids with one peer."""
    cells = grid.list_cells(scale)["table3"]
    nodes = grid.find_sizes(scale).hybrid
    accuracies = read_accuracies(scale, results, cells)
    claims = [
        *(judge_above(row, scale, accuracies, nodes) for row in ABOVE_ONE),
        judge_against_allreduce(scale, accuracies, nodes),
    ]
    rows = []
    for row, columns in PUBLISHED.items():
        rows.append((TITLES[row], "here", *(f"{accuracies[Cell(row, n)]:.2f}" for n in nodes)))
        figures = [f"{columns[n][0]} ({columns[n][1]} h)" if n in columns else "-" for n in nodes]
        rows.append((TITLES[row], "paper", *figures))
    table = Table(
        "Accuracy on the test set, %",
        ("method", "", *(f"{n} nodes" for n in nodes)),
        tuple(rows),
        "Here ± standard deviation over the seeds.",
    )
    panels = []
    for n in nodes:
        samples = {TITLES[row]: accuracies[Cell(row, n)] for row in PUBLISHED}
        paper = {TITLES[row]: PUBLISHED[row][find_paper_nodes(n)][0] for row in PUBLISHED}
        panels += make_panels(samples, paper, n, find_paper_nodes(n))
    figure = Figure(
        "hybrids",
        "Accuracy with more peers and of the hybrids: here, mean and standard deviation over the "
        "seeds, and in the paper (ImageNet).",
        partial(draw_bars, panels, columns=2),
    )
    return Findings(claims, compose(claims, scale), [table], [figure])


def judge_above(
    row: str, scale: Scale, accuracies: Mapping[Cell, Sample], nodes: tuple[int, ...]
) -> Claim:
    """Whether a method is above one peer over all numbers of nodes."""
    bounds = find_bounds(scale)
    statement = f"{TITLES[row]} is more accurate than 1P-SGP"
    bound = 0.0
    if scale.is_quick:  # a thousand images cannot show tenths of a point
        bound = -bounds.equal
        statement = f"{TITLES[row]} is at most {bounds.equal} points below 1P-SGP"
    gaps = {
        f"{n} nodes": compare(accuracies, Cell(row, n), Cell("sgp", n), bounds.spread)
        for n in nodes
    }
    return Claim(
        f"{statement} over {join_nodes(nodes)} nodes.",
        "; ".join(
            f"{n} nodes {find_paper(row, n) - find_paper('sgp', n):+.1f}"
            for n in nodes
            if n in PUBLISHED[row]
        )
        or "-",
        f"{TITLES[row]} less 1P-SGP: {describe(gaps)}",
        is_at_least(gaps.values(), bound),
    )


def judge_against_allreduce(
    scale: Scale, accuracies: Mapping[Cell, Sample], nodes: tuple[int, ...]
) -> Claim:
    """Whether two peers keep what AllReduce has."""
    bounds = find_bounds(scale)
    cells = [Cell("2p", n) for n in nodes]
    gaps = {
        title_cell(cell): compare(accuracies, Cell("ar", cell.nodes), cell, bounds.spread)
        for cell in cells
    }
    return Claim(
        f"With two peers SGP is at most {bounds.equal} points below AllReduce over "
        f"{join_nodes(nodes)} nodes.",
        "; ".join(
            f"{n} nodes {find_paper('ar', n) - find_paper('2p', n):+.1f}"
            for n in nodes
            if n in PUBLISHED["2p"]
        )
        or "-",
        f"AllReduce less: {describe(gaps)}",
        is_at_most(gaps.values(), bounds.equal),
    )


def find_paper(row: str, nodes: int) -> float:
    """Returns the paper's accuracy.

    >>> find_paper("2p", 32)
    75.7
    """
    return float(PUBLISHED[row][nodes][0])


def find_paper_nodes(nodes: int) -> int:
    """Returns the paper's number of nodes that is nearest to ours.

    >>> find_paper_nodes(32), find_paper_nodes(8)
    (32, 16)
    """
    return min(PUBLISHED["sgp"], key=lambda n: abs(n - nodes))


def compose(claims: list[Claim], scale: Scale) -> str:
    """The sentence of the section."""
    word = "not far below" if scale.is_quick else "above"
    titles = [f"{TITLES[row]} {word} 1P-SGP" for row in ABOVE_ONE]
    titles.append("2P-SGP near AllReduce")
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    sentence = f"{format_verdicts(holds)}."
    if claims[-1].holds is False:
        sentence += (
            " 2P-SGP loses more against AllReduce here than in the paper; the runs do not show why."
        )
    return sentence


def write_text(scale: Scale) -> str:
    """The paper's experiment, and ours."""
    sizes = grid.find_sizes(scale)
    return (
        "The paper compares SGP with one peer (1P) and two (2P), and hybrids: AllReduce (AR/1P) or "
        "two peers (2P/1P) for the first 30 of 90 epochs, one peer for the rest. "
        f"{refer_to_task(scale, sizes.hybrid)}, {count_seeds(sizes.seeds)}. The hybrids change "
        "after a third of the run as well."
    )


SECTION = Section(
    name="sgp19-table3",
    title="Two peers, and hybrids that begin with more communication",
    source="SGP-19, Table 3",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
