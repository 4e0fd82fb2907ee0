"""The rule by which programs choose a learning rate."""

from collections.abc import Callable

MAX_MOVES = 8  # of the bracket


def choose_rate(measure: Callable[[float], float], first: float) -> float:
    """Doubles and halves a rate until the middle of three measures is the smallest.

    >>> choose_rate(lambda rate: abs(rate - 3), first=0.4)
    3.2
    """
    found = {first: measure(first)}
    for _ in range(MAX_MOVES):
        best = min(found, key=lambda rate: found[rate])
        missing = [rate for rate in (best / 2, 2 * best) if rate not in found]
        if not missing:
            break
        found |= {rate: measure(rate) for rate in missing}
    return min(found, key=lambda rate: found[rate])
