"""Whether two means differ, judged from a few seeds by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

CONFIDENCE = 0.9  # one-sided


class Difference(NamedTuple):
    """A difference of two means.

    Attributes:
      mean: of the first less that of the second.
      margin: how far the true difference may be, to one side, with a confidence of 90 %.
    """

    mean: float
    margin: float

    def exceeds(self, bound: float) -> bool | None:
        """Whether the true difference is above `bound`; None if the margin leaves that open.

        >>> Difference(-1.2, 0.3).exceeds(-1), Difference(-1.2, 0.1).exceeds(-1)
        (None, False)
        """
        if math.isnan(self.mean) or abs(self.mean - bound) < self.margin:
            return None
        return self.mean >= bound

    def is_at_most(self, bound: float) -> bool | None:
        """Whether the true difference is at most `bound`; None if the margin leaves that open.

        >>> Difference(-1.2, 0.3).is_at_most(-1), Difference(-1.2, 0.1).is_at_most(-1)
        (None, True)
        """
        exceeds = self.exceeds(bound)
        return None if exceeds is None else not exceeds

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.margin:.2f}"


def find_difference(
    first: Sequence[float], second: Sequence[float], single_spread: float
) -> Difference:
    """The difference of the means of two samples, with the margin of Welch's test.

    Args:
      first, second: a value for each seed; not a number of an empty one.
      single_spread: standard deviation of a sample of one, where nothing else is known of it.

    >>> print(find_difference([90.0, 90.2, 90.1], [89.0, 89.2, 89.4], 0.5))
    +0.90 ± 0.21
    >>> print(find_difference([90.0], [89.0], 0.5))
    +1.00 ± 0.91
    """
    if not first or not second:
        return Difference(math.nan, math.inf)
    mean = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1:
        count = 1 / len(first) + 1 / len(second)
        return Difference(mean, float(stats.norm.ppf(CONFIDENCE)) * single_spread * count**0.5)
    parts = [statistics.variance(sample) / len(sample) for sample in (first, second)]
    total = sum(parts)
    if total == 0:
        return Difference(mean, 0.0)
    sizes = [len(first) - 1, len(second) - 1]
    freedom = total**2 / sum(part**2 / size for part, size in zip(parts, sizes, strict=True))
    return Difference(mean, float(stats.t.ppf(CONFIDENCE, freedom)) * total**0.5)
