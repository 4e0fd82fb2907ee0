"""Several nodes on each device: an axis of nodes composed of devices and of the nodes of a device.

Read first collectives.py, what a collective over all nodes is on them, then composition.py, which
puts that into a function.
"""

from gossipjax.composed.collectives import ComposedAxis
from gossipjax.composed.composition import Composition

__all__ = ["ComposedAxis", "Composition"]
