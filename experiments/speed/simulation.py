"""Many nodes on one machine: images per second beside one plain optax loop of the same batch.

    python -m experiments.speed simulation --nodes 8 32 64 128

Trains the small CNN on random images: by SGP over N nodes, each with its own model, and one model
by plain optax on the batch of all nodes together. The two take turns, round by round, so that noise
hits both alike. It writes `summary.json`, with `runs`, into `--out`, and prints the table.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import methods, models, results, training

ROUNDS = 7  # of turns, of which the median is taken


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the simulation's measurement."""

    nodes: tuple[int, ...] = (8, 32, 64, 128)
    """Number of simulated nodes: one or several."""
    algorithm: str = "sgp"
    """ALGORITHM or ALGORITHM@TOPOLOGY, as of experiments.image."""
    batch_per_node: int = 32
    """Images per node and step."""
    steps: int = 5
    """Steps of one turn."""
    where: training.Where = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        for name in ("batch_per_node", "steps"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is at least 1, not {value}.")
        if not self.nodes or min(self.nodes) < 1:
            raise ValueError(f"--nodes is at least 1, not {' '.join(map(str, self.nodes))}.")


def simulation(options: Options) -> None:
    """Images per second of simulated nodes, beside one plain loop."""
    if options.where != "vmap":
        training.request_cpu_devices(max(options.nodes, default=1))
    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)
    try:
        chosen = [
            methods.method(options.algorithm, methods.Setting(nodes), optimizer)
            for nodes in options.nodes
        ]
        placements = [training.place(options.where, nodes) for nodes in options.nodes]
        out = results.claim_folder("simulation", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    console, runs = Console(), []
    with results.progress_bar(console) as bar:
        task = bar.add_task("simulation", total=len(options.nodes), status="")
        for nodes, method, placement in zip(options.nodes, chosen, placements, strict=True):
            bar.update(task, status=f"{nodes} nodes")
            runs.append(measure(options, nodes, method, optimizer, placement))
            bar.advance(task)
            results.write_summary(out, dataclasses.asdict(options), {}, runs)
    console.print(table(runs))


def loss(model: models.SmallCNN, params: Any, batch: Any) -> jax.Array:
    """The cross-entropy of one batch of images and labels."""
    images, labels = batch
    logits: Any = model.apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def images(nodes: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless random batches `[N, B, 28, 28, 1]`, of four that are made once."""
    rng = np.random.default_rng(0)
    made = [
        (
            rng.normal(size=(nodes, batch, 28, 28, 1)).astype(np.float32),
            rng.integers(0, 10, (nodes, batch), dtype=np.int32),
        )
        for _ in range(4)
    ]
    yield from itertools.cycle(made)


def measure(
    options: Options,
    nodes: int,
    method: methods.Method,
    optimizer: optax.GradientTransformation,
    placement: training.Placement,
) -> dict[str, Any]:
    """Both loops in turns: the object in `runs`."""
    model = models.SmallCNN()
    start = model.init(jax.random.key(0), np.zeros((1, 28, 28, 1), np.float32))["params"]
    trainer = training.Trainer(
        method,
        lambda params, statistics, batch: (loss(model, params, batch), statistics),
        placement,
        start,
        images(nodes, options.batch_per_node),
    )
    trainer.warm_up()

    @jax.jit
    def plain(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss, 1)(model, params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.asarray, start), optimizer.init(start)
    batches = training.ahead(
        jax.tree.map(lambda x: jnp.asarray(x.reshape(-1, *x.shape[2:])), batch)
        for batch in images(nodes, options.batch_per_node)
    )
    params, state = jax.block_until_ready(plain(params, state, next(batches)))
    simulated_seconds, plain_seconds = [], []
    for turn in range(ROUNDS):
        first = turn * options.steps
        simulated_seconds.append(trainer.advance(range(first, first + options.steps))[1])
        began = time.perf_counter()
        for _ in range(options.steps):
            params, state = plain(params, state, next(batches))
        jax.block_until_ready(params)
        plain_seconds.append(time.perf_counter() - began)
    per_turn = options.steps * nodes * options.batch_per_node
    ratios = np.divide(plain_seconds, simulated_seconds)
    return {
        "algorithm": method.algorithm,
        "topology": method.topology,
        "nodes": nodes,
        "placement": placement.words,
        "images_per_second": per_turn / float(np.median(simulated_seconds)),
        "plain_images_per_second": per_turn / float(np.median(plain_seconds)),
        "ratio": float(np.median(ratios)),
        "ratio_10": float(np.quantile(ratios, 0.1)),
        "ratio_90": float(np.quantile(ratios, 0.9)),
    }


def table(runs: list[dict[str, Any]]) -> Table:
    """A row per number of nodes."""
    result = Table(box=SIMPLE_HEAD, title="Images per second, all nodes together")
    for header in ("nodes", "simulated", "one model,\none batch", "ratio", "10-90 %"):
        result.add_column(header, justify="right", no_wrap=True)
    result.add_column("where")
    for run in runs:
        result.add_row(
            f"{run['nodes']}",
            f"{run['images_per_second']:,.0f}",
            f"{run['plain_images_per_second']:,.0f}",
            f"{run['ratio']:.2f}",
            f"{run['ratio_10']:.2f}-{run['ratio_90']:.2f}",
            run["placement"],
        )
    return result
