"""What all algorithms share: the state, its wrapper, and the way to it in a chain.

- state: `GossipState`, and the plan of the exchange in it.
- transform: the wrapper of all gossip transforms, and the exchange that can run before a step.
- chain: the state inside that of a chain, and its static steps.
- masks: the part of the parameters that a masked transform sees.
- rounding: parameters of less than 32 bits.
"""

from gossipjax.algorithms.frame import chain, masks, rounding, state, transform

__all__ = ["chain", "masks", "rounding", "state", "transform"]
