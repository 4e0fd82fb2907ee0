"""What the runs say of the methods: accuracies, training losses, and the losses of accuracy."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.report.differences import Difference
from experiments.report.section import Results, Scale
from experiments.report.sections.curves import NO_SPREAD, Curve, Panel, make_point, read_curves
from experiments.report.sections.samples import (
    Place,
    Sample,
    format_difference,
    join_all,
    read_sample,
    subtract,
)
from experiments.report.sections.sgp19.grid import Cell, find_place, is_real

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


class Bounds(NamedTuple):
    """What counts as equal, and what is known of a single seed.

    Attributes:
      equal: points of accuracy.
      spread: standard deviation of a seed, in points, where there is one.
    """

    equal: float
    spread: float


def find_bounds(scale: Scale) -> Bounds:
    """Returns the bounds of a scale; those of the quick one are wide.

    >>> find_bounds(Scale()), find_bounds(Scale(is_quick=True))
    (Bounds(equal=0.5, spread=0.3), Bounds(equal=3.0, spread=0.8))
    """
    return Bounds(3.0, 0.8) if scale.is_quick else Bounds(0.5, 0.3)


def read_accuracies(scale: Scale, results: Results, cells: Iterable[Cell]) -> dict[Cell, Sample]:
    """Returns the accuracy of each method, in per cent."""
    return {
        cell: read_sample(results, find_place(cell, scale), FIELD, factor=100.0) for cell in cells
    }


def read_training_losses(
    scale: Scale, results: Results, cells: Iterable[Cell]
) -> dict[Cell, Sample]:
    """Returns the training loss of each method over the last tenth of its steps."""
    losses = {}
    for cell in cells:
        place = find_place(cell, scale)
        ends = [average_end(curve) for curve in read_losses(results, place)]
        gap = read_sample(results, place, FIELD)
        losses[cell] = gap._replace(values=tuple(end for end in ends if end is not None))
    return losses


def read_losses(results: Results, place: Place) -> list[Curve]:
    """Returns the training loss over the steps, for each seed."""
    if place.run not in results:
        return []
    result = results[place.run]
    return [
        read_curves(result.folder, run, "loss")
        for run in result.runs
        if run["algorithm"] == place.algorithm and place.topology in (None, run["topology"])
    ]


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


def subtract_by_seed(first: Sample, second: Sample) -> Sample:
    """Returns the differences of two methods, seed by seed; none if one has fewer seeds."""
    if len(first.values) != len(second.values):
        return Sample((), second.status)
    pairs = zip(first.values, second.values, strict=True)
    return Sample(tuple(a - b for a, b in pairs), second.status)


def compare(
    accuracies: Mapping[Cell, Sample], better: Cell, worse: Cell, spread: float
) -> Difference:
    """Returns by how much one is above another; not a number if one is not there."""
    first, second = (accuracies.get(cell, Sample()) for cell in (better, worse))
    return subtract(first, second, spread)


def is_at_most(differences: Iterable[Difference], bound: float) -> bool | None:
    """Whether all differences are at most a bound."""
    return join_all([difference.is_at_most(bound) for difference in differences])


def is_at_least(differences: Iterable[Difference], bound: float) -> bool | None:
    """Whether all differences are at least a bound."""
    return join_all([difference.exceeds(bound) for difference in differences])


def describe(differences: Mapping[str, Difference]) -> str:
    """Returns differences in points, by the titles of what is compared.

    >>> describe({"SGP, 4 nodes": Difference(0.25, 0.5)})
    'SGP, 4 nodes +0.25 ± 0.50'
    """
    return "; ".join(f"{title} {format_difference(value)}" for title, value in differences.items())


def join_nodes(nodes: Sequence[int]) -> str:
    """Returns numbers of nodes as words.

    >>> join_nodes([8]), join_nodes([4, 8]), join_nodes([4, 8, 16])
    ('8', '4 and 8', '4, 8 and 16')
    """
    *others, last = [f"{n:,}" for n in nodes]
    return f"{', '.join(others)} and {last}" if others else last


def title_cell(cell: Cell) -> str:
    """Returns a method with its nodes.

    >>> title_cell(Cell("2p", 16))
    '2P-SGP, 16 nodes'
    """
    return f"{NAMES[cell.row]}, {cell.nodes} nodes"


def title_method(row: str, cells: Sequence[Cell], scale: Scale) -> str:
    """Returns the name of a method for a table, with what is simulated of it.

    >>> title_method("adpsgd", [Cell("adpsgd", 8), Cell("adpsgd", 16)], Scale())
    'AD-PSGD (8: real; 16: simulated)'
    """
    if row != "adpsgd":
        return NAMES[row]
    own = [cell for cell in cells if cell.row == row]
    kinds = {True: "real", False: "simulated"}
    parts = []
    for kind in (True, False):
        nodes = [f"{cell.nodes}" for cell in own if is_real(cell, scale) is kind]
        if nodes:
            parts.append(f"{', '.join(nodes)}: {kinds[kind]}")
    return f"{NAMES[row]} ({'; '.join(parts)})"


def make_panels(
    samples: Mapping[str, Sample], published: Mapping[str, str], nodes: int, paper_nodes: int
) -> list[Panel]:
    """Returns the accuracy of each method here and in the paper, by its name, side by side."""
    here = {name: [make_point(sample)] for name, sample in samples.items()}
    paper = {name: [(float(published[name]), NO_SPREAD)] for name in samples}
    return [
        Panel(f"here, {nodes} nodes", "test accuracy, %", "", (), here),
        Panel(f"paper, {paper_nodes} nodes", "validation accuracy, %", "", (), paper),
    ]
