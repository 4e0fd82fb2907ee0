"""What a value of a traced program is, to who follows the updates of a gossip through it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Leaf:
    """The update of one parameter, where a gossip returns it; `params` are what it is added to."""

    def __init__(self, path: str, params: set[Any]):
        self.path = path
        self.params = params


class Update(NamedTuple):
    """Marked updates as they are, or what is not one of them under a condition, plus `rest`.

    `rest` counts the values that were added; `condition` is that of a factor of 0 or 1.
    """

    leaves: frozenset[Leaf]
    rest: frozenset[tuple[Any, int]] = frozenset()
    condition: tuple[Any, bool] | None = None


class Changed(NamedTuple):
    """Computed from marked updates in another way."""

    leaves: frozenset[Leaf]


class New:
    """Computed from parameters to which their updates were added."""


class Gradient(NamedTuple):
    """A gradient, or a step along it; the first of `eqns` has negated it."""

    is_negative: bool = False
    eqns: Any = ()


Value = Update | Changed | New | Gradient | None  # None: independent of all marks
