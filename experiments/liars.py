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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console

import gossipjax as gx
from experiments import results
from experiments.data.images import Dataset, load
from experiments.data.sharding import draw_batches, split_examples
from experiments.options import (
    NonNegativeInt,
    OutputOptions,
    PositiveFloat,
    PositiveInt,
    parse_arguments,
    require_different,
)
from experiments.program import exit_on_error
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


def measure(options: LiarsOptions, data: Dataset, graph: Graph, rule: str, attack: str) -> Record:
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
    model = nn.Sequential(
        [lambda x: x.reshape(len(x), -1), nn.Dense(HIDDEN), nn.relu, nn.Dense(10)]
    )

    def gradients(params: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits: Any = model.apply(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return grads, value

    def start(seed: jax.Array) -> Any:
        return nodes.init(tx, lambda: model.init(jax.random.key(seed), jnp.zeros((1, *data.shape))))

    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    params, opt_state = jax.vmap(start)(jnp.arange(options.seeds))
    batches = [
        draw_batches(
            split_examples(data.train_labels, nodes.size, options.dirichlet_alpha, seed),
            BATCH,
            seed,
        )
        for seed in range(options.seeds)
    ]
    for step in range(0, options.steps, CHUNK):
        rows = np.array([[next(rows) for _ in range(CHUNK)] for rows in batches])
        scan = jax.vmap(functools.partial(train_step.scan, step))
        inputs = data.train_images[rows], data.train_labels[rows]
        params, opt_state, _ = scan(params, opt_state, *inputs)
    logits = jax.jit(jax.vmap(jax.vmap(lambda params: model.apply(params, data.test_images))))(
        params
    )
    accuracy = np.mean(np.asarray(logits).argmax(-1) == data.test_labels, axis=-1)[
        :, :honest
    ]  # [S, honest]
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs all cells, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(LiarsOptions, "experiments.liars", arguments)
        out = results.create_run_dir("liars", options.out, options.overwrite)
        data = load("mnist5k")
        console = Console()
        cells = list(itertools.product(options.graph, options.rule, options.attack))
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("liars", total=len(cells), status="")
            for cell in cells:
                bar.update(task, status=", ".join(cell))
                runs.append(measure(options, data, *cell))
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
                bar.advance(task)
        draw(runs, out / "worst.png")
        columns = {key: f"{{{key}}}" for key in KEYS} | {
            f"{name} (%)": functools.partial(_show, f"{name}_accuracy")
            for name in ("mean", "worst")
        }
        caption = f"accuracy of honest nodes: mean ± deviation over {options.seeds} seeds"
        console.print(make_table("Liars", caption, columns, runs, texts=3))


def _show(field: str, run: Record) -> str:
    values = run[field]
    spread = f" ± {100 * np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{100 * np.mean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
