"""SGP-19, Table 4: messages that are a step late, with the push-sum weight and without it."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import TABLE_4
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
from experiments.report.sections.curves import Panel, draw_bars, make_point
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
    read_training_losses,
    title_method,
)


def list_runs(scale: Scale) -> list[Run]:
    """Calls of Table 1, and those of overlap SGP."""
    return grid.list_runs(scale, "table4")


def find(scale: Scale, results: Results) -> Findings:
    """Compares overlap SGP with the other methods."""
    cells = grid.list_cells(scale)["table4"]
    nodes = grid.find_sizes(scale).overlap
    accuracies = read_accuracies(scale, results, cells)
    losses = read_training_losses(scale, results, cells)
    claims = judge(scale, accuracies, nodes)
    rows = []
    for cell in cells:
        train, validation, hours = TABLE_4[cell.row]
        rows.append(
            (
                title_method(cell.row, cells, scale),
                f"{losses[cell]:.3f}",
                f"{accuracies[cell]:.2f}",
                train,
                validation,
                hours,
            )
        )
    table = Table(
        f"{nodes} nodes (paper: 16)",
        (
            "method",
            "training loss, nats, here",
            "test accuracy, %, here",
            "paper: train, %",
            "validation, %",
            "hours",
        ),
        tuple(rows),
        "Here ± standard deviation over the seeds; the training loss is that of the last tenth of "
        "the steps, at the nodes' own models.",
    )
    points = {NAMES[cell.row]: [make_point(accuracies[cell])] for cell in cells}
    panel = Panel(f"here, {nodes} nodes", "test accuracy, %", "", (), points)
    figure = Figure(
        "overlap",
        "Accuracy with and without overlap, here: mean and standard deviation over the seeds.",
        partial(draw_bars, [panel]),
    )
    return Findings(claims, compose(claims, accuracies, cells), [table], [figure])


def judge(scale: Scale, accuracies: Mapping[Cell, Sample], nodes: int) -> list[Claim]:
    """The claims of the paper, each a comparison of two methods."""
    bounds = find_bounds(scale)
    cells = {row: Cell(row, nodes) for row in TABLE_4}
    late = compare(accuracies, cells["sgp"], cells["1-osgp"], bounds.spread)
    biased = compare(accuracies, cells["1-osgp"], cells["biased-1-osgp"], bounds.spread)
    asynchronous = compare(accuracies, cells["1-osgp"], cells["adpsgd"], bounds.spread)
    return [
        Claim(
            f"1-OSGP is at most {bounds.equal} points below SGP.",
            f"SGP less 1-OSGP {find_paper_gap('sgp', '1-osgp'):+.1f}",
            describe({"SGP less 1-OSGP": late}),
            is_at_most([late], bounds.equal),
        ),
        Claim(
            "Without the push-sum weight 1-OSGP is worse.",
            f"1-OSGP less biased {find_paper_gap('1-osgp', 'biased-1-osgp'):+.1f}",
            describe({"1-OSGP less biased": biased}),
            is_at_least([biased], 0.0),
        ),
        Claim(
            "1-OSGP is more accurate than AD-PSGD.",
            f"1-OSGP less AD-PSGD {find_paper_gap('1-osgp', 'adpsgd'):+.1f}",
            describe({"1-OSGP less AD-PSGD": asynchronous}),
            is_at_least([asynchronous], 0.0),
            is_modelled=True,
        ),
    ]


def find_paper_gap(better: str, worse: str) -> float:
    """Returns by how many points of validation accuracy a method is above another in the paper.

    >>> f"{find_paper_gap('1-osgp', 'biased-1-osgp'):.1f}"
    '0.4'
    """
    return float(TABLE_4[better][1]) - float(TABLE_4[worse][1])


def compose(claims: list[Claim], accuracies: Mapping[Cell, Sample], cells: list[Cell]) -> str:
    """The sentence of the section."""
    titles = [
        "1-OSGP about equal to SGP",
        "biased 1-OSGP worse",
        "1-OSGP above (simulated) AD-PSGD",
    ]
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    values = ", ".join(f"{NAMES[cell.row]} {accuracies[cell]:.1f}" for cell in cells)
    return f"{values} %. {format_verdicts(holds)}."


SECTION = Section(
    name="sgp19-table4",
    title="Messages that are a step late: overlap SGP",
    source="SGP-19, Table 4",
    write_text=lambda _: (
        "The paper compares SGP whose messages arrive a step late, hidden behind the computation "
        "(1-OSGP), with the same without the push-sum weight (biased), SGP, D-PSGD, AD-PSGD and "
        f"AllReduce over 16 nodes. {TASK} AD-PSGD is simulated, with gradients as old on "
        "average as the real one's of Table 1. The hours are the paper's; times are "
        "another section's."
    ),
    list_runs=list_runs,
    find=find,
)
