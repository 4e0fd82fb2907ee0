"""Simulates nodes that lie, and measures how accurate the honest nodes become with each rule.

    python -m experiments.liars

`--honest` nodes train a perceptron on 5,000 digits of MNIST, divided by Dirichlet. They are linked
as two worlds (two cliques, with a link from each node to one of the other) or as an Erdos-Renyi
graph. Every honest node also hears all `--liars`, which send lies of one kind; see
`gx.faults.Lying`. All seeds of a cell are one program. `summary.json`, in `--out`, has the mean and
the worst test accuracy of the honest nodes of each seed; `worst.png` draws the worst.

References:
  Gaucher, Dieuleveut, Hendrikx, "Unified Breakdown Analysis for Byzantine Robust Gossip", ICML
  2025, arXiv:2410.10418, section 6, after which graphs, weights and attacks are chosen.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table

import gossipjax as gx
from experiments.cells import run_study, show_seeds
from experiments.data.sharding import draw_batches, split_examples
from experiments.options import (
    NonNegativeInt,
    OutputOptions,
    PositiveFloat,
    PositiveInt,
    require_different,
)
from experiments.perceptron import (
    Images,
    compute_accuracy,
    compute_loss,
    init_perceptron,
    load_images,
)
from experiments.results import Record
from experiments.tables import make_table

Graph = Literal["two worlds", "erdos-renyi"]
RuleName = Literal[
    "average", "ClippedGossip", "ClippedSum", "NearestNeighbors", "TrimmedMean",
    "CoordinateMedian",
]  # fmt: skip
Attack = Literal["none", "sign flip", "alie", "inner product", "dissensus"]

# (liars, their weight at a node) -> rule
RULES: dict[str, Callable[[int, float], Any]] = {
    "average": lambda liars, weight: gx.contrib.ClippedGossip(radius=math.inf),
    "ClippedGossip": lambda liars, weight: gx.contrib.ClippedGossip(liar_weight=weight),
    "ClippedSum": lambda liars, weight: gx.contrib.ClippedSum(weight),
    "NearestNeighbors": lambda liars, weight: gx.contrib.NearestNeighbors(weight),
    "TrimmedMean": lambda liars, weight: gx.contrib.TrimmedMean(liars),
    "CoordinateMedian": lambda liars, weight: gx.contrib.CoordinateMedian(),
}
STRENGTHS = {"sign flip": 1.0, "alie": 1.5, "inner product": 0.5, "dissensus": 1.5}
LINKED = 0.4  # probability of an edge of the Erdos-Renyi graph
HIDDEN = 16  # of the perceptron
BATCH = 32
CHUNK = 20  # steps of a program


@dataclasses.dataclass(frozen=True)
class LiarsOptions(OutputOptions):
    """Simulates nodes that lie, and measures how accurate the honest nodes become."""

    graph: tuple[Graph, ...] = ("two worlds", "erdos-renyi")
    """Graphs of the honest nodes."""
    rule: tuple[RuleName, ...] = tuple(RULES)  # pyright: ignore[reportAssignmentType]
    """What the honest nodes make of what they hear."""
    attack: tuple[Attack, ...] = ("none", *STRENGTHS)  # pyright: ignore[reportAssignmentType]
    """What the liars send; with `none` they do not lie."""
    honest: PositiveInt = 16
    """Number of honest nodes, even."""
    liars: NonNegativeInt = 2
    """Number of liars, whom every honest node hears."""
    seeds: PositiveInt = 3
    """Number of seeds, from 0 on."""
    steps: PositiveInt = 100
    """Steps of each run."""
    learning_rate: PositiveFloat = 0.3
    """The rate of SGD, on a running mean of gradients with factor 0.9."""
    dirichlet_alpha: PositiveFloat = 5.0
    """How alike the data of the nodes are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "graph", "rule", "attack")


def make_schedule(graph: Graph, honest: int, liars: int) -> gx.Schedule:
    """Links honest nodes as a graph, and all of them with each liar; Metropolis weights.

    >>> make_schedule("two worlds", 4, 1).matrices()[0][0].round(2).tolist()
    [0.3, 0.25, 0.25, 0.0, 0.2]
    """
    if graph == "two worlds":
        half = honest // 2
        links = nx.disjoint_union(nx.complete_graph(half), nx.complete_graph(honest - half))
        links.add_edges_from((i, half + i) for i in range(half))
    else:
        draws = (nx.erdos_renyi_graph(honest, LINKED, seed=seed) for seed in itertools.count())
        links = next(draw for draw in draws if nx.is_connected(draw))
    links.add_edges_from((i, honest + j) for i in range(honest) for j in range(liars))
    return gx.topology.from_graph(links, weights="metropolis")


def measure(options: LiarsOptions, images: Images, graph: Graph, rule: str, attack: str) -> Record:
    """Trains all seeds in one program; returns the accuracies of the honest nodes."""
    honest = options.honest
    liars = options.liars
    schedule = make_schedule(graph, honest, liars)
    nodes = gx.Nodes(honest + liars)
    weight = float(schedule.matrices()[0][:honest, honest:].sum(axis=1).max())
    chosen = RULES[rule](liars, weight)
    if attack != "none":
        lying = tuple(range(honest, honest + liars))
        chosen = gx.faults.Lying(chosen, lying, attack, STRENGTHS[attack])  # pyright: ignore[reportArgumentType]
    tx = optax.chain(
        optax.ema(0.9, debias=False),
        optax.sgd(options.learning_rate),
        gx.contrib.robust_gossip(schedule, chosen),
    )

    def gradients(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(compute_loss)(params, batch)
        return grads, value

    def start(seed: jax.Array) -> Any:
        key = jax.random.key(seed)
        return nodes.init(tx, lambda: init_perceptron(key, images.pixels, HIDDEN))

    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    seeds = range(options.seeds)
    params, opt_state = jax.vmap(start)(jnp.arange(options.seeds))
    pixels, labels = map(np.asarray, images.train)
    parts = [split_examples(labels, nodes.size, options.dirichlet_alpha, seed) for seed in seeds]
    batches = [draw_batches(part, BATCH, seed) for part, seed in zip(parts, seeds, strict=True)]
    for step in range(0, options.steps, CHUNK):
        rows = np.array([[next(rows) for _ in range(CHUNK)] for rows in batches])
        batch = (pixels[rows], labels[rows])
        scan = jax.vmap(functools.partial(train_step.scan, step))
        params, opt_state, _ = scan(params, opt_state, batch)
    one = functools.partial(compute_accuracy, batch=images.test)
    accuracy = np.asarray(jax.jit(jax.vmap(jax.vmap(one)))(params))[:, :honest]  # [S, honest]
    return {"graph": graph, "rule": rule, "attack": attack, "liar_weight": weight} | {
        "mean_accuracy": accuracy.mean(axis=1).tolist(),
        "worst_accuracy": accuracy.min(axis=1).tolist(),
    }


def draw(runs: Sequence[Record], path: Path) -> None:
    """Draws the worst accuracy of an honest node, mean over the seeds: rules by attacks."""
    graphs, rules, attacks = (list(dict.fromkeys(run[key] for run in runs)) for key in KEYS)
    figure = Figure((1 + 4.6 * len(graphs), 1.6 + 0.42 * len(rules)), layout="constrained")
    figure.suptitle("Test accuracy of the worst honest node (%), mean over the seeds")
    panels = figure.subplots(1, len(graphs), squeeze=False, sharey=True)[0]
    for graph, axes in zip(graphs, panels, strict=True):
        cells = {
            (run["rule"], run["attack"]): 100 * np.mean(run["worst_accuracy"])
            for run in runs
            if run["graph"] == graph
        }
        table = np.array(
            [[cells.get((rule, attack), np.nan) for attack in attacks] for rule in rules]
        )
        axes.imshow(table, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axes.set(title=graph, xlabel="attack", xticks=range(len(attacks)), yticks=range(len(rules)))
        axes.set_xticklabels(attacks, rotation=20)
        axes.set_yticklabels(rules)
        for (row, column), value in np.ndenumerate(table):
            color = "black" if value > 60 else "white"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color)
    panels[0].set_ylabel("rule")
    figure.savefig(path, dpi=120)


KEYS = ("graph", "rule", "attack")


def start(options: LiarsOptions) -> tuple[Iterable[Any], Callable[..., Record]]:
    """Loads the digits, and lists the cells."""
    cells = itertools.product(options.graph, options.rule, options.attack)
    return cells, functools.partial(measure, options, load_images(None))


def show(options: LiarsOptions, runs: Sequence[Record], out: Path) -> Table:
    """Draws the figure, and returns a table of the accuracies."""
    draw(runs, out / "worst.png")
    columns: dict[str, Any] = {key: f"{{{key}}}" for key in KEYS} | {
        "mean (%)": lambda run: show_seeds(run["mean_accuracy"], 100),
        "worst (%)": lambda run: show_seeds(run["worst_accuracy"], 100),
    }
    caption = f"accuracy of honest nodes: mean ± deviation over {options.seeds} seeds"
    return make_table("Liars", caption, columns, runs, texts=3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures all cells, and reports."""
    run_study("liars", LiarsOptions, start, show, arguments)


if __name__ == "__main__":
    main()
