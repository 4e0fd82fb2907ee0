"""What runs say of a method: a value for each seed, or why there is none."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from experiments.report.differences import Difference, find_difference
from experiments.report.section import GAPS, Result, Results, Scale, Status


class Sample(NamedTuple):
    """The values of a method.

    Attributes:
      values: one for each seed; none if its run has not finished.
      status: how the run ended.

    >>> f"{Sample((1.0, 2.0)):.1f} {Sample((3.0,)):.2f} {Sample((), 'diverged'):.1f}"
    '1.5 ± 0.7 3.00 diverged'
    """

    values: tuple[float, ...] = ()
    status: Status = "finished"

    def __format__(self, spec: str) -> str:
        if not self.values:
            return GAPS[self.status]
        mean = format(self.mean, spec)
        if len(self.values) == 1:
            return mean
        return f"{mean} ± {format(statistics.stdev(self.values), spec)}"

    @property
    def mean(self) -> float:
        """The mean over the seeds.

        Raises:
          statistics.StatisticsError: if there are no values.
        """
        return statistics.fmean(self.values)


class Place(NamedTuple):
    """Where the values of a method are.

    Attributes:
      run: the name of the run.
      algorithm: that of the entries in its `summary.json`.
      topology: that of the entries; None is any.
    """

    run: str
    algorithm: str
    topology: str | None = None


def read_sample(results: Results, place: Place, field: str, factor: float = 1.0) -> Sample:
    """Reads a field of every seed of a method, times `factor`; of a list, the mean of it."""
    result = results.get(place.run, Result(status="missing"))
    values = []
    for run in result.runs:
        is_other_topology = place.topology is not None and run["topology"] != place.topology
        value = run.get(field)
        if run["algorithm"] != place.algorithm or is_other_topology or value is None:
            continue
        number = statistics.fmean(value) if isinstance(value, list) else value
        values.append(factor * number)
    return Sample(tuple(values), result.status)


def read_samples(
    results: Results, places: Mapping[str, Place], field: str, factor: float = 1.0
) -> dict[str, Sample]:
    """Reads a field of every method, by its title."""
    return {title: read_sample(results, place, field, factor) for title, place in places.items()}


def to_perplexities(sample: Sample) -> Sample:
    """Returns the perplexities that belong to losses in nats per token: `exp` of each value.

    >>> f"{to_perplexities(Sample((0.0, 0.0))):.1f} {to_perplexities(Sample((), 'failed')):.1f}"
    '1.0 ± 0.0 failed'
    """
    return sample._replace(values=tuple(math.exp(value) for value in sample.values))


def subtract(first: Sample, second: Sample, single_spread: float) -> Difference:
    """The difference of the means of two methods, with its margin."""
    return find_difference(first.values, second.values, single_spread)


def subtract_differences(first: Difference, second: Difference) -> Difference:
    """The difference of two differences of other samples.

    >>> print(subtract_differences(Difference(5.0, 0.3), Difference(1.0, 0.4)))
    +4.00 ± 0.50
    """
    margin = (first.margin**2 + second.margin**2) ** 0.5
    return Difference(first.mean - second.mean, margin)


def format_difference(difference: Difference) -> str:
    """The difference with its margin; a gap if there is none.

    >>> format_difference(Difference(0.5, 0.25)), format_difference(Difference(math.nan, 1.0))
    ('+0.50 ± 0.25', '-')
    """
    return "-" if math.isnan(difference.mean) else f"{difference}"


def find_best(samples: Mapping[str, Sample]) -> str | None:
    """The title of the sample with the largest mean; None if one of them has no values.

    >>> find_best({"a": Sample((1.0,)), "b": Sample((2.0, 4.0))})
    'b'
    """
    if not samples or any(not sample.values for sample in samples.values()):
        return None
    return max(samples, key=lambda title: samples[title].mean)


def join_all(verdicts: list[bool | None]) -> bool | None:
    """Whether all hold; None if none fails and one cannot be judged.

    >>> join_all([True, None]), join_all([None, False]), join_all([True, True])
    (None, False, True)
    """
    if False in verdicts:
        return False
    return None if None in verdicts or not verdicts else True


def format_verdicts(verdicts: Mapping[str, bool | None]) -> str:
    """A sentence without its stop: which statements hold, which do not, and which are open.

    >>> format_verdicts({"a": True, "b": True, "c": False, "d": None})
    'As in the paper: a, b; not so: c; not judged: d'
    """
    words = {True: "as in the paper", False: "not so", None: "not judged"}
    parts = []
    for verdict, word in words.items():
        titles = [title for title, value in verdicts.items() if value is verdict]
        if titles:
            parts.append(f"{word}: {', '.join(titles)}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def list_image_arguments(scale: Scale, epochs: int) -> tuple[str, ...]:
    """The options of `experiments.image` that a grid of 16 nodes (quick: 8) has.

    All nodes are on one device, which computes a perceptron faster than a device per node does.

    Args:
      scale: says which images are there; without Fashion-MNIST its 60,000 images are 12 epochs of
        the 5,000 digits.
      epochs: of Fashion-MNIST; the quick scale makes eight of the digits.
    """
    size = ("--model", "mlp", "--nodes", "8" if scale.is_quick else "16")
    size = (*size, "--batch-size-per-node", "32", "--placement", "vmap", "--log-every", "1000")
    if scale.is_quick:
        return ("--dataset", "mnist5k", *size, "--epochs", "8")
    if scale.fashion_mnist is None:
        return ("--dataset", "mnist5k", *size, "--epochs", f"{12 * epochs}")
    data = ("--dataset", "fashion_mnist", "--data-dir", f"{scale.fashion_mnist}")
    return (*data, *size, "--epochs", f"{epochs}")


def list_seeds(count: int) -> tuple[str, ...]:
    """The option of so many seeds.

    >>> list_seeds(2)
    ('--seed', '0', '1')
    """
    return ("--seed", *map(str, range(count)))
