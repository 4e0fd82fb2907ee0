"""Learning rates by one rule: the best of a bracket, of half, once and twice a rate."""

import math
from collections.abc import Callable, Mapping

FACTORS = (0.5, 1.0, 2.0)
MAX_MOVES = 8  # doublings or halvings of a rate


def bracket(rate: float) -> tuple[float, ...]:
    """Returns half, once and twice a rate."""
    return tuple(factor * rate for factor in FACTORS)


def tune(measure: Callable[[float], float], first: float) -> float:
    """Doubles and halves a rate until the middle of three rates has the smallest measure.

    >>> tune(lambda rate: abs(rate - 3), first=0.4)
    3.2
    """
    found = {first: measure(first)}
    for _ in range(MAX_MOVES):
        best = min(found, key=lambda rate: found[rate])
        missing = [rate for rate in bracket(best) if rate not in found]
        if not missing:
            break
        found |= {rate: measure(rate) for rate in missing}
    return min(found, key=lambda rate: found[rate])


def choose_rate(scores: Mapping[float, float]) -> float | None:
    """Returns the rate of the largest score; a run that has diverged, or has none, is never best.

    >>> choose_rate({0.1: 80.0, 0.2: 81.0, 0.4: float("nan")}), choose_rate({0.1: float("inf")})
    (0.2, None)
    """
    finite = [rate for rate, score in scores.items() if math.isfinite(score)]
    return max(finite, key=lambda rate: scores[rate], default=None)
