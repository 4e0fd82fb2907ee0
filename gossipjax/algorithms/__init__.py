"""Gossip as optax transforms: what all of them share, then a file per algorithm.

- state: `GossipState`, its plan of the exchange, and one round of the exchange.
- parameters: the part of the parameters that a masked transform sees.
- fragments: the parts in which a model travels.
- steps: how to find states inside the state of a chain, and which program a step needs.
- exchange: messages in flight, and the exchange that can run before a step.
- transform: the wrapper of all gossip transforms, and the checks of arguments.
- outer_average: when an outer optimizer averages which fragment, and how it averages.
"""

__all__: list[str] = []
