"""What all algorithms share: the state, its wrapper, and the way to it in a chain.

- parameters: those of less than 32 bits, and the part of them that a masked transform sees.
- state: `GossipState`, and the plan of the exchange in it.
- chain: the states inside that of a chain, and its static steps.
- exchange: one round, messages in flight, and the exchange that can run before a step.
- transform: the wrapper of all gossip transforms, and the checks of arguments.
"""

from gossipjax.algorithms.frame import chain, exchange, parameters, state, transform

__all__ = ["chain", "exchange", "parameters", "state", "transform"]
