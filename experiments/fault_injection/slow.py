"""A training program with a sleep in each step: simulated computation, not on this machine's cores.

python -m experiments.fault_injection.slow image --step-seconds 0.05 ...
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import image, language
from experiments.options import PositiveFloat
from experiments.sleep import compute_one
from experiments.training.main import run_program
from experiments.training.task import Task, Variables

# Environment variables of a process: how many times as slow it is, and a file for its losses.
SLOWNESS = "GOSSIPJAX_SLOWNESS"
LOSSES = "GOSSIPJAX_LOSSES"


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How long a step takes."""

    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least."""


@dataclasses.dataclass(frozen=True)
class SlowImageOptions(StepOptions, image.Options):
    """Options of the image program, and how long a step takes."""


@dataclasses.dataclass(frozen=True)
class SlowLanguageOptions(StepOptions, language.Options):
    """Options of the language program, and how long a step takes."""


class SlowProgram(NamedTuple):
    """A training program that sleeps."""

    options: type[Any]
    make_task: Callable[[Any], Task]  # that of the program itself


PROGRAMS = {
    "image": SlowProgram(SlowImageOptions, image.ImageClassification),
    "language": SlowProgram(SlowLanguageOptions, language.LanguageModeling),
}


def slow_down(task: Task, step_seconds: float) -> Task:
    """Returns the task, whose losses are there after these seconds times the process's slowness.

    Where the process has a file for its losses, a line has the time and the loss of each step.
    """
    compute_loss = task.loss

    def loss(variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        value, statistics = compute_loss(variables, batch)
        if path := os.environ.get(LOSSES):

            def write(value: np.ndarray) -> None:
                with open(path, "a") as file:
                    file.write(f"{time.time()} {float(value)}\n")

            jax.debug.callback(write, value)
        seconds = step_seconds * float(os.environ.get(SLOWNESS, "1"))
        return compute_one(seconds) * value, statistics

    task.loss = loss
    return task


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given.pop(0) if given else ""
    if name not in PROGRAMS:
        sys.exit(f"the first argument must be one of {', '.join(PROGRAMS)}, got {name!r}.")
    options, make_task = PROGRAMS[name]

    def make_slow_task(given: Any) -> Task:
        return slow_down(make_task(given), given.step_seconds)

    run_program("experiments.fault_injection.slow", options, make_slow_task, given)


if __name__ == "__main__":
    main()
