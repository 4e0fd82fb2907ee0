"""The rows of outer optimizers: when they exchange what, and how many steps are measured."""

from typing import NamedTuple

from experiments.training.methods import DenseName, OuterOptions

DILOCO = "diloco"
STREAMING_DILOCO = "streaming-diloco"
OUTER = (DILOCO, STREAMING_DILOCO)
RATE = 0.7  # of the outer Nesterov momentum, as in DiLoCo's paper
MOMENTUM = 0.9
MIN_PERIODS = 3  # measured


class OuterTimes(NamedTuple):
    """When an outer optimizer exchanges what.

    Attributes:
      every: steps from one average of a fragment to the next: the period.
      fragments: parts of the model, of about the same size, each averaged at its time.
      delay: steps between sending a fragment and using its average.
    """

    every: int = 12
    fragments: int = 4
    delay: int = 2

    def of(self, algorithm: str) -> "OuterTimes":
        """Those of a row: DiLoCo averages the whole model, and waits for it."""
        return OuterTimes(self.every, 1, 0) if algorithm == DILOCO else self

    def sends(self, step: int) -> bool:
        """Whether a fragment is sent at the end of `step`.

        >>> [step for step in range(24) if OuterTimes(12, 3).sends(step)]
        [3, 7, 11, 15, 19, 23]
        """
        numbers = range(1, self.fragments + 1)
        return any((step + 1 - n * self.every // self.fragments) % self.every == 0 for n in numbers)

    def canonical_step(self, step: int) -> int:
        """The step's place in its period; for those that send and use nothing, the first's."""
        places = range(self.every)
        idle = [k for k in places if not self.sends(k) and not self.sends(k - self.delay)]
        place = step % self.every
        return idle[0] if place in idle else place

    def options(self, wire: DenseName) -> OuterOptions:
        """The outer optimizer of the row, with messages of this form."""
        return OuterOptions(
            self.every,
            RATE,
            MOMENTUM,
            nesterov=True,
            fragments=self.fragments,
            delay=self.delay,
            wire=wire,
        )

    @property
    def steps_to_compile(self) -> int:
        """Steps that need all programs: an average that is sent last is used `delay` steps later.

        >>> OuterTimes(every=12, delay=2).steps_to_compile
        14
        """
        return self.every + self.delay

    @property
    def first_measured(self) -> int:
        """The first step of a period at which as much is on its way as at the end of any other.

        >>> OuterTimes(12, 1, 0).first_measured, OuterTimes(12, 4, 7).first_measured
        (12, 36)
        """
        return self.every * -(-(self.steps_to_compile + self.delay) // self.every)

    def count_steps(self, iterations: int) -> int:
        """Steps to measure: whole periods, at least `iterations` steps and `MIN_PERIODS` periods.

        >>> OuterTimes(every=4).count_steps(10), OuterTimes(every=5).count_steps(16)
        (12, 20)
        """
        return self.every * max(MIN_PERIODS, -(-iterations // self.every))
