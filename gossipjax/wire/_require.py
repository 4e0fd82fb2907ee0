"""Checks of the numbers that make a codec."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_SEED = 2**32 - 1


def require_seed(seed: Any, name: str) -> int:
    """Returns `seed`; raises `ValueError` unless it is an integer from 0 to 2^32 - 1."""
    is_integer = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_integer or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed of {name} must be an integer from 0 to {MAX_SEED}, got {seed!r}.")
    return int(seed)


def require_fraction(fraction: Any, name: str) -> float:
    """Returns `fraction`; raises `ValueError` unless it is a number above 0 and at most 1."""
    is_number = isinstance(fraction, int | float | np.integer | np.floating)
    if isinstance(fraction, bool) or not is_number or not 0 < fraction <= 1:
        raise ValueError(
            f"fraction of {name} must be a number above 0 and at most 1, got {fraction!r}."
        )
    return float(fraction)
