"""Checks of quantities."""

import math
from typing import Any

import numpy as np

from gossipjax.topology.schedule import require_int

MAX_NODES = 2**17


def require_quantity(value: Any, what: str, unit: str, *, is_zero_allowed: bool = False) -> float:
    """Return `value` as a float; raise `ValueError` unless it is a finite number above 0."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or not 0 <= value < math.inf or (value == 0 and not is_zero_allowed):
        bound = "of at least 0" if is_zero_allowed else "above 0"
        raise ValueError(f"{what} must be a finite number {bound}, in {unit}, got {value!r}.")
    return float(value)


def require_number_of_nodes(nodes: Any, what: str = "nodes") -> int:
    """Return the number of nodes as an int; raise `ValueError` unless it is an integer >= 1."""
    return require_int(nodes, what, 1, MAX_NODES)


def require_choice(value: Any, what: str, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, got {value!r}.")
