"""A training program with a sleep in each step: simulated computation, not on this machine's cores.

python -m experiments.fault_injection.slow image --step-seconds 0.05 ...
"""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import image, language
from experiments.options import PositiveFloat
from experiments.sleep import compute_one
from experiments.training.main import run_program
from experiments.training.task import Variables

# Environment variables of a process: how many times as slow it is, and a file for its losses.
SLOWNESS = "GOSSIPJAX_SLOWNESS"
LOSSES = "GOSSIPJAX_LOSSES"


@dataclasses.dataclass(frozen=True)
class SlowImageOptions(image.Options):
    """Options of the image program, and how long a step takes."""

    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least."""


@dataclasses.dataclass(frozen=True)
class SlowLanguageOptions(language.Options):
    """Options of the language program, and how long a step takes."""

    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least."""


def sleep_in(loss: jax.Array, seconds: float) -> jax.Array:
    """Returns the loss, which is there after these seconds times the slowness of this process.

    Where the process has a file for its losses, a line has the time and the loss of each step.
    """
    if path := os.environ.get(LOSSES):

        def write(loss: np.ndarray) -> None:
            with open(path, "a") as file:
                file.write(f"{time.time()} {float(loss)}\n")

        jax.debug.callback(write, loss)
    return compute_one(seconds * float(os.environ.get(SLOWNESS, "1"))) * loss


class SlowImageClassification(image.ImageClassification):
    """Images, whose gradients take at least some seconds."""

    def __init__(self, options: SlowImageOptions):
        super().__init__(options)
        self._step_seconds = options.step_seconds

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        loss, statistics = super().loss(variables, batch)
        return sleep_in(loss, self._step_seconds), statistics


class SlowLanguageModeling(language.LanguageModeling):
    """Texts, whose gradients take at least some seconds."""

    def __init__(self, options: SlowLanguageOptions):
        super().__init__(options)
        self._step_seconds = options.step_seconds

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        loss, statistics = super().loss(variables, batch)
        return sleep_in(loss, self._step_seconds), statistics


class SlowProgram(NamedTuple):
    """A training program that sleeps."""

    options: type[Any]
    task: type[Any]


PROGRAMS = {
    "image": SlowProgram(SlowImageOptions, SlowImageClassification),
    "language": SlowProgram(SlowLanguageOptions, SlowLanguageModeling),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    name, *rest = sys.argv[1:] if arguments is None else arguments
    run_program("experiments.fault_injection.slow", *PROGRAMS[name], rest)


if __name__ == "__main__":
    main()
