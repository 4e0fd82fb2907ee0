"""The calls of the image program that the sections of SGP-19 share, and where each method is.

As in the paper, the batch of a node and the epochs are those of every number of nodes: twice the
nodes make half the steps, with twice the batch and twice the learning rate.
"""

from typing import NamedTuple

from experiments.presets.sgp19 import METHODS
from experiments.report.section import Run, Scale
from experiments.report.sections.samples import Place, list_seeds
from experiments.training.optimization.learning_rates import STEP_BATCH_SIZE

STALENESS = 0.1
"""Steps that the gradients of the simulated AD-PSGD are old, on average: about those of the real
one, whose age Table 1's section shows."""
ALWAYS_STABLE = ("ar", "2p", "ar-1p", "2p-1p")
PROGRAM = "experiments.fault_injection.asynchronous.slow_image"
REAL = "async-adpsgd@bipartite"
SLEEPS = {4: 0.02, 8: 0.04}
"""Nodes -> seconds of a step of nodes that wait for nobody: they sleep for longer than they
compute, so that they do not compete for the cores of this machine."""
LINES = 20  # of `metrics.jsonl` in a run, about
LONG = 3  # times the epochs, of Table 5


class Sizes(NamedTuple):
    """How large the runs are.

    Attributes:
      nodes: of Table 1.
      hybrid: nodes of Table 3.
      overlap: nodes of Table 4 and of Figure 2.
      budget: nodes of Table 5.
      real: the most nodes of AD-PSGD whose nodes are processes that wait for nobody.
      batch: examples per node and step.
      rate: learning rate per 256 examples, of all methods.
      can_diverge: whether some methods are near the largest stable rate.
      epochs: of all runs but the long ones.
      seeds, few_seeds: of most runs; of the long ones and of those that wait for nobody.
      examples: in the training set.
      test_examples: in the test set.
    """

    nodes: tuple[int, ...]
    hybrid: tuple[int, ...]
    overlap: int
    budget: int
    real: int
    batch: int
    rate: float
    can_diverge: bool
    epochs: int
    seeds: int
    few_seeds: int
    examples: int
    test_examples: int

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
    """A method over some nodes.

    Attributes:
      row: a key of `METHODS`.
      nodes: their number.
      is_long: whether it runs three times as long.
    """

    row: str
    nodes: int
    is_long: bool = False


FULL = Sizes(
    nodes=(4, 8, 16, 32),
    hybrid=(16, 32),
    overlap=16,
    budget=32,
    real=8,
    batch=16,
    rate=0.05,
    can_diverge=True,
    epochs=2,
    seeds=3,
    few_seeds=2,
    examples=60_000,
    test_examples=10_000,
)
QUICK = Sizes(
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
    examples=4_000,
    test_examples=1_000,
)
DIGITS_EPOCHS = 12  # of 5,000 digits for one of Fashion-MNIST
DEVIATIONS = "sgp19-deviations"
DEVIATION_LINES = 120  # of a run; a line costs one more gradient
DENSE = "sgp@complete"


def find_sizes(scale: Scale) -> Sizes:
    """Returns the sizes of a scale; without Fashion-MNIST its epochs are more ones of the digits.

    >>> find_sizes(Scale(is_quick=True)).nodes, find_sizes(Scale()).epochs
    ((4, 8), 24)
    """
    if scale.is_quick:
        return QUICK
    if scale.fashion_mnist is None:
        epochs = DIGITS_EPOCHS * FULL.epochs
        return FULL._replace(
            epochs=epochs, examples=QUICK.examples, test_examples=QUICK.test_examples
        )
    return FULL


def list_cells(scale: Scale) -> dict[str, list[Cell]]:
    """Returns the methods of each table, by the table's name."""
    sizes = find_sizes(scale)
    return {
        "table1": [
            Cell(row, nodes) for row in ("ar", "dpsgd", "adpsgd", "sgp") for nodes in sizes.nodes
        ],
        "table3": [
            Cell(row, nodes)
            for row in ("ar", "2p", "sgp", "ar-1p", "2p-1p")
            for nodes in sizes.hybrid
        ],
        "table4": [
            Cell(row, sizes.overlap)
            for row in ("ar", "dpsgd", "adpsgd", "sgp", "biased-1-osgp", "1-osgp")
        ],
        "table5": [
            Cell("ar", sizes.budget),
            *(Cell(row, sizes.budget, is_long=True) for row in ("adpsgd", "sgp", "1-osgp")),
        ],
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
    """Whether AD-PSGD is the real one of Table 1: processes that wait for nobody."""
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
    """The options of the image program that say what is trained, how, and how long.

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
    """The call of Figure 2: one seed, with more lines."""
    sizes = find_sizes(scale)
    size = list_size(scale, sizes.overlap, sizes.epochs, DEVIATION_LINES)
    algorithms = ("--algorithm", "sgp", DENSE)
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
