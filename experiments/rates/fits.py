"""Slopes of measured rates in logarithms, with errors by resampling the seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.results import Record

RESAMPLES = 1000
CONFIDENCE = 0.95
REGIME_POWER = 3


class Point(NamedTuple):
    """What was measured of one run."""

    nodes: int  # n
    steps: int  # K
    values: np.ndarray  # `[S]`, positive: the same quantity for each seed, estimated by their mean


def select_points(runs: Sequence[Record], label: str, field: str) -> list[Point]:
    """Returns the points of one method, from `runs` of a summary."""
    chosen = [run for run in runs if run["label"] == label]
    return [Point(run["nodes"], run["steps"], np.array(run[field])) for run in chosen]


def select_regime(points: Sequence[Point]) -> list[Point]:
    """Returns those that are in the regime of the theorem; see `is_in_regime`."""
    return [point for point in points if is_in_regime(point.nodes, point.steps)]


class Estimate(NamedTuple):
    """A number found from points, and the limits of 95 % by the bootstrap over the seeds.

    With one seed, which tells nothing of the error, the limits are the value.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def is_in_regime(nodes: int, steps: int) -> bool:
    """Whether `K >= n^3`.

    From there on, what disagreement of the nodes adds to the mean squared gradient, `O(n / K)`
    (theorem 2), is below `1 / sqrt(n K)`, up to a constant that depends on the graph.

    >>> is_in_regime(8, 512), is_in_regime(8, 511)
    (True, False)
    """
    return steps >= nodes**REGIME_POWER


def fit_slope(points: Sequence[Point]) -> Estimate:
    """Fits `a` in `log value = a log(n K) + b` by least squares.

    Not a number where there are fewer than two different `n K`.

    >>> points = [Point(2, k, np.array([k**-0.5])) for k in (64, 128)]
    >>> print(fit_slope(points))
    -0.500 (-0.500 to -0.500)
    """
    x = np.array([[math.log(point.nodes * point.steps)] for point in points])
    return _estimate(points, lambda y: _solve(x, y)[0])


def fit_both_slopes(points: Sequence[Point]) -> tuple[Estimate, Estimate]:
    """Fits `a` and `c` in `log value = a log K + c log n + b` by least squares.

    Not numbers where the points do not determine both.
    """
    x = np.array([[math.log(point.steps), math.log(point.nodes)] for point in points])
    return (
        _estimate(points, lambda y: _solve(x, y)[0]),
        _estimate(points, lambda y: _solve(x, y)[1]),
    )


def fit_steps_needed(points: Sequence[Point], target: float) -> Estimate:
    """Fits `a` in `log K = a log n + b`, with K the steps that are needed for a mean of `target`.

    Not a number where fewer than two node counts reach it within their steps.
    """

    def solve(y: np.ndarray) -> float:
        needed = find_steps_needed(points, y, target)
        x = np.array([[math.log(nodes)] for nodes in needed])
        return _solve(x, np.log(list(needed.values())))[0]

    return _estimate(points, solve)


def find_steps_needed(
    points: Sequence[Point], logarithms: np.ndarray, target: float
) -> Mapping[int, float]:
    """Finds K at which the mean is `target`, by interpolation of the logarithms.

    >>> points = [Point(2, k, np.array([1 / k])) for k in (64, 256)]
    >>> round(find_steps_needed(points, log_means(points), 1 / 128)[2])
    128
    """
    needed = {}
    for nodes in sorted({point.nodes for point in points}):
        chosen = [index for index, point in enumerate(points) if point.nodes == nodes]
        chosen.sort(key=lambda index: logarithms[index])
        y = logarithms[chosen]
        if y[0] <= math.log(target) <= y[-1]:
            x = np.log([points[index].steps for index in chosen])
            needed[nodes] = math.exp(np.interp(math.log(target), y, x))
    return needed


def log_means(points: Sequence[Point]) -> np.ndarray:
    """Returns the logarithms of the means over the seeds."""
    return np.log([point.values.mean() for point in points])


def _solve(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The slopes of `y` in the columns of `x`; not numbers if they are not determined."""
    columns = x.shape[1] if x.ndim == 2 else 2
    if len(y) <= columns:
        return np.full(columns, math.nan)
    design = np.column_stack([x, np.ones(len(y))])
    solution, _, rank, _ = np.linalg.lstsq(design, y)
    return solution[:-1] if rank == columns + 1 else np.full(columns, math.nan)


def _estimate(points: Sequence[Point], solve: Callable[[np.ndarray], float]) -> Estimate:
    if not points:
        return Estimate(math.nan, math.nan, math.nan)
    value = float(solve(log_means(points)))
    rng = np.random.default_rng(0)
    seeds = len(points[0].values)
    found = []
    for _ in range(RESAMPLES if seeds > 1 else 0):
        drawn = rng.integers(seeds, size=seeds)
        found.append(solve(np.log([point.values[drawn].mean() for point in points])))
    if not found or math.isnan(value):
        return Estimate(value, value, value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(found, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
