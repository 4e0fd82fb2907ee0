"""The image program with a sleep in each step: simulated computation, not on this machine's cores.

python -m experiments.fault_injection.slow_image --step-seconds 0.05 ...
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from experiments.image import ImageClassification, Options
from experiments.options import PositiveFloat
from experiments.sleep import compute_one
from experiments.training.main import run_program
from experiments.training.task import Variables


@dataclasses.dataclass(frozen=True)
class SlowOptions(Options):
    """Options of the image program, and how long a step takes."""

    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least."""


class SlowImageClassification(ImageClassification):
    """Images, whose gradients take at least some seconds."""

    def __init__(self, options: SlowOptions):
        super().__init__(options)
        self._step_seconds = options.step_seconds

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        loss, statistics = super().loss(variables, batch)
        return compute_one(self._step_seconds) * loss, statistics


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    name = "experiments.fault_injection.slow_image"
    run_program(name, SlowOptions, SlowImageClassification, arguments)


if __name__ == "__main__":
    main()
