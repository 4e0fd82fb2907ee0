"""Asks of outer optimizers: is momentum more than a larger rate, if nodes average often?

    python -m experiments.outer_momentum --fashion-mnist FOLDER

Simulated nodes train a small task, average their models after every H steps, and take an outer step
of SGD with Nesterov momentum from the last average (`gx.outer`, DiLoCo). The grid has several H,
outer momentums mu and outer rates eta; all rates and seeds of a cell are one program. The inner
optimizer has the rate that is best without an outer step, `--learning-rate`, constant for three
quarters of the steps, and then falling to 0.

If `rho` is the correlation of successive outer gradients, an outer gradient moves the model by
`eta (1 + mu / (1 - mu rho))` times itself, with what momentum adds later: the effective rate.
`gx.diagnostics.outer_gradients` measures `rho`, as the cosine; the program takes the mean over the
second half of the run.

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
from experiments.options import (
    OpenFraction,
    OptionalPath,
    OutputOptions,
    PositiveFloat,
    PositiveInt,
    Seed,
    require_different,
)
from experiments.results import Record
from experiments.simulated import Task, average_nodes, hold_then_fall, make_task, make_trainer
from experiments.tables import make_table

HIDDEN = 32
RATES = tuple(2.0 ** (k / 2) for k in range(-8, 4))


@dataclasses.dataclass(frozen=True)
class OuterMomentumOptions(OutputOptions):
    """Compares outer momentum with larger outer rates, for averages after every H steps."""

    task: Literal["image", "language"] = "image"
    """What nodes learn: to classify images, or to predict Python's manual, which is installed."""
    every: tuple[PositiveInt, ...] = (4, 16, 64)
    """H, steps from one average to the next."""
    momentum: tuple[Literal[0.0, 0.5, 0.9], ...] = (0.0, 0.5, 0.9)
    """Momentums of the outer optimizer."""
    outer_rate: tuple[PositiveFloat, ...] = RATES
    """Rates of the outer optimizer."""
    learning_rate: PositiveFloat = 0.1
    """Rate of the inner optimizer."""
    nodes: PositiveInt = 8
    """Number of simulated nodes."""
    batch_size_per_node: PositiveInt = 32
    """Images, or sequences of 32 tokens, per node and step."""
    steps: PositiveInt = 1024
    """Steps of each run."""
    fashion_mnist: OptionalPath = None
    """Folder with the four files of Fashion-MNIST. Without the folder, nodes train on 4,000 MNIST
    digits.
    """
    seed: tuple[Seed, ...] = (0, 1, 2)
    """One or several seeds for models and batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "every", "momentum", "outer_rate", "seed")
