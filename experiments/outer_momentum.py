"""Asks of outer optimizers: is momentum more than a larger rate, if nodes average often?

    python -m experiments.outer_momentum --fashion-mnist FOLDER

Simulated nodes train a small task, average their models after every H steps, and take an outer step
of SGD with Nesterov momentum from the last average (`gx.outer`, DiLoCo). The grid has several H,
outer momentums mu and outer rates eta; all rates and seeds of a cell are one program. The inner
optimizer has the rate that is best without an outer step, `--learning-rate`, constant for three
quarters of the steps, and then falling to 0.

If `rho` is the correlation of successive outer gradients, an outer gradient moves the model by
`eta (1 + mu / (1 - mu rho))` times itself, with what momentum adds later: the effective rate.
`gx.diagnostics.monitor_outer_gradient` measures `rho`, as the cosine. The program takes the mean
over the second half of the run.

`runs` of `summary.json`, in `--out`, have for each rate and seed the final loss of the average
model, None if it diverged, and the mean cosine and norm of its outer gradients. `losses.png` draws
the loss over the outer rate and over the effective rate.
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
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.table import Table

import gossipjax as gx
from experiments.cells import run_study, show_seeds
from experiments.options import Fraction, PositiveFloat, PositiveInt
from experiments.results import Record
from experiments.simulated import (
    SimulatedOptions,
    Task,
    Trainer,
    average_nodes,
    hold_then_fall,
    make_task,
)
from experiments.tables import make_table

HIDDEN = 32
POOL = 2  # of 28 pixels 14 are left
RATES = tuple(2.0 ** (k / 2) for k in range(-8, 4))


@dataclasses.dataclass(frozen=True)
class OuterMomentumOptions(SimulatedOptions):
    """Compares outer momentum with larger outer rates, for averages after every H steps."""

    GRID = ("every", "momentum", "outer_rate")
    task: Literal["image", "language"] = "image"
    """What nodes learn: to classify images, or to predict Python's manual, which is installed."""
    every: tuple[PositiveInt, ...] = (4, 16, 64)
    """H, steps from one average to the next."""
    momentum: tuple[Fraction, ...] = (0.0, 0.5, 0.9)
    """Momentums of the outer optimizer."""
    outer_rate: tuple[PositiveFloat, ...] = RATES
    """Rates of the outer optimizer."""
    learning_rate: PositiveFloat = 0.1
    """Rate of the inner optimizer."""
    nodes: PositiveInt = 8
    """Number of simulated nodes."""
    steps: PositiveInt = 1024
    """Steps of each run."""


def measure(options: OuterMomentumOptions, task: Task, every: int, momentum: float) -> Record:
    """Trains all rates and seeds in one program."""

    def transform(rate: Any, part: Any) -> optax.GradientTransformationExtraArgs:
        inner = task.make_optimizer(options.learning_rate * hold_then_fall(part))
        monitor = gx.diagnostics.monitor_outer_gradient()
        sgd = optax.sgd(rate, momentum=momentum, nesterov=True)
        return gx.outer(inner, optax.chain(monitor, sgd), every=every)

    trainer = Trainer(transform, options.nodes, task, options.batch_size_per_node)
    each = jax.vmap(trainer.advance, (0, 0, 0, None, None, None))
    advance_all = jax.jit(each, donate_argnums=0)
    shape = len(options.outer_rate), len(options.seed)
    rates = jnp.repeat(jnp.array(options.outer_rate, jnp.float32), shape[1])
    seeds = jnp.tile(jnp.array(options.seed, jnp.uint32), shape[0])
    carry = jax.jit(jax.vmap(trainer.start))(seeds)
    found: dict[str, list[np.ndarray]] = {"norm": [], "cosine": []}
    for first in range(0, options.steps, every):
        last = min(first + every, options.steps)
        carry = advance_all(carry, rates, seeds, first, last, options.steps)
        for name, values in found.items():
            values.append(np.asarray(optax.tree.get(carry[1], name))[:, 0].reshape(shape))
    averages = jax.vmap(average_nodes)(carry[0])
    losses = jax.jit(jax.vmap(lambda params: task.compute_loss(params, task.watched)))(averages)
    half = options.steps // every // 2
    means = {name: np.mean(values[half:], axis=0) for name, values in found.items()}
    return {"every": every, "momentum": momentum, "outer_rate": list(options.outer_rate)} | {
        name: [[float(x) if math.isfinite(x) else None for x in row] for row in values]
        for name, values in (means | {"loss": np.asarray(losses).reshape(shape)}).items()
    }


def start(options: OuterMomentumOptions) -> tuple[Iterable[Any], Callable[..., Record]]:
    """Loads the task, and lists the cells."""
    task = make_task(options.task, HIDDEN, options.fashion_mnist, POOL)
    cells = itertools.product(options.every, options.momentum)
    return cells, functools.partial(measure, options, task)


def list_rows(runs: Iterable[Record]) -> list[Record]:
    """Returns a row for each H, momentum and rate of which no seed has diverged."""
    rows = []
    for run in runs:
        lists = (run[name] for name in ("outer_rate", "loss", "cosine", "norm"))
        for rate, losses, cosines, norms in zip(*lists, strict=True):
            if None not in losses and None not in cosines:
                rho = float(np.mean(cosines))
                row = {"every": run["every"], "momentum": run["momentum"], "outer_rate": rate}
                effective = gx.diagnostics.effective_rate(rate, run["momentum"], rho)
                found = {"cosine": rho, "norm": float(np.mean(norms)), "effective": effective}
                rows.append(row | found | {"loss": losses})
    return rows


def pick_best(rows: Sequence[Record]) -> list[Record]:
    """Returns the row of the smallest mean loss for each H and momentum."""
    rows = sorted(rows, key=lambda row: float(np.mean(row["loss"])))
    best: dict[tuple[int, float], Record] = {}
    for row in rows:
        best.setdefault((row["every"], row["momentum"]), row)
    return [best[key] for key in sorted(best)]


def draw(rows: Sequence[Record], figure: Figure) -> None:
    """Draws losses over the outer rate, above, and over the effective rate, below, for each H."""
    columns = sorted({row["every"] for row in rows})
    figure.set_size_inches(1 + 2.6 * len(columns), 5.2)
    panels = figure.subplots(2, len(columns), squeeze=False, sharey="col")
    names = {"outer_rate": "outer rate", "effective": "effective rate"}
    for (line, (field, title)), (column, every) in itertools.product(
        enumerate(names.items()), enumerate(columns)
    ):
        axes = panels[line][column]
        for momentum in sorted({row["momentum"] for row in rows}):
            chosen = [r for r in rows if (r["every"], r["momentum"]) == (every, momentum)]
            points = sorted((row[field], float(np.mean(row["loss"]))) for row in chosen)
            axes.plot(*zip(*points, strict=True), "o-", ms=3, label=f"momentum {momentum:g}")
        losses = [float(np.mean(row["loss"])) for row in rows if row["every"] == every]
        lowest = min(losses)
        axes.set(xscale="log", xlabel=title, ylim=(lowest - 0.02, lowest + 0.3))
        if not line:
            axes.set_title(f"H = {every}")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("loss of the average model")
    panels[1][0].set_ylabel("loss of the average model")
    panels[0][0].legend(fontsize=8)


def show(options: OuterMomentumOptions, runs: Sequence[Record], out: Path) -> Table:
    """Draws the figure, and returns a table of the best rates."""
    rows = list_rows(runs)
    figure = Figure(layout="constrained")
    draw(rows, figure)
    figure.savefig(out / "losses.png", dpi=120)
    columns: dict[str, Any] = {
        "H": "{every}",
        "momentum": "{momentum:g}",
        "best rate": "{outer_rate:.3g}",
        "effective": "{effective:.3g}",
        "cosine": "{cosine:.2f}",
        "norm": "{norm:.3f}",
        "loss": lambda row: show_seeds(row["loss"], 1, ".4f"),
    }
    caption = f"average model after {options.steps} steps, mean ± deviation over the seeds"
    return make_table("Best outer rates", caption, columns, pick_best(rows), texts=0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures all cells, and reports."""
    run_study("outer_momentum", OuterMomentumOptions, start, show, arguments)


if __name__ == "__main__":
    main()
