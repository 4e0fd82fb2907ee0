"""The image program with a sleep in each step: simulated computation, not on this machine's cores.

python -m experiments.fault_injection.slow image --step-seconds 0.05 ...
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax

from experiments import image
from experiments.options import PositiveFloat
from experiments.sleep import compute_one
from experiments.training.main import run_program
from experiments.training.task import Task, Variables


@dataclasses.dataclass(frozen=True)
class SlowImageOptions(image.ImageOptions):
    """Options of the image program, and how long a step takes."""

    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least."""


def make_slow_task(options: SlowImageOptions) -> Task:
    """Returns the image task, whose losses take these seconds."""
    task = image.ImageClassification(options)
    compute_loss = task.loss

    def loss(variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        value, statistics = compute_loss(variables, batch)
        return compute_one(options.step_seconds) * value, statistics

    task.loss = loss
    return task


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    _, *given = sys.argv[1:] if arguments is None else arguments  # the first one is `image`
    run_program("experiments.fault_injection.slow", SlowImageOptions, make_slow_task, given)


if __name__ == "__main__":
    main()
