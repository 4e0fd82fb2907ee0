"""Gossip as optax transforms: what all of them share, then a file per algorithm.

- state: `GossipState`, the plan of the exchange in it, and one round of it.
- parameters: those of less than 32 bits, the part that a masked transform sees, and fragments.
- steps: the states inside that of a chain, and which program a step needs.
- exchange: messages in flight, and the exchange that can run before a step.
- transform: the wrapper of all gossip transforms, and the checks of arguments.
- outer_average: when an outer optimizer averages what, and the average.
"""

__all__: list[str] = []
