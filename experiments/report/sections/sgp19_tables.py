"""SGP-19, Tables 1 (with Figure 1), 3, 4 and 5: accuracy over nodes, messages and epochs."""

import contextlib
import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import gossipjax as gx
from experiments.presets import sgp19 as presets
from experiments.report.drawing import (
    Curve,
    Pair,
    Panel,
    draw_curves,
    draw_pairs,
    draw_panels,
    read_curves,
)
from experiments.report.estimates import MISSING, Estimate, Sample, compare, read_sample
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.report.sections import sgp19_calls as calls
from experiments.report.sections.sgp19_calls import LONG, Cell, Sizes, find_numbers
from experiments.runner import Result

FIELD = "test_accuracy_average_model"
LAST_PART = 0.1  # of a run, over which the training loss is averaged
NAMES = {
    "ar": "AllReduce",
    "dpsgd": "D-PSGD",
    "adpsgd": "AD-PSGD",
    "sgp": "SGP",
    "2p": "2P-SGP",
    "ar-1p": "AR/1P-SGP",
    "2p-1p": "2P/1P-SGP",
    "biased-1-osgp": "biased 1-OSGP",
    "1-osgp": "1-OSGP",
}
TABLE_1 = presets.TABLE_1 | {  # AD-PSGD's are of SGP-18, Table 1
    "adpsgd": {4: ("76.07", ""), 8: ("75.96", ""), 16: ("75.51", ""), 32: ("74.98", "")}
}
TABLE_3 = {{"1p": "sgp"}.get(row, row): columns for row, columns in presets.TABLE_3.items()}
TABLE_5 = {  # accuracy on the training and the validation set in per cent, hours, epochs
    "ar": ("76.9", "76.2", "5.1", "90"),
    "adpsgd": ("80.3", "76.9", "4.7", "270"),
    "sgp": ("80.0", "77.1", "4.6", "270"),
    "1-osgp": ("81.8", "77.1", "2.7", "270"),
}
GOSSIP = ("dpsgd", "sgp")
SMALL = 8  # nodes up to which the paper's methods are equal
MIN_LOSS = 0.5  # points at the most nodes; the paper's lose 1.2 and 1.8
MAX_LOSS = 2.5
MAX_BELOW_DPSGD = 0.3  # points by which SGP may be below D-PSGD; the paper's is at most 0.1
PAPER = {  # table -> row -> nodes -> accuracy; that of Table 5 is over 32 nodes
    "table1": {row: {n: float(x[0]) for n, x in cells.items()} for row, cells in TABLE_1.items()},
    "table3": {row: {n: float(x[0]) for n, x in cells.items()} for row, cells in TABLE_3.items()},
    "table4": {row: {16: float(figures[1])} for row, figures in presets.TABLE_4.items()},
    "table5": {row: {32: float(figures[1])} for row, figures in TABLE_5.items()},
}
Differences = Iterable[tuple[Cell, Cell]]
"""Pairs of methods; the second is subtracted from the first."""


class Accuracies(NamedTuple):
    """The accuracies of a table, here and in the paper, in per cent."""

    sizes: Sizes
    ours: Mapping[Cell, Sample]
    paper: Mapping[str, Mapping[int, float]]

    def compare(self, statement: str, pairs: Differences, **fields: object) -> Claim:
        """Returns the claim on differences of methods."""
        rows = {}
        published = {}
        for first, second in pairs:
            title = title_pair(first, second)
            rows[title] = self.ours[first].minus(self.ours[second], self.sizes.spread)
            figures = [self.find_paper(cell) for cell in (first, second)]
            if figures[0] is not None and figures[1] is not None:
                published[title] = figures[0] - figures[1]
        paper = "; ".join(f"{title} {gap:+.1f}" for title, gap in published.items())
        return Claim(statement, paper or "-", rows, **fields)  # pyright: ignore[reportArgumentType]

    def find_paper(self, cell: Cell) -> float | None:
        """Returns the paper's accuracy; Tables 4 and 5 have one number of nodes."""
        row = self.paper[cell.row]
        return next(iter(row.values())) if len(row) == 1 else row.get(cell.nodes)


def read(scale: Scale, results: Results, table: str) -> Accuracies:
    """Reads the accuracies of a table."""
    ours = {
        cell: read_sample(results, calls.find_place(cell, scale), FIELD, factor=100.0)
        for cell in calls.list_cells(scale)[table]
    }
    return Accuracies(calls.find_sizes(scale), ours, PAPER[table])


def title_pair(first: Cell, second: Cell) -> str:
    """Returns what is subtracted from what.

    >>> title_pair(Cell("ar", 8), Cell("sgp", 8)), title_pair(Cell("ar", 4), Cell("ar", 8))
    ('AllReduce less SGP, 8 nodes', 'AllReduce, 4 less 8 nodes')
    """
    if first.row == second.row:
        return f"{NAMES[first.row]}, {first.nodes} less {second.nodes} nodes"
    return f"{NAMES[first.row]} less {NAMES[second.row]}, {first.nodes} nodes"


def find_table1(scale: Scale, results: Results) -> Findings:
    """Compares the methods over each number of nodes with AllReduce."""
    table = read(scale, results, "table1")
    sizes = table.sizes
    nodes = sizes.nodes
    few = [n for n in nodes if n <= SMALL]
    most = max(nodes)
    below_dpsgd = sizes.equal if scale.is_quick else MAX_BELOW_DPSGD
    claims = [
        table.compare(
            f"Over up to {SMALL} nodes D-PSGD and SGP are at most {sizes.equal} points below "
            "AllReduce.",
            [(Cell("ar", n), Cell(row, n)) for row in GOSSIP for n in few],
            at_most=sizes.equal,
        ),
        table.compare(
            f"Over up to {SMALL} nodes AD-PSGD is at most {sizes.equal} points below AllReduce.",
            [(Cell("ar", n), Cell("adpsgd", n)) for n in few],
            at_most=sizes.equal,
            is_modelled=not all(calls.is_real(Cell("adpsgd", n), scale) for n in few),
        ),
        table.compare(
            f"Over any number of nodes SGP is at most {below_dpsgd} points below D-PSGD.",
            [(Cell("dpsgd", n), Cell("sgp", n)) for n in nodes],
            at_most=below_dpsgd,
        ),
        table.compare(
            f"AllReduce over more nodes is at most {sizes.equal} points below {nodes[0]} nodes.",
            [(Cell("ar", nodes[0]), Cell("ar", n)) for n in nodes[1:]],
            at_most=sizes.equal,
            if_not=f"AllReduce loses as well: the {sizes.count_steps(most, sizes.epochs)} steps "
            f"that are left over {most} nodes may be too few. The paper's 90 epochs of ImageNet "
            "leave 14,000 over 32.",
        ),
    ]
    if most > SMALL:  # the quick scale has no more
        loss = table.compare(
            f"Over {most} nodes D-PSGD and SGP lose between {MIN_LOSS} and {MAX_LOSS} points "
            "against AllReduce.",
            [(Cell("ar", most), Cell(row, most)) for row in GOSSIP],
            at_least=MIN_LOSS,
            at_most=MAX_LOSS,
        )
        growth = Claim(
            f"They lose more over {most} nodes than over {SMALL}.",
            "D-PSGD +1.5; SGP +1.2",
            {NAMES[row]: compare_losses(table, row, most) for row in GOSSIP},
            at_least=0.0,
        )
        claims += [loss, growth]
    losses = {
        f"{n} nodes": {NAMES[row]: read_losses(results, Cell(row, n), scale) for row in TABLE_1}
        for n in nodes
    }
    figures = [
        Figure(
            "accuracy",
            "Accuracy over the number of nodes, the epochs fixed; here and in the paper.",
            partial(draw_panels, make_panels(table)),
        ),
        Figure(
            "loss",
            "Training loss over the steps of a node (Figure 1a): twice the nodes, half the steps. "
            "A point is the mean since the point before; a line for each seed.",
            partial(draw_curves, losses, "training loss, nats", "log"),
        ),
    ]
    return Findings(claims, [tabulate(table, TABLE_1), tabulate_delays(scale, results)], figures)


def compare_losses(table: Accuracies, row: str, most: int) -> Estimate:
    """Returns by how much more a method loses against AllReduce over the most nodes.

    Losses are differences of the same seed; there is none if a method has fewer seeds.
    """
    losses = []
    for nodes in (most, SMALL):
        best, other = (table.ours[Cell(name, nodes)].values for name in ("ar", row))
        if len(best) != len(other):
            return MISSING
        losses.append([a - b for a, b in zip(best, other, strict=True)])
    return compare(losses[0], losses[1], table.sizes.spread)


def tabulate(table: Accuracies, published: Mapping[str, Mapping[int, tuple[str, ...]]]) -> Table:
    """Returns accuracies over nodes, with the paper's accuracies and hours."""
    nodes = list(dict.fromkeys(cell.nodes for cell in table.ours))
    rows = []
    for row, columns in published.items():
        rows.append((NAMES[row], "here", *(f"{table.ours[Cell(row, n)]:.2f}" for n in nodes)))
        figures = [columns.get(n, ("-", "")) for n in nodes]
        texts = [f"{value} ({hours} h)" if hours else value for value, hours in figures]
        rows.append((NAMES[row], "paper", *texts))
    return Table(
        "Accuracy on the test set, %",
        ("method", "", *(f"{n} nodes" for n in nodes)),
        rows,
        "Here ± standard deviation over the seeds. The paper: ImageNet, 10 Gbit/s Ethernet; "
        "AD-PSGD of SGP-18, Table 1.",
    )


def tabulate_delays(scale: Scale, results: Results) -> Table:
    """Returns how old AD-PSGD's gradients are: measured where it is real, else an option."""
    rows = []
    for n in calls.find_sizes(scale).nodes:
        cell = Cell("adpsgd", n)
        if not calls.is_real(cell, scale):
            rows.append((f"{n}", "simulated", f"{calls.STALENESS}"))
            continue
        result = results.get(calls.find_place(cell, scale).run, Result(status="missing"))
        delays = measure_delays(result)
        rows.append((f"{n}", "real", f"{statistics.fmean(delays):.2f}" if delays else "-"))
    return Table("Steps that the gradients of AD-PSGD are old", ("nodes", "", "steps, mean"), rows)


def measure_delays(result: Result) -> list[float]:
    """Returns the mean delay in steps of each asynchronous run, from the nodes' journals.

    Journals that cannot be read are left out.
    """
    delays = []
    for run in sorted(result.folder.glob("nodes/*")) if result.folder is not None else []:
        with contextlib.suppress(OSError, ValueError):
            table = gx.asynchronous.measure_delays(sorted(run.glob("journals/*/*.jsonl")))
            delays.append(float(table.mean()))
    return delays


def make_panels(table: Accuracies) -> list[Panel]:
    """Returns the accuracy over nodes, here and in the paper."""
    nodes = table.sizes.nodes
    ticks = [f"{n}" for n in nodes]
    ours = {NAMES[row]: [table.ours[Cell(row, n)] for n in nodes] for row in table.paper}
    paper = {
        NAMES[row]: [Sample((figures[n],)) for n in nodes] for row, figures in table.paper.items()
    }
    return [
        Panel("here", "nodes", "test accuracy, %", ticks, ours),
        Panel("paper (ImageNet)", "nodes", "top-1 accuracy, %", ticks, paper),
    ]


def find_table3(scale: Scale, results: Results) -> Findings:
    """Compares two peers and the hybrids with one peer."""
    table = read(scale, results, "table3")
    sizes = table.sizes
    bound = 0.0
    statement = "{} is more accurate than SGP with one peer."
    if scale.is_quick:  # a thousand images cannot show tenths of a point
        bound = -sizes.equal
        statement = f"{{}} is at most {sizes.equal} points below SGP with one peer."
    claims = [
        table.compare(
            statement.format(NAMES[row]),
            [(Cell(row, n), Cell("sgp", n)) for n in sizes.hybrid],
            at_least=bound,
        )
        for row in ("2p", "ar-1p", "2p-1p")
    ]
    near_allreduce = table.compare(
        f"With two peers SGP is at most {sizes.equal} points below AllReduce.",
        [(Cell("ar", n), Cell("2p", n)) for n in sizes.hybrid],
        at_most=sizes.equal,
        if_not="2P-SGP loses more against AllReduce here than in the paper; the runs do not show "
        "why.",
    )
    pairs = []
    for n in sizes.hybrid:
        nearest = n if n in TABLE_3["sgp"] else min(TABLE_3["sgp"])
        ours = {NAMES[row]: table.ours[Cell(row, n)] for row in TABLE_3}
        paper = {NAMES[row]: table.paper[row][nearest] for row in TABLE_3}
        pairs.append(make_pair(ours, paper, n, nearest))
    figure = Figure(
        "hybrids",
        "Accuracy with more peers and of the hybrids: here, mean and standard deviation over the "
        "seeds, and in the paper (ImageNet).",
        partial(draw_pairs, pairs),
    )
    return Findings([*claims, near_allreduce], [tabulate(table, TABLE_3)], [figure])


def make_pair(
    ours: Mapping[str, Sample], paper: Mapping[str, float], nodes: int, paper_nodes: int
) -> Pair:
    """Returns accuracies here and in the paper, to be drawn side by side."""
    titles = (f"here, {nodes} nodes", f"paper, {paper_nodes} nodes")
    return Pair(titles, ("test accuracy, %", "validation accuracy, %"), ours, paper)


def find_table4(scale: Scale, results: Results) -> Findings:
    """Compares overlap SGP with the other methods."""
    table = read(scale, results, "table4")
    sizes = table.sizes
    cells = {cell.row: cell for cell in table.ours}
    claims = [
        table.compare(
            f"1-OSGP is less than {sizes.equal} points below or above SGP.",
            [(cells["sgp"], cells["1-osgp"])],
            at_least=-sizes.equal,
            at_most=sizes.equal,
        ),
        table.compare(
            "Without the push-sum weight 1-OSGP is worse.",
            [(cells["1-osgp"], cells["biased-1-osgp"])],
            at_least=0.0,
        ),
        table.compare(
            "1-OSGP is more accurate than AD-PSGD.",
            [(cells["1-osgp"], cells["adpsgd"])],
            at_least=0.0,
            is_modelled=True,
        ),
    ]
    columns = ("paper: train, %", "validation, %", "hours")
    tables = [tabulate_cells(table, scale, results, presets.TABLE_4, columns)]
    ours = {NAMES[cell.row]: sample for cell, sample in table.ours.items()}
    published = {NAMES[row]: figures[16] for row, figures in table.paper.items()}
    figure = Figure(
        "overlap",
        "Accuracy with and without overlap: here, mean and standard deviation over the seeds, and "
        "in the paper (ImageNet).",
        partial(draw_pairs, [make_pair(ours, published, sizes.overlap, 16)]),
    )
    return Findings(claims, tables, [figure])


def find_table5(scale: Scale, results: Results) -> Findings:
    """Compares the long runs with AllReduce's short one."""
    table = read(scale, results, "table5")
    allreduce, *long = table.ours
    claims = [
        table.compare(
            f"With {LONG} times the epochs {NAMES[cell.row]} is more accurate than AllReduce.",
            [(cell, allreduce)],
            at_least=0.0,
            is_modelled=cell.row == "adpsgd",
            if_not=f"Why {NAMES[cell.row]} gains less here, the runs do not show.",
        )
        for cell in long
    ]
    columns = ("paper: train, %", "validation, %", "hours", "epochs")
    ours = {f"{NAMES[cell.row]}{', 3x' * cell.is_long}": x for cell, x in table.ours.items()}
    paper = {title: table.paper[cell.row][32] for title, cell in zip(ours, table.ours, strict=True)}
    figure = Figure(
        "budget",
        f"Accuracy of AllReduce, and of the others after {LONG} times the epochs: here, mean and "
        "standard deviation over the seeds, and in the paper (ImageNet).",
        partial(draw_pairs, [make_pair(ours, paper, table.sizes.budget, 32)]),
    )
    return Findings(claims, [tabulate_cells(table, scale, results, TABLE_5, columns)], [figure])


def tabulate_cells(
    table: Accuracies,
    scale: Scale,
    results: Results,
    published: Mapping[str, tuple[str, ...]],
    columns: tuple[str, ...],
) -> Table:
    """Returns training losses and accuracies of methods over one number of nodes."""
    rows = []
    for cell, accuracy in table.ours.items():
        epochs = table.sizes.epochs * (LONG if cell.is_long else 1)
        ends = [average_end(curve) for curve in read_losses(results, cell, scale)]
        loss = accuracy._replace(values=tuple(end for end in ends if end is not None))
        rows.append(
            (NAMES[cell.row], f"{epochs}", f"{loss:.3f}", f"{accuracy:.2f}", *published[cell.row])
        )
    return Table(
        f"{next(iter(table.ours)).nodes} nodes (paper: {next(iter(table.paper['ar']))})",
        ("method", "epochs, here", "training loss, nats", "test accuracy, %", *columns),
        rows,
        "Here ± standard deviation over the seeds; the training loss is that of the last tenth of "
        "the steps, at the nodes' own models. AD-PSGD is simulated.",
    )


def read_losses(results: Results, cell: Cell, scale: Scale) -> list[Curve]:
    """Returns the training loss over the steps, for each seed."""
    return read_curves(results, calls.find_place(cell, scale), "loss")


def average_end(curve: Curve) -> float | None:
    """Returns the mean of a curve over its last tenth; a value is of the steps since the last.

    >>> average_end(Curve((85, 95, 100), (9.0, 2.0, 5.0)))
    3.0
    """
    if not curve.steps:
        return None
    begins = (0.0, *curve.steps[:-1])
    parts = zip(begins, curve.steps, curve.values, strict=True)
    first = (1 - LAST_PART) * curve.steps[-1]
    last = [(end - begin, value) for begin, end, value in parts if end > first]
    return statistics.fmean([value for _, value in last], [weight for weight, _ in last])


TABLE1_SECTION = Section(
    name="sgp19-table1",
    title="Accuracy over the number of nodes",
    source="SGP-19, Table 1 and Figure 1",
    text="""
    The paper trains a ResNet-50 on ImageNet for 90 epochs over 4 to 32 servers: twice the servers
    make half the iterations. Here: a perceptron of {parameters:,} parameters on {data},
    {batch} images per node and step, {epochs} epochs over {nodes} nodes ({most_steps:,} steps over
    the fewest, {fewest_steps:,} over the most), {seeds} seed(s), Nesterov momentum, the rate 10x
    down at 1/3, 2/3 and 8/9. The rate is {rate} per 256 images for all methods and nodes; the
    paper's is 0.1, and for one peer over 32 nodes 0.0375 with later decays (SGP-18, A.3). It warms
    up, from that of 256 images, only where a step has more. Accuracies are of the average model on
    the {test_examples:,} test images. AD-PSGD over up to {real} nodes is real, with {few_seeds}
    seed(s): an asynchronous process for each node, whose steps sleep so that the processes do not
    compete for the cores of this machine. Over more nodes it is simulated, with gradients that are
    {staleness} steps old on average. The other methods are computed in one process: what they
    learn is measured, their time is not.
    """,
    find_numbers=find_numbers,
    list_runs=partial(calls.list_runs, table="table1"),
    find=find_table1,
)
TABLE3_SECTION = Section(
    name="sgp19-table3",
    title="Two peers, and hybrids that begin with more communication",
    source="SGP-19, Table 3",
    text="""
    The paper compares SGP with one peer and two (2P), and hybrids: AllReduce (AR/1P) or two peers
    (2P/1P) for the first 30 of 90 epochs, one peer for the rest. Here: the task and the recipe of
    Table 1's section, on {data}, over {hybrid} nodes, {seeds} seed(s). The hybrids change after a
    third of the run as well.
    """,
    find_numbers=find_numbers,
    list_runs=partial(calls.list_runs, table="table3"),
    find=find_table3,
)
TABLE4_SECTION = Section(
    name="sgp19-table4",
    title="Messages that are a step late: overlap SGP",
    source="SGP-19, Table 4",
    text="""
    The paper compares SGP whose messages arrive a step late, hidden behind the computation
    (1-OSGP), with the same without the push-sum weight (biased), SGP, D-PSGD, AD-PSGD and AllReduce
    over 16 nodes. Here: the task and the recipe of Table 1's section, on {data}, over {overlap}
    nodes, {seeds} seed(s). AD-PSGD is simulated, with gradients that are {staleness} steps old on
    average; Table 1's section shows how old the real one's are. The hours are the paper's; times
    are another section's.
    """,
    find_numbers=find_numbers,
    list_runs=partial(calls.list_runs, table="table4"),
    find=find_table4,
)
TABLE5_SECTION = Section(
    name="sgp19-table5",
    title="Three times the epochs in the time of AllReduce",
    source="SGP-19, Table 5",
    text="""
    The paper trains SGP, AD-PSGD and 1-OSGP over 32 nodes for 270 epochs, which over 10 Gbit/s
    Ethernet takes less than AllReduce's 90. Here: the task and the recipe of Table 1's section, on
    {data}, over {budget} nodes, {seeds} seed(s), for AllReduce; {long} times as many steps, the
    schedule stretched, {few_seeds} seed(s), for the others. AD-PSGD is simulated, with gradients
    that are {staleness} steps old on average. Times are another section's.
    """,
    find_numbers=find_numbers,
    list_runs=partial(calls.list_runs, table="table5"),
    find=find_table5,
)
