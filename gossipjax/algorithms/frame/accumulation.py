"""When the gradients of several steps make an update, and what is kept until then."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from gossipjax.collectives import StepLike


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AccumulationPlan:
    """When the gradients of several steps make an update: static data of the state.

    Attributes:
      every: k. Steps `k m, ..., k m + k - 1` make update `m`, at the end of the last of them.
    """

    every: int = 1

    def makes_update(self, step: Any) -> Any:
        """Whether `step` is the last of those for an update."""
        return (step + 1) % self.every == 0

    def update_number(self, step: StepLike) -> StepLike:
        """The number of the update to which the gradient of `step` belongs."""
        return step if self.every == 1 else step // self.every

    def last_step(self, update: int) -> int:
        """The step that makes the update of this number."""
        return (update + 1) * self.every - 1


EVERY_STEP = AccumulationPlan()


class AccumulationState(NamedTuple):
    """State of `gx.accumulate` for one node.

    Attributes:
      pending: int32 scalar, the number of gradients in `total`.
      total: the sum of the gradients since the last update, float32 at least.
      inner: the state of the chain inside.
      plan: static: the `AccumulationPlan`.
    """

    pending: Any
    total: Any
    inner: Any
    plan: Any


def accumulation_state(opt_state: Any) -> AccumulationState | None:
    """The state of `gx.accumulate` inside the state of a chain; None if there is none."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_accumulation)
    return next(filter(_is_accumulation, leaves), None)


def accumulation_plan(opt_state: Any) -> AccumulationPlan:
    """The plan in the state of a chain; without `gx.accumulate`, every step makes an update."""
    state = accumulation_state(opt_state)
    return EVERY_STEP if state is None else state.plan


def require_no_accumulation(opt_state: Any, name: str, way_out: str) -> None:
    """Raises `ValueError` if there is `gx.accumulate` in a chain; `name` is that of the chain."""
    if accumulation_state(opt_state) is not None:
        raise ValueError(f"{name} must not accumulate, got gx.accumulate: {way_out}")


def _is_accumulation(part: Any) -> bool:
    return isinstance(part, AccumulationState)
