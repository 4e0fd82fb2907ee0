"""What all algorithms share: plans and states of an exchange, and the frame of a transform.

- plan: when, with whom and in which form an algorithm exchanges; what a step needs of it.
- state: `GossipState`, the numerators and residuals of a model, and one round of the exchange.
- chain: finds the exchanging states inside the state of a chain, and checks their order.
- transform: the wrapper of all gossip transforms, and the checks of arguments.
- model: the model of a node, leaf by leaf, and its residuals.
- mask: the part of the parameters that a masked transform sees.
- fragments: the parts in which a model travels.
- stability: simulates a transform, to see whether nodes come to agree.
- weighted, apply_if_finite, refuse_outliers, sharded: what stands before or around an exchange.
"""

__all__: list[str] = []
