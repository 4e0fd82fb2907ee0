"""SGP-19, Table 3: two peers, and hybrids that begin with more communication."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import TABLE_3
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
from experiments.report.sections.curves import Panel, draw_panels, make_point
from experiments.report.sections.samples import Sample, format_verdicts
from experiments.report.sections.sgp19 import grid
from experiments.report.sections.sgp19.grid import Cell
from experiments.report.sections.sgp19.readings import (
    NAMES,
    TASK,
    compare,
    describe,
    find_bounds,
    is_at_least,
    is_at_most,
    read_accuracies,
    title_cell,
)

PUBLISHED = {{"1p": "sgp"}.get(row, row): columns for row, columns in TABLE_3.items()}
HYBRIDS = {"ar-1p": "AR/1P-SGP is not below 1P-SGP", "2p-1p": "2P/1P-SGP is not below 1P-SGP"}
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
        judge_two_peers(scale, accuracies, nodes),
        *(judge_hybrid(row, scale, accuracies, nodes) for row in HYBRIDS),
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
    panels = [make_panel(f"here, {n} nodes", accuracies, n) for n in nodes]
    figure = Figure("hybrids", "Accuracy of the hybrids, here.", partial(draw_panels, panels))
    return Findings(claims, compose(claims), [table], [figure])


def judge_two_peers(
    scale: Scale, accuracies: Mapping[Cell, Sample], nodes: tuple[int, ...]
) -> Claim:
    """Whether a second peer helps."""
    return judge_above("Two peers are more accurate than one", "2p", 0.0, scale, accuracies, nodes)


def judge_hybrid(
    row: str, scale: Scale, accuracies: Mapping[Cell, Sample], nodes: tuple[int, ...]
) -> Claim:
    """Whether more communication at the beginning is not worse than one peer all the time."""
    return judge_above(f"{HYBRIDS[row]}", row, 0.0, scale, accuracies, nodes)


def judge_above(
    statement: str,
    row: str,
    bound: float,
    scale: Scale,
    accuracies: Mapping[Cell, Sample],
    nodes: tuple[int, ...],
) -> Claim:
    """Whether a method is above one peer over all numbers of nodes."""
    bounds = find_bounds(scale)
    if scale.is_quick:  # a thousand images cannot show tenths of a point
        bound = -bounds.equal
        statement = f"{statement}, or at most {bounds.equal} points below"
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


def join_nodes(nodes: tuple[int, ...]) -> str:
    """Returns numbers of nodes as words.

    >>> join_nodes((16, 32))
    '16 and 32'
    """
    return " and ".join(map(str, nodes))


def make_panel(title: str, accuracies: Mapping[Cell, Sample], nodes: int) -> Panel:
    """The accuracies over some nodes."""
    ticks = [TITLES[row].replace("/", "/\n") for row in PUBLISHED]
    points = [make_point(accuracies[Cell(row, nodes)]) for row in PUBLISHED]
    return Panel(title, "method", "test accuracy, %", ticks, {"here": points})


def compose(claims: list[Claim]) -> str:
    """The sentence of the section."""
    titles = ["two peers above one", *HYBRIDS.values(), "two peers near AllReduce"]
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    sentence = f"More communication against SGP's loss: {format_verdicts(holds)}."
    if claims[-1].holds is False:
        sentence += (
            " Two peers lose more against AllReduce here than in the paper; the runs do not show "
            "why."
        )
    return sentence


SECTION = Section(
    name="sgp19-table3",
    title="Two peers, and hybrids that begin with more communication",
    source="SGP-19, Table 3",
    write_text=lambda _: (
        "The paper compares SGP with one and two peers, and hybrids: AllReduce or two peers for "
        "the first 30 of 90 epochs, one peer for the rest. Here the hybrids change after a third "
        f"of the run as well. {TASK}"
    ),
    list_runs=list_runs,
    find=find,
)
