"""The calls of the image program that the sections of SGP-19 share, and where each method is.

As in the paper, the batch of a node and the epochs are those of every number of nodes: twice the
nodes make half the steps, with twice the batch and twice the learning rate.
"""

from typing import NamedTuple

from experiments.presets.sgp19 import METHODS
from experiments.report.estimates import Place
from experiments.report.section import Scale
from experiments.report.sections.images import list_seeds
from experiments.runner import Run
from experiments.training.optimization import STEP_BATCH_SIZE

STALENESS = 0.1
"""Steps that the gradients of the simulated AD-PSGD are old, on average: about those of the real
one, whose age Table 1's section shows."""
ALWAYS_STABLE = ("ar", "2p", "ar-1p", "2p-1p")
PROGRAM = "experiments.fault_injection.slow_image"
REAL = "async-adpsgd@bipartite"
SLEEPS = {4: 0.02, 8: 0.04}
"""Nodes -> seconds of a step of asynchronous nodes: they sleep for longer than they compute, so
that they do not compete for the cores of this machine."""
LINES = 20  # of `metrics.jsonl` in a run, about
LONG = 3  # times the epochs, of Table 5
DIGITS_EPOCHS = 12  # of 5,000 digits for one of Fashion-MNIST
DEVIATIONS = "sgp19-deviations"
DEVIATION_LINES = 120  # of a run; a line costs one more gradient


class Sizes(NamedTuple):
    """How large the runs are.

    Attributes:
      nodes, hybrid: of Tables 1 and 3.
      overlap: nodes of Table 4 and of Figure 2.
      budget: nodes of Table 5.
      real: the most nodes of an AD-PSGD that is real: asynchronous processes.
      batch: examples per node and step.
      rate: learning rate per 256 examples, of all methods.
      can_diverge: whether some methods are near the largest stable rate.
      epochs: of all runs but the long ones.
      seeds, few_seeds: of most runs; of the long and of the asynchronous ones.
      examples, test_examples: in the training and in the test set.
      equal: points of accuracy within which methods count as equal.
      spread: standard deviation of a seed, in points, where there is one.
      data: the title of the data set.
    """

    nodes: tuple[int, ...] = (4, 8, 16, 32)
    hybrid: tuple[int, ...] = (16, 32)
    overlap: int = 16
    budget: int = 32
    real: int = 8
    batch: int = 16
    rate: float = 0.05
    can_diverge: bool = True
    epochs: int = 2
    seeds: int = 3
    few_seeds: int = 2
    examples: int = 60_000
    test_examples: int = 10_000
    equal: float = 0.5
    spread: float = 0.3
    data: str = "Fashion-MNIST"

    def count_steps(self, nodes: int, epochs: int) -> int:
        """Returns the steps of a run.

        >>> FULL.count_steps(8, FULL.epochs)
        938
        """
        return round(epochs * self.examples / (nodes * self.batch))

    def has_warmup(self, nodes: int) -> bool:
        """Whether the rate rises first: from that of 256 images to that of a step, if it has more.

        >>> FULL.has_warmup(16), FULL.has_warmup(32)
        (False, True)
        """
        return nodes * self.batch > STEP_BATCH_SIZE


class Cell(NamedTuple):
    """A method over some nodes: a key of `METHODS`, how many, and whether it runs 3x as long."""

    row: str
    nodes: int
    is_long: bool = False


FULL = Sizes()
DIGITS = FULL._replace(
    epochs=DIGITS_EPOCHS * FULL.epochs,
    examples=4_000,
    test_examples=1_000,
    data="4,000 of the digits of MNIST",
)
QUICK = DIGITS._replace(
    nodes=(4, 8),
    hybrid=(8,),
    overlap=8,
    budget=8,
    real=4,
    batch=8,
    rate=0.2,
    can_diverge=False,
    epochs=4,
    seeds=1,
    few_seeds=1,
    equal=3.0,
    spread=0.8,
)


def find_sizes(scale: Scale) -> Sizes:
    """Returns the sizes of a scale; without Fashion-MNIST they are more epochs of the digits."""
    if scale.is_quick:
        return QUICK
    return DIGITS if scale.fashion_mnist is None else FULL


def find_numbers(scale: Scale) -> dict[str, object]:
    """Returns the numbers of the sections' texts."""
    sizes = find_sizes(scale)
    steps = [sizes.count_steps(n, sizes.epochs) for n in (min(sizes.nodes), max(sizes.nodes))]
    numbers = sizes._asdict() | {
        name: ", ".join(map(str, getattr(sizes, name))) for name in ("nodes", "hybrid")
    }
    return numbers | {
        "parameters": 118_282,
        "most_steps": steps[0],
        "fewest_steps": steps[1],
        "staleness": STALENESS,
        "long": LONG,
        "deviation_lines": DEVIATION_LINES,
    }


def list_cells(scale: Scale) -> dict[str, list[Cell]]:
    """Returns the methods of each table, by the table's name."""
    sizes = find_sizes(scale)
    table1 = ("ar", "dpsgd", "adpsgd", "sgp")
    table3 = ("ar", "2p", "sgp", "ar-1p", "2p-1p")
    table4 = ("ar", "dpsgd", "adpsgd", "sgp", "biased-1-osgp", "1-osgp")
    table5 = ("adpsgd", "sgp", "1-osgp")
    return {
        "table1": [Cell(row, nodes) for row in table1 for nodes in sizes.nodes],
        "table3": [Cell(row, nodes) for row in table3 for nodes in sizes.hybrid],
        "table4": [Cell(row, sizes.overlap) for row in table4],
        "table5": [Cell("ar", sizes.budget), *(Cell(row, sizes.budget, True) for row in table5)],
    }


def name_call(cell: Cell, sizes: Sizes) -> str:
    """Returns the name of the call that a method is in.

    What may diverge is apart from what cannot: one that does ends the others of its call. The real
    AD-PSGD is a call of the launcher.

    >>> name_call(Cell("ar", 32), FULL), name_call(Cell("sgp", 32), FULL)
    ('sgp19-32', 'sgp19-32-one-peer')
    >>> name_call(Cell("sgp", 32, is_long=True), FULL)
    'sgp19-32-sgp-long'
    """
    if cell.is_long:
        return f"sgp19-{cell.nodes}{f'-{cell.row}' if sizes.can_diverge else ''}-long"
    if cell.row == "adpsgd" and cell.nodes <= sizes.real:
        return f"sgp19-{cell.nodes}-adpsgd"
    if cell.row in ("adpsgd", "biased-1-osgp") and sizes.can_diverge:
        return f"sgp19-{cell.nodes}-{cell.row}"
    is_stable = cell.row in ALWAYS_STABLE or cell.nodes < max(FULL.nodes)
    return f"sgp19-{cell.nodes}" if is_stable else f"sgp19-{cell.nodes}-one-peer"


def is_real(cell: Cell, scale: Scale) -> bool:
    """Whether AD-PSGD is the real one of Table 1: asynchronous processes."""
    return cell.row == "adpsgd" and cell.nodes <= find_sizes(scale).real and not cell.is_long


def list_runs(scale: Scale, table: str) -> list[Run]:
    """Returns the calls that a table needs; each has all methods of all tables that share it."""
    sizes = find_sizes(scale)
    cells = list_cells(scale)
    calls: dict[str, list[Cell]] = {}
    for cell in [cell for cells_of_table in cells.values() for cell in cells_of_table]:
        calls.setdefault(name_call(cell, sizes), []).append(cell)
    names = dict.fromkeys(name_call(cell, sizes) for cell in cells[table])
    return [make_run(name, calls[name], scale) for name in names]


def make_run(name: str, cells: list[Cell], scale: Scale) -> Run:
    """Returns the call of some methods that have the same nodes and epochs."""
    sizes = find_sizes(scale)
    cell = cells[0]
    epochs = sizes.epochs * (LONG if cell.is_long else 1)
    size = list_size(scale, cell.nodes, epochs, LINES)
    if is_real(cell, scale):
        launch = ("--asynchronous", "--processes", f"{cell.nodes}", "--", "python", "-m", PROGRAM)
        sleep = ("--step-seconds", f"{SLEEPS[cell.nodes]}")
        seeds = list_seeds(sizes.few_seeds)
        arguments = (*launch, "--algorithm", REAL, *size, *sleep, *seeds)
        return Run(name, "gossipjax.launch", arguments)
    algorithms = dict.fromkeys(METHODS[cell.row][0] for cell in cells)
    seeds = list_seeds(sizes.few_seeds if cell.is_long else sizes.seeds)
    delays = ("--staleness", f"{STALENESS}") if "adpsgd" in algorithms else ()
    one_device = ("--placement", "vmap")
    return Run(name, "image", ("--algorithm", *algorithms, *size, *delays, *one_device, *seeds))


def list_size(scale: Scale, nodes: int, epochs: int, lines: int) -> tuple[str, ...]:
    """Returns the options of the image program that say what is trained, how, and how long.

    The nodes are on one device, which computes a perceptron faster than a device per node does.
    """
    sizes = find_sizes(scale)
    data: tuple[str, ...] = ("--dataset", "mnist5k")
    if scale.fashion_mnist is not None and not scale.is_quick:
        data = ("--dataset", "fashion_mnist", "--data-dir", f"{scale.fashion_mnist}")
    every = max(1, round(sizes.count_steps(nodes, epochs) / lines))
    return (
        *(*data, "--model", "mlp", "--nodes", f"{nodes}", "--epochs", f"{epochs}"),
        *("--batch-size-per-node", f"{sizes.batch}", "--learning-rate", f"{sizes.rate}"),
        *("--lr-schedule", "step", "--log-every", f"{every}"),
    )


def list_deviation_runs(scale: Scale) -> list[Run]:
    """Returns the call of Figure 2: one seed, with more lines."""
    sizes = find_sizes(scale)
    size = list_size(scale, sizes.overlap, sizes.epochs, DEVIATION_LINES)
    algorithms = ("--algorithm", "sgp", "sgp@complete")
    return [Run(DEVIATIONS, "image", (*algorithms, *size, "--placement", "vmap", "--seed", "0"))]


def find_place(cell: Cell, scale: Scale) -> Place:
    """Returns where the figures of a method are.

    >>> find_place(Cell("sgp", 8), Scale())
    Place(run='sgp19-8', algorithm='sgp', topology='one_peer_exponential')
    >>> find_place(Cell("1-osgp", 16), Scale())
    Place(run='sgp19-16', algorithm='1-osgp', topology=None)
    """
    name = name_call(cell, find_sizes(scale))
    if is_real(cell, scale):
        return Place(name, REAL)
    algorithm, _, topology = METHODS[cell.row][0].partition("@")
    if algorithm == "sgp" and not topology:
        topology = "one_peer_exponential"
    return Place(name, algorithm, topology or None)
