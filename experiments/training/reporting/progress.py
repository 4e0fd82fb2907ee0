"""The progress of a run, and the clock that measures it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Self

import jax

from experiments.results import Record


class Clock:
    """Sums up the seconds that are spent in `with clock:` blocks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def lap(self) -> float:
        """Returns the seconds since the last call, and restarts at 0."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class InputClock(Clock):
    """Sums up the seconds for which the devices wait for input.

    It starts when they have computed what they were given: input that is made meanwhile costs
    nothing.

    Args:
      get_newest: returns the newest array that is being computed; None if nothing is.
    """

    def __init__(self, get_newest: Callable[[], jax.Array | None]):
        super().__init__()
        self._get_newest = get_newest

    def __enter__(self) -> Self:
        jax.block_until_ready(self._get_newest())
        return super().__enter__()


@dataclasses.dataclass
class RunProgress:
    """The progress of a run, in values that JSON can hold; saved with every checkpoint.

    Attributes:
      seconds: spent in training steps.
      examples: seen by all nodes together.
      seconds_per_step: that of every interval between two lines of `metrics.jsonl`.
      metrics: those of the last line of `metrics.jsonl` about training.
    """

    seconds: float = 0.0
    examples: int = 0
    seconds_per_step: list[float] = dataclasses.field(default_factory=list)
    metrics: Record = dataclasses.field(default_factory=dict)

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self:
        """Returns the progress in the metadata of a checkpoint, which may hold more."""
        return cls(**{field.name: metadata[field.name] for field in dataclasses.fields(cls)})

    def to_metadata(self) -> dict[str, Any]:
        """Returns the progress as a part of the metadata of a checkpoint."""
        return vars(self).copy()

    def advance(self, steps: int, examples_per_step: int, seconds: float) -> None:
        """Adds an interval of steps."""
        self.seconds += seconds
        self.examples += steps * examples_per_step
        self.seconds_per_step.append(seconds / steps)
