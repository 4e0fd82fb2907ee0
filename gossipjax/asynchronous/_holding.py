"""What a node holds: buffers on its device, and what arrived since they were made."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from gossipjax.asynchronous._update import add, advance, update_scale
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

    @property
    def count(self) -> float:
        """The nodes that what is held stands for."""
        return float(self.mass.count + (0.0 if self._change is None else self._change.count))

    def read(self) -> Mass:
        """Returns a copy on the host, which does not change."""
        mass = Mass(tuple(map(np.asarray, self.mass.x)), self.mass.w, self.mass.count)
        return mass if self._change is None else mass + self._change

    def add(self, mass: Mass) -> None:
        """Adds to what is held, at the next merge; narrow values are widened first."""
        arrays = zip(mass.x, self.mass.x, strict=True)
        mass = Mass(
            tuple(np.asarray(x).astype(own.dtype, copy=False) for x, own in arrays),
            mass.w,
            mass.count,
        )
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

    def update(self, change: tuple[Any, ...], wires: Any | None) -> Mass | None:
        """Adds what has arrived, and the update of a step, which is on the device.

        Args:
          change: the update.
          wires: the types of the wire, to take half of the sum out in them; None takes nothing.

        Returns:
          The half, on the host; None if nothing is taken.
        """
        mass = self.mass
        arrived = self._change
        self._change = None
        total = Mass((), mass.w, mass.count)
        if arrived is not None:
            total += Mass((), arrived.w, arrived.count)
        arrays = None if arrived is None else arrived.x
        kept, shared = advance(mass.x, arrays, change, update_scale(total), wires)
        if wires is None:
            self.mass = Mass(kept, total.w, total.count)
            return None
        half = total / 2
        self.mass = Mass(kept, total.w - half.w, total.count - half.count)
        return Mass(tuple(map(np.asarray, shared)), half.w, half.count)
