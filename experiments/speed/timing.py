"""Programs and loops that are timed again and again, and the summary of the timings."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from experiments.results import Record


def summarize_samples(name: str, samples: ArrayLike) -> Record:
    """The median of `samples`, named `name`, and their quantiles 0.1 and 0.9.

    >>> summarize_samples("seconds", [1.0, 2.0, 3.0])
    {'seconds': 2.0, 'seconds_p10': 1.2, 'seconds_p90': 2.8}
    """
    low, median, high = np.quantile(np.asarray(samples, float), [0.1, 0.5, 0.9]).tolist()
    return {name: median, f"{name}_p10": low, f"{name}_p90": high}


class TimedProgram:
    """A compiled function that is called again and again, on its results where it has some.

    Args:
      program: `program(*carried, *constants)` returns the next `carried`, a tuple.
      carried: the first arguments; without any, results are dropped.
      constants: the arguments after them, the same for every call.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        carried: Sequence[Any] = (),
        constants: Sequence[Any] = (),
    ):
        self._program = program
        self._carried = tuple(carried)
        self._constants = tuple(constants)

    def run(self) -> float:
        """Calls the program; returns the seconds until its results were there."""
        start = time.perf_counter()
        results = jax.block_until_ready(self._program(*self._carried, *self._constants))
        seconds = time.perf_counter() - start
        if self._carried:
            self._carried = tuple(results)  # after the clock has stopped: frees the old arrays
        return seconds


class TimedLoop:
    """A training loop that runs a few steps at a time.

    Args:
      train_step: `train_step(step, state, batch) -> state`.
      state: parameters and optimizer state.
      batches: infinite.
    """

    def __init__(
        self,
        train_step: Callable[[int, Any, Any], Any],
        state: Any,
        batches: Iterator[Any],
    ):
        self._train_step = train_step
        self._state = state
        self._batches = batches
        self._batch = next(batches)
        self._step = 0

    def compile(self, steps: list[int]) -> None:
        """Runs these steps on one batch, so that no timed step compiles."""
        for step in steps:
            self._state = jax.block_until_ready(self._train_step(step, self._state, self._batch))
        self._step = len(steps)  # the updates that the state has counted

    def run(self, steps: int) -> float:
        """Runs the next `steps` steps; returns the seconds that they took, input included."""
        start = time.perf_counter()
        for _ in range(steps):
            self._state = self._train_step(self._step, self._state, self._batch)
            self._batch = next(self._batches)
            self._step += 1
        jax.block_until_ready(self._state)
        return time.perf_counter() - start
