"""Measures what `join(clip=)` gains if one of 8 asynchronous nodes lies, and costs if none does.

    python -m experiments.asynchronous_liars

Real nodes on loopback, in one process, train a perceptron on 4,000 digits of MNIST, divided by
Dirichlet; each makes its steps when chance says so. A liar is a node like the others whose updates
are bad: its gradients are times 1,000, or it sets its model to the opposite or to noise. `far` are
nodes of which each starts from a model of its own, and `rejoins` is a node that leaves and comes
back. `summary.json`, in `--out`, has for each seed the test accuracies of the honest nodes, mean
and worst, of the average model at the end, and the part of the shares that was clipped.
"""

import dataclasses
import functools
import itertools
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from rich.table import Table

import gossipjax as gx
from experiments.cells import run_study
from experiments.data.sharding import split_examples
from experiments.options import OutputOptions, PositiveInt, require_different
from experiments.perceptron import (
    Images,
    compute_accuracy,
    compute_loss,
    init_perceptron,
    load_images,
)
from experiments.results import Record
from experiments.tables import make_table

Case = Literal["honest", "far", "rejoins", "shouts", "sign flip", "noise"]
ALGORITHMS = {
    "sgp": lambda seed: gx.asynchronous.sgp(graph="random", seed=seed),
    "outer": lambda seed: gx.asynchronous.outer(10, seed=seed),
}
NODES = 8
BATCH = 32
HIDDEN = 32
RATE = 0.1
SGD = optax.sgd(RATE)
ALL_AT_ONCE = optax.sgd(1.0)  # of a liar, whose gradient is its model less its lie


@dataclasses.dataclass(frozen=True)
class LiarsOptions(OutputOptions):
    """Measures what clipping gains and costs among asynchronous nodes."""

    case: tuple[Case, ...] = ("honest", "far", "rejoins", "shouts", "sign flip", "noise")
    """What is special: nothing, the starts, a node that comes back, or how node 3 lies."""
    algorithm: tuple[Literal["sgp", "outer"], ...] = ("sgp", "outer")
    """The algorithms of the nodes."""
    clip: tuple[float, ...] = (0.0, 1.0, 3.0)
    """Values of `join(clip=)`; 0 is None."""
    alpha: tuple[float, ...] = (1.0,)
    """How alike the data of the nodes are."""
    seeds: PositiveInt = 3
    """Number of seeds, from 0 on."""
    steps: PositiveInt = 200
    """Steps of each node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "case", "algorithm", "clip", "alpha")


def gradients(params: Any, batch: Any, number: Any) -> Any:
    """The gradients of an honest node."""
    return jax.grad(compute_loss)(params, batch), number


def shout(params: Any, batch: Any, number: Any) -> Any:
    """Gradients that are a thousand times too large."""
    return optax.tree.scale(1000.0, gradients(params, batch, number)[0]), number


def flip(params: Any, batch: Any, number: Any) -> Any:
    """The way from the opposite of a model to the model."""
    del batch
    return optax.tree.scale(2.0, params), number


def make_noise(params: Any, batch: Any, number: Any) -> Any:
    """The way from noise of variance 1 to a model."""
    del batch
    noise = optax.tree.random_like(jax.random.key(number), params, jax.random.normal)
    return optax.tree.sub(params, noise), number


LIES = {
    "shouts": (SGD, shout),
    "sign flip": (ALL_AT_ONCE, flip),
    "noise": (ALL_AT_ONCE, make_noise),
}
LIAR = 3


def measure(
    options: LiarsOptions, images: Images, case: str, name: str, clip: float, alpha: float
) -> Record:
    """Trains a job for each seed."""
    jobs = [train(options, images, case, name, clip, alpha, seed) for seed in range(options.seeds)]
    head = {"case": case, "algorithm": name, "clip": clip, "alpha": alpha}
    return head | {field: [100 * job[field] for job in jobs] for field in FIGURES}


def train(
    options: LiarsOptions,
    images: Images,
    case: str,
    name: str,
    clip: float,
    alpha: float,
    seed: int,
) -> Record:
    """Trains one job."""
    pixels, labels = map(np.asarray, images.train)
    parts = split_examples(labels, NODES, alpha, seed)
    rng = random.Random(seed)
    draw = np.random.default_rng(seed)
    secret = secrets.token_hex(32)
    nodes: dict[int, Any] = {}

    def join(place: int) -> None:
        nodes[place] = gx.asynchronous.join(
            LIES[case][0] if case in LIES and place == LIAR else SGD,
            init_perceptron(
                jax.random.key(seed + (100 * place if case == "far" else 0)), images.pixels, HIDDEN
            ),
            algorithm=ALGORITHMS[name](seed),
            address=[node.address for node in nodes.values()],
            place=place,
            secret=secret,
            patience=3.0,
            is_founder=len(nodes) == place,
            clip=clip or None,
        )

    for place in range(NODES):
        join(place)
    turns = [place for place in range(NODES) for _ in range(options.steps)]
    rng.shuffle(turns)
    for turn, place in enumerate(turns):
        if case == "rejoins" and turn == len(turns) // 2:
            nodes.pop(LIAR).leave()
        if case == "rejoins" and turn == len(turns) * 5 // 8:
            join(LIAR)
            nodes[LIAR].wait_for_mass()
        if place in nodes:
            rows = draw.choice(parts[place], BATCH)
            lies = case in LIES and place == LIAR
            batch = (pixels[rows], labels[rows])
            nodes[place].step(LIES[case][1] if lies else gradients, batch, turn)
    honest = [node for place, node in nodes.items() if not (case in LIES and place == LIAR)]

    accuracies = [float(compute_accuracy(node.params, images.test)) for node in honest]
    clipped = sum(
        n for node in honest for text, n in node.statistics.dropped.items() if "clip" in text
    )
    sent = sum(node.statistics.sent for node in nodes.values()) * len(honest) / len(nodes)
    with ThreadPoolExecutor(len(nodes)) as pool:
        average = next(iter(pool.map(lambda node: node.average(), nodes.values())))
    for node in nodes.values():
        node.leave()
    last = float(compute_accuracy(average, images.test))
    found = (float(np.mean(accuracies)), min(accuracies), last, clipped / sent)
    return dict(zip(FIGURES, found, strict=True))


COLUMNS = ("case", "algorithm", "clip", "alpha")
FIGURES = ("mean", "worst", "average", "clipped")


def start(options: LiarsOptions) -> tuple[Iterable[Any], Callable[..., Record]]:
    """Loads the digits, and lists the cells."""
    cells = itertools.product(options.case, options.algorithm, options.clip, options.alpha)
    return cells, functools.partial(measure, options, load_images(None))


def show(options: LiarsOptions, runs: Sequence[Record], out: Path) -> Table:
    """Returns a table of all figures, with their range over the seeds."""
    del out

    def show_range(name: str, run: Record) -> str:
        values = run[name]
        return f"{np.mean(values):.1f} ({min(values):.1f}-{max(values):.1f})"

    columns: dict[str, Any] = {key: f"{{{key}}}" for key in COLUMNS} | {
        f"{name} (%)": functools.partial(show_range, name) for name in FIGURES
    }
    caption = f"mean over {options.seeds} seeds, and their range"
    return make_table("Asynchronous liars", caption, columns, runs, texts=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures all cells, and reports."""
    run_study("asynchronous_liars", LiarsOptions, start, show, arguments)


if __name__ == "__main__":
    main()
