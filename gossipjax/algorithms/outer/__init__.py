"""Outer optimizers: `gx.outer`.

- plan: when an outer optimizer averages which fragment.
- state: its state, and the average over all nodes or by a round.
- outer: the transform.
- checks: what `gx.outer` refuses.
- stability: whether nodes with different anchors come to agree.
"""

__all__: list[str] = []
