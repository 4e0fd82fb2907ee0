"""Outer optimizers: `gx.outer`, its plan and its average.

- plan: when an outer optimizer averages which fragment; its state.
- average: the average over all nodes, or by a round.
- outer: the transform.
- checks: what `gx.outer` refuses.
"""

__all__: list[str] = []
