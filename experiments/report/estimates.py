"""What runs say of a method: a value for each seed, and differences of methods with limits."""

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

from experiments.runner import Result, Status

CONFIDENCE = 0.9  # that the true value is above the lower limit; and as much for the upper one
GAPS: Mapping[Status, str] = {
    "diverged": "diverged",
    "failed": "failed",
    "missing": "-",
    "finished": "-",
}
"""What a table shows in the place of a figure, by how the run ended."""


class Estimate(NamedTuple):
    """A number, and the limits between which the true one is; not a number if a run is missing.

    >>> f"{exact(1.0):.1f}, {Estimate(1.0, 0.5, 1.5):.1f}, {Estimate(1.0, 0.5, 2.0):.1f}"
    '1.0, 1.0 ± 0.5, 1.0 (0.5 to 2.0)'
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if math.isnan(self.value):
            return "-"
        value = format(self.value, spec)
        if self.low == self.high:
            return value
        plain = spec.lstrip("+")
        margin = self.high - self.value
        if math.isclose(margin, self.value - self.low, rel_tol=1e-6):
            return f"{value} ± {margin:{plain}}"
        return f"{value} ({self.low:{plain}} to {self.high:{plain}})"

    def minus(self, other: "Estimate") -> "Estimate":
        """Returns the difference from an estimate of other runs.

        >>> f"{Estimate(5.0, 4.7, 5.3).minus(Estimate(1.0, 0.6, 1.4)):.1f}"
        '4.0 ± 0.5'
        """
        value = self.value - other.value
        below = math.hypot(self.value - self.low, other.high - other.value)
        above = math.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - below, value + above)


MISSING = Estimate(math.nan, math.nan, math.nan)


def exact(value: float) -> Estimate:
    """Returns a number that has no error."""
    return Estimate(value, value, value)


def compare(first: Sequence[float], second: Sequence[float], single_spread: float) -> Estimate:
    """Returns the difference of two means, with the limits of Welch's test.

    Args:
      first, second: a value for each seed.
      single_spread: standard deviation of a seed, taken where a sample has only one.

    >>> f"{compare([90.0, 90.2, 90.1], [89.0, 89.2, 89.4], 0.5):.2f}"
    '0.90 ± 0.21'
    >>> f"{compare([90.0], [89.0], 0.5):.2f}"
    '1.00 ± 0.91'
    """
    if not first or not second:
        return MISSING
    difference = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1:
        count = 1 / len(first) + 1 / len(second)
        margin = float(stats.norm.ppf(CONFIDENCE)) * single_spread * count**0.5
        return Estimate(difference, difference - margin, difference + margin)
    if statistics.variance(first) == statistics.variance(second) == 0:
        return exact(difference)
    with warnings.catch_warnings():  # where all seeds of one sample are equal
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(first, second, equal_var=False)
    limits = test.confidence_interval(2 * CONFIDENCE - 1)  # two-sided
    return Estimate(difference, float(limits.low), float(limits.high))


class Sample(NamedTuple):
    """The values of a method: one for each seed, none if its run has not finished.

    >>> f"{Sample((1.0, 2.0)):.1f} {Sample((3.0,)):.2f} {Sample((), 'diverged'):.1f}"
    '1.5 ± 0.7 3.00 diverged'
    """

    values: tuple[float, ...] = ()
    status: Status = "finished"

    def __format__(self, spec: str) -> str:
        if not self.values:
            return GAPS[self.status]
        mean = format(self.mean, spec)
        return f"{mean} ± {format(self.spread, spec)}" if len(self.values) > 1 else mean

    @property
    def mean(self) -> float:
        """The mean over the seeds; not a number without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def minus(self, other: "Sample", single_spread: float) -> Estimate:
        """Returns the difference of the means, with its limits."""
        return compare(self.values, other.values, single_spread)

    def to_perplexity(self) -> "Sample":
        """Returns `exp` of losses in nats per token."""
        return self._replace(values=tuple(math.exp(value) for value in self.values))


class Place(NamedTuple):
    """Where the values of a method are: a run, and the entries of its `summary.json`.

    A topology of None is any.
    """

    run: str
    algorithm: str
    topology: str | None = None


def read_sample(
    results: Mapping[str, Result], place: Place, field: str, factor: float = 1.0
) -> Sample:
    """Reads a field of every seed of a method, times `factor`; of a list, the mean of it."""
    result = results.get(place.run, Result(status="missing"))
    values = []
    for run in result.runs:
        value = run.get(field)
        is_other = run["algorithm"] != place.algorithm or (
            place.topology is not None and run["topology"] != place.topology
        )
        if not is_other and value is not None:
            values.append(factor * (statistics.fmean(value) if isinstance(value, list) else value))
    return Sample(tuple(values), result.status)


def read_samples(
    results: Mapping[str, Result], places: Mapping[str, Place], field: str, factor: float = 1.0
) -> dict[str, Sample]:
    """Reads a field of every method, by its title."""
    return {title: read_sample(results, place, field, factor) for title, place in places.items()}
