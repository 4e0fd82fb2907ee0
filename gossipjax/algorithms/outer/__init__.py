"""Outer optimizers: the plan and the fragments, then the transform."""

from gossipjax.algorithms.outer import fragments, plan

__all__ = ["fragments", "plan"]
