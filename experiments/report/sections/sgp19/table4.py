"""SGP-19, Table 4: messages that are a step late, with the push-sum weight and without it."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import TABLE_4
from experiments.report.section import Claim, Figure, Findings, Results, Run, Scale, Section, Table
from experiments.report.sections.curves import draw_bars
from experiments.report.sections.samples import Sample, format_verdicts, join_all
from experiments.report.sections.sgp19 import grid
from experiments.report.sections.sgp19.grid import Cell
from experiments.report.sections.sgp19.readings import (
    NAMES,
    compare,
    describe,
    find_bounds,
    is_at_least,
    is_at_most,
    make_panels,
    read_accuracies,
    read_training_losses,
    title_method,
)
from experiments.report.sections.sgp19.task import count_seeds, refer_to_task

PAPER_NODES = 16


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
        f"{nodes} nodes (paper: {PAPER_NODES})",
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
    samples = {NAMES[cell.row]: accuracies[cell] for cell in cells}
    paper = {NAMES[row]: validation for row, (_, validation, _) in TABLE_4.items()}
    figure = Figure(
        "overlap",
        "Accuracy with and without overlap: here, mean and standard deviation over the seeds, and "
        "in the paper (ImageNet).",
        partial(draw_bars, make_panels(samples, paper, nodes, PAPER_NODES), columns=2),
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
            f"1-OSGP is less than {bounds.equal} points below or above SGP.",
            f"SGP less 1-OSGP {find_paper_gap('sgp', '1-osgp'):+.1f}",
            describe({"SGP less 1-OSGP": late}),
            join_all([is_at_most([late], bounds.equal), is_at_least([late], -bounds.equal)]),
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
        "1-OSGP above biased 1-OSGP",
        "1-OSGP above AD-PSGD, which is simulated",
    ]
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    values = ", ".join(f"{NAMES[cell.row]} {accuracies[cell]:.1f}" for cell in cells)
    return f"{values} %. {format_verdicts(holds)}."


def write_text(scale: Scale) -> str:
    """The paper's experiment, and ours."""
    sizes = grid.find_sizes(scale)
    return (
        "The paper compares SGP whose messages arrive a step late, hidden behind the computation "
        "(1-OSGP), with the same without the push-sum weight (biased), SGP, D-PSGD, AD-PSGD and "
        f"AllReduce over {PAPER_NODES} nodes. {refer_to_task(scale, [sizes.overlap])}, "
        f"{count_seeds(sizes.seeds)}. AD-PSGD is simulated, with gradients that are "
        f"{grid.STALENESS} steps old on average; Table 1's section shows how old the real one's "
        "are. The hours are the paper's; times are another section's."
    )


SECTION = Section(
    name="sgp19-table4",
    title="Messages that are a step late: overlap SGP",
    source="SGP-19, Table 4",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
