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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import gossipjax as gx
from experiments import results
from experiments.data.images import Dataset, load
from experiments.data.sharding import split_examples
from experiments.options import OutputOptions, PositiveInt, parse_arguments, require_different
from experiments.program import exit_on_error
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


def make_params(seed: int) -> Any:
    """Draws a perceptron."""
    keys = jax.random.split(jax.random.key(seed))
    scale = jax.nn.initializers.he_normal()
    layers = zip(keys, ((784, HIDDEN), (HIDDEN, 10)), strict=True)
    return [(scale(key, shape), jnp.zeros(shape[1])) for key, shape in layers]


def predict(params: Any, images: jax.Array) -> jax.Array:
    """Returns the logits of each image."""
    (a, b), (c, d) = params
    return jax.nn.relu(images.reshape(len(images), -1) @ a + b[None]) @ c + d[None]


def find_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss."""
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradients(params: Any, images: jax.Array, labels: jax.Array, number: Any) -> Any:
    """The gradients of an honest node."""
    return jax.grad(find_loss)(params, images, labels), number


def shout(params: Any, images: jax.Array, labels: jax.Array, number: Any) -> Any:
    """Gradients that are a thousand times too large."""
    return optax.tree.scale(1000.0, gradients(params, images, labels, number)[0]), number


def flip(params: Any, images: jax.Array, labels: jax.Array, number: Any) -> Any:
    """The way from the opposite of a model to the model."""
    del images, labels
    return optax.tree.scale(2.0, params), number


def make_noise(params: Any, images: jax.Array, labels: jax.Array, number: Any) -> Any:
    """The way from noise of variance 1 to a model."""
    del images, labels
    noise = optax.tree.random_like(jax.random.key(number), params, jax.random.normal)
    return optax.tree.sub(params, noise), number


LIES = {
    "shouts": (SGD, shout),
    "sign flip": (ALL_AT_ONCE, flip),
    "noise": (ALL_AT_ONCE, make_noise),
}
LIAR = 3


def measure(
    options: LiarsOptions, data: Dataset, case: str, name: str, clip: float, alpha: float, seed: int
) -> Record:
    """Trains one job."""
    labels = np.asarray(data.train_labels)
    parts = split_examples(labels, NODES, alpha, seed)
    rng = random.Random(seed)
    draw = np.random.default_rng(seed)
    secret = secrets.token_hex(32)
    nodes: dict[int, Any] = {}

    def join(place: int) -> None:
        nodes[place] = gx.asynchronous.join(
            LIES[case][0] if case in LIES and place == LIAR else SGD,
            make_params(seed + (100 * place if case == "far" else 0)),
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
            nodes[place].step(
                LIES[case][1] if lies else gradients,
                data.train_images[rows], labels[rows], turn,
            )  # fmt: skip
    honest = [node for place, node in nodes.items() if not (case in LIES and place == LIAR)]

    def count(params: Any) -> float:
        logits = predict(params, jnp.asarray(data.test_images))
        return float((logits.argmax(-1) == jnp.asarray(data.test_labels)).mean())

    accuracies = [count(node.params) for node in honest]
    clipped = sum(
        n for node in honest for text, n in node.statistics.dropped.items() if "clip" in text
    )
    sent = sum(node.statistics.sent for node in nodes.values()) * len(honest) / len(nodes)
    with ThreadPoolExecutor(len(nodes)) as pool:
        average = next(iter(pool.map(lambda node: node.average(), nodes.values())))
    for node in nodes.values():
        node.leave()
    return {
        "case": case, "algorithm": name, "clip": clip, "alpha": alpha, "seed": seed,
        "mean": float(np.mean(accuracies)), "worst": min(accuracies), "average": count(average),
        "clipped": clipped / sent,
    }  # fmt: skip


COLUMNS = ("case", "algorithm", "clip", "alpha")
FIGURES = ("mean", "worst", "average", "clipped")


def _show(name: str, run: results.Record) -> str:
    values = run[name]
    return f"{np.mean(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs all cells, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(LiarsOptions, "experiments.asynchronous_liars", arguments)
        out = results.create_run_dir("asynchronous_liars", options.out, options.overwrite)
        data = load("mnist5k")
        console = Console()
        cells = list(
            itertools.product(options.case, options.algorithm, options.clip, options.alpha)
        )
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("asynchronous liars", total=len(cells), status="")
            for cell in cells:
                bar.update(task, status=", ".join(map(str, cell)))
                seeds = [measure(options, data, *cell, seed) for seed in range(options.seeds)]
                figures = {name: [100 * one[name] for one in seeds] for name in FIGURES}
                runs.append(dict(zip(COLUMNS, cell, strict=True)) | figures)
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
                bar.advance(task)
        columns: dict[str, Any] = {key: f"{{{key}}}" for key in COLUMNS} | {
            f"{name} (%)": functools.partial(_show, name) for name in FIGURES
        }
        caption = f"mean over {options.seeds} seeds, and their range"
        console.print(make_table("Asynchronous liars", caption, columns, runs, texts=2))


if __name__ == "__main__":
    main()
