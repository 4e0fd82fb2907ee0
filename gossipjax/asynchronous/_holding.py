"""What a node holds: buffers on its device, and what arrived since they were made."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gossipjax.asynchronous._update import add, update_scale
from gossipjax.asynchronous.protocol import Mass


class Holding:
    """A mass on the device, and the changes that have come since, on the host.

    It is used under the lock of the service: by the training loop, which merges the changes at each
    step, and by the thread that receives.

    Args:
      mass: what is held at first; its `x` are arrays on the device, which nothing donates.
    """

    def __init__(self, mass: Mass):
        self.mass = mass
        self._change: Mass | None = None
        self._owns_change = False

    @property
    def weight(self) -> float:
        """The push-sum weight that is held."""
        return float(self.mass.w + (0.0 if self._change is None else self._change.w))

    def read(self) -> Mass:
        """Returns a copy on the host, which does not change."""
        mass = Mass(tuple(map(np.asarray, self.mass.x)), self.mass.w, self.mass.count)
        return mass if self._change is None else mass + self._change

    def add(self, mass: Mass) -> None:
        """Adds to what is held, at the next merge."""
        if self._change is None:
            self._change = mass
            self._owns_change = False
        elif self._owns_change:
            change = self._change
            for total, x in zip(change.x, mass.x, strict=True):
                np.add(total, x, out=total)
            self._change = Mass(change.x, change.w + mass.w, change.count + mass.count)
        else:
            self._change = self._change + mass
            self._owns_change = True

    def take(self) -> Mass:
        """Returns all that is held, on the host; nothing is left, not even by rounding."""
        mass = self.read()
        self.mass = Mass(tuple(jnp.zeros_like(x) for x in self.mass.x), 0.0, 0.0)
        self._change = None
        return mass

    def merge(self) -> Mass:
        """Adds the changes to the buffers on the device; returns what is held."""
        change = self._change
        if change is not None:
            x = add(self.mass.x, change.x)
            self.mass = Mass(x, self.mass.w + change.w, self.mass.count + change.count)
            self._change = None
        return self.mass

    def update(self, change: tuple[Any, ...]) -> None:
        """Adds what has arrived, and the update of a step, which is on the device."""
        mass = self.merge()
        self.mass = Mass(add(mass.x, change, update_scale(mass)), mass.w, mass.count)
