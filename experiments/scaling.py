"""Simulates up to a thousand nodes: which graph and which method keep AllReduce's loss?

    python -m experiments.scaling --fashion-mnist FOLDER

All nodes are simulated in one process, so losses are measured and seconds are not. They train a
perceptron with 32 hidden units on images of 14 x 14 pixels, each node on batches of its own from
the same images, by SGD with Nesterov momentum. The rate is constant for three quarters of the
steps, and then falls to 0. Each method has the best rate of the first seed, found by doubling and
halving that of AllReduce, or of fewer nodes. Batches are equal per node (`--batch-size-per-node`),
or all nodes together have `--total-batch-size`, where a node of 1,024 has two images.

- `allreduce` averages the gradients exactly.
- `dpsgd`, `sgp` and `1-osgp` exchange in every step: while they compute, behind the local step, and
  behind it with messages that arrive a step late.
- `sgp-every-H` makes a round of SGP after every `--every` local steps.
- `local-sgd` averages the models exactly after every `--every` local steps, and `outer` adds
  Nesterov's outer step (rate 0.7, momentum 0.9).

`runs` of `summary.json`, in `--out`, have for each seed the loss and the accuracy of the average
model on the test images, the mean and the worst accuracy of a node, and the distance of the nodes'
models to their average, relative to its norm. `curve` is the loss of the average model of the first
seed at AllReduce's rate after each of `points` steps, and `gap` the spectral gap per round.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from rich.table import Table

import gossipjax as gx
from experiments.cells import run_study, show_seeds
from experiments.options import Check, PositiveInt
from experiments.perceptron import Images, compute_accuracy, compute_loss, load_images
from experiments.results import Record
from experiments.simulated import (
    SimulatedOptions,
    Trainer,
    average_nodes,
    hold_then_fall,
    make_image_task,
)
from experiments.tables import make_table
from experiments.tuning import tune

POOL = 2  # of 28 pixels 14 are left, so that the models of 1,024 nodes are small
HIDDEN = 32
FIRST_RATE = 0.1
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
WATCHED = 1_000  # test images of each node's model

Graph = Literal["ring", "torus", "exponential", "one-peer", "base", "none"]
MethodName = Literal["allreduce", "dpsgd", "sgp", "1-osgp", "sgp-every-H", "local-sgd", "outer"]
Sizes = Literal["per node", "total"]


def make_torus(nodes: int) -> gx.Schedule:
    """Returns the torus that is nearest to a square."""
    rows = next(k for k in range(math.isqrt(nodes), 0, -1) if nodes % k == 0)
    return gx.topology.torus(rows, nodes // rows)


GRAPHS: dict[str, Callable[[int], gx.Schedule]] = {
    "ring": gx.topology.ring,
    "torus": make_torus,
    "exponential": gx.topology.exponential,
    "one-peer": gx.topology.one_peer_exponential,
    "base": gx.topology.base_graph,
}
METHODS: dict[str, Callable[[Any, optax.GradientTransformation, int], Any]] = {
    "allreduce": lambda schedule, inner, every: optax.chain(gx.allreduce(), inner),
    "dpsgd": lambda schedule, inner, every: optax.chain(inner, gx.dpsgd(schedule)),
    "sgp": lambda schedule, inner, every: optax.chain(inner, gx.sgp(schedule)),
    "1-osgp": lambda schedule, inner, every: optax.chain(inner, gx.osgp(schedule)),
    "sgp-every-H": lambda schedule, inner, every: optax.chain(inner, gx.sgp(schedule.every(every))),
    "local-sgd": lambda schedule, inner, every: gx.outer(inner, optax.sgd(1.0), every=every),
    "outer": lambda schedule, inner, every: gx.outer(inner, OUTER, every=every),
}
WITHOUT_GRAPH = ("allreduce", "local-sgd", "outer")
EXACT = ("allreduce", "none")


@dataclasses.dataclass(frozen=True)
class ScalingOptions(SimulatedOptions):
    """Measures what gossip costs over more and more simulated nodes, graph by graph."""

    GRID = ("nodes", "batch", "method", "graph")
    nodes: tuple[
        Annotated[PositiveInt, Check("even, from 4 on", lambda n: n % 2 == 0 and n >= 4)], ...
    ] = (16, 64, 256, 1024)
    """One or several numbers of simulated nodes."""
    batch: tuple[Sizes, ...] = ("per node", "total")
    """Which batch is equal for all numbers of nodes: that of a node, or that of all together."""
    method: tuple[MethodName, ...] = tuple(METHODS)  # pyright: ignore[reportAssignmentType]
    """One or several methods."""
    graph: tuple[Graph, ...] = tuple(GRAPHS)  # pyright: ignore[reportAssignmentType]
    """Graphs of the methods that gossip."""
    every: PositiveInt = 16
    """H, local steps from one exchange to the next, for sgp-every-H and outer."""
    batch_size_per_node: PositiveInt = 8
    """Images per node and step."""
    total_batch_size: PositiveInt = 2048
    """Images of all nodes together per step."""
    steps: PositiveInt = 256
    """Steps of each run."""

    def find_batch_size(self, batch: str, nodes: int) -> int:
        """Returns the images of a node in a step."""
        return self.batch_size_per_node if batch == "per node" else self.total_batch_size // nodes

    @property
    def points(self) -> list[int]:
        """The steps after which the loss is measured: powers of 2, and the last one."""
        powers = itertools.takewhile(lambda k: k < self.steps, (2**k for k in itertools.count(2)))
        return [*powers, self.steps]


@jax.jit
def measure_average(params: Any, images: Images) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the accuracy of the average model on the test images."""
    average = average_nodes(params)
    return compute_loss(average, images.test), compute_accuracy(average, images.test)


@jax.jit
def measure_nodes(params: Any, images: Images) -> tuple[jax.Array, jax.Array]:
    """Returns the accuracy of each node's model, and the relative distance to their average."""
    watched = jax.tree.map(lambda x: x[:WATCHED], images.test)
    accuracies = jax.lax.map(lambda params: compute_accuracy(params, watched), params)
    average = average_nodes(params)
    apart = jax.tree.map(lambda x, mean: x - mean[None], params, average)
    size = optax.tree.norm(apart) / math.sqrt(len(accuracies))
    return accuracies, size / optax.tree.norm(average)


def measure(
    options: ScalingOptions,
    images: Images,
    rates: dict[tuple[str, ...], float],
    nodes: int,
    batch: str,
    method: str,
    graph: str,
) -> Record:
    """Tunes the rate with the first seed, and trains all seeds.

    `rates` keeps the best rate of each batch, method and graph.
    """
    schedule = None if graph == "none" else GRAPHS[graph](nodes)
    batch_size = options.find_batch_size(batch, nodes)

    task = make_image_task(images, HIDDEN)

    def transform(rate: Any, part: Any) -> optax.GradientTransformationExtraArgs:
        inner = task.make_optimizer(rate * hold_then_fall(part))
        return METHODS[method](schedule, inner, options.every)

    trainer = Trainer(transform, nodes, task, batch_size)
    start = jax.jit(trainer.start)
    advance = jax.jit(trainer.advance, donate_argnums=0)

    @functools.cache
    def train(rate: float, seed: int) -> Record:
        carry = start(jnp.uint32(seed))
        losses = []
        accuracy = 0.0
        for first, last in itertools.pairwise([0, *options.points]):
            carry = advance(carry, jnp.float32(rate), jnp.uint32(seed), first, last, options.steps)
            loss, accuracy = map(float, measure_average(carry[0], images))
            losses.append(loss if math.isfinite(loss) else None)
        accuracies, distance = measure_nodes(carry[0], images)
        found = float(accuracies.mean()), float(accuracies.min()), float(distance)
        fields = ("accuracy", "mean_accuracy", "worst_accuracy", "distance")
        ends = dict(zip(fields, (accuracy, *found), strict=True))
        return {"curve": losses, "loss": losses[-1]} | ends

    def find_loss(rate: float) -> float:
        loss = train(rate, options.seed[0])["loss"]
        return math.inf if loss is None else loss

    key = (batch, method, graph)
    exact = (batch, *EXACT)
    best = tune(find_loss, rates.get(key, rates.get(exact, FIRST_RATE)))
    rates[key] = best
    common = rates.get(exact, best)
    runs = [train(best, seed) for seed in options.seed]
    head = {"nodes": nodes, "batch": batch, "method": method, "graph": graph}
    gap = None if schedule is None else gx.topology.spectral_gap(schedule, per_round=True)
    tail = {"points": options.points, "curve": train(common, options.seed[0])["curve"]}
    ends = {name: [run[name] for run in runs] for name in runs[0] if name != "curve"}
    return head | {"batch_size_per_node": batch_size, "rate": best, "gap": gap} | ends | tail


def start(options: ScalingOptions) -> tuple[Iterable[Any], Callable[..., Record]]:
    """Loads the images, and lists the cells; AllReduce comes first, as others begin at its rate."""
    images = load_images(options.fashion_mnist, POOL)
    methods = sorted(options.method, key=lambda name: name != "allreduce")
    pairs = [
        (method, graph)
        for method in methods
        for graph in (("none",) if method in WITHOUT_GRAPH else options.graph)
    ]
    cells = (
        (nodes, batch, *pair)
        for nodes, batch, pair in itertools.product(options.nodes, options.batch, pairs)
    )
    return cells, functools.partial(measure, options, images, {})


def show(options: ScalingOptions, runs: Sequence[Record], out: Path) -> Table:
    """Returns a table of the average model's loss, and of the accuracies."""
    del out
    columns: dict[str, Any] = {
        "method": lambda run: run["method"] + f", {run['graph']}" * (run["gap"] is not None),
        "batch": "{batch}",
        "nodes": "{nodes}",
        "gap": lambda run: "-" if run["gap"] is None else f"{run['gap']:.2g}",
        "rate": "{rate:g}",
        "loss": lambda run: "-" if None in run["loss"] else show_seeds(run["loss"], 1, ".4f"),
        "accuracy (%)": lambda run: show_seeds(run["accuracy"], 100),
        "worst node (%)": lambda run: show_seeds(run["worst_accuracy"], 100),
        "distance": lambda run: show_seeds(run["distance"], 1, ".3f"),
    }
    caption = f"average model after {options.steps} steps, mean ± deviation over the seeds"
    return make_table("Scaling", caption, columns, runs, texts=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures all cells, and reports."""
    run_study("scaling", ScalingOptions, start, show, arguments)


if __name__ == "__main__":
    main()
