"""What gossip conserves: a numerator, its weight, and the number of nodes that it counts for."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mass:
    """A numerator with its weight; masses are added and divided, and their sum stays.

    Attributes:
      x: the numerator: arrays, or numbers, of any type.
      w: its push-sum weight; the model is `x / w`.
      count: the nodes that it stands for. The ratio `w / count` is the same on all nodes but for
        what gossip has not mixed yet: the weight of all living nodes over their number. It scales
        updates, since nodes that die take weight with them, and nodes that join bring none.
    """

    x: tuple[Any, ...]
    w: Any
    count: Any

    def __add__(self, other: Mass) -> Mass:
        x = tuple(a + b for a, b in zip(self.x, other.x, strict=True))
        return Mass(x, self.w + other.w, self.count + other.count)

    def __sub__(self, other: Mass) -> Mass:
        x = tuple(a - b for a, b in zip(self.x, other.x, strict=True))
        return Mass(x, self.w - other.w, self.count - other.count)

    def __neg__(self) -> Mass:
        return Mass(tuple(-a for a in self.x), -self.w, -self.count)

    def __truediv__(self, divisor: int) -> Mass:
        return Mass(tuple(a / divisor for a in self.x), self.w / divisor, self.count / divisor)
