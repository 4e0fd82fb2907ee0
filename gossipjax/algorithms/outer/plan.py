"""When an outer optimizer averages which fragment: static data of its state, and the state."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from gossipjax.algorithms.frame.accumulation import EVERY_STEP, AccumulationPlan
from gossipjax.algorithms.frame.state import DEFAULT_WIRE, ExchangePlan
from gossipjax.collectives import StepLike
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import Wire

MAX_STEPS = 2**16  # of one cycle of gossip and outer steps together

Average = Schedule | Literal["exact", "none"]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OuterPlan:
    """When an outer optimizer averages which fragment, and over whom.

    Attributes:
      every: H, steps from one average of a fragment to the next.
      average: "exact", "none", or a schedule: period `m` of H steps uses its round `m`.
      fragments: p. Fragment `f` is sent at the end of every step `k` with
        `k + 1 = (f + 1) H // p  (mod H)`, the last one thus at that of each H-th step.
      delay: steps between sending a fragment and using its average.
      mix: the weight of the local model where an average is used.
      pull: the weight of the distance between anchors, where `average` is a schedule.
      wire: the axes and the type of messages.
    """

    every: int
    average: Average = "exact"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    pull: float = 1.0
    wire: Wire = DEFAULT_WIRE

    @property
    def replaces_all(self) -> bool:
        """Whether an outer step leaves nothing of the models that it has averaged."""
        return self.average == "exact" and self.fragments == 1 and self.mix == 0

    def skips_exchange(self, step: StepLike) -> bool:
        """Whether the gossip inside need not exchange at `step`, if that is known when traced.

        Its exchange would change nothing of the average over all nodes, and the outer step then
        replaces all models, weights and messages.
        """
        is_known = isinstance(step, int | np.integer)
        return self.replaces_all and not self.delay and is_known and bool(self.is_used(0, step))

    @property
    def can_run_beside(self) -> bool:
        """Whether an average may be taken beside the steps between sending and using it."""
        return self.delay > 0 and self.average != "none"

    def is_sent(self, fragment: int, step: Any) -> Any:
        """Whether the fragment's outer gradient is taken at the end of `step`."""
        offset = (fragment + 1) * self.every // self.fragments
        return (step + 1 - offset) % self.every == 0

    def is_used(self, fragment: int, step: Any) -> Any:
        """Whether the average that was sent `delay` steps before is used at the end of `step`."""
        return self.is_sent(fragment, step - self.delay) & (step >= self.delay)

    def sent_at(self, step: int) -> int | None:
        """The fragment whose outer gradient is taken at the end of `step`."""
        return next((f for f in range(self.fragments) if self.is_sent(f, step)), None)

    def used_at(self, step: int) -> int | None:
        """The fragment whose average is used at the end of `step`."""
        return next((f for f in range(self.fragments) if self.is_used(f, step)), None)

    def is_outer_step(self, step: int) -> bool:
        """Whether anything is sent or used at the end of `step`."""
        return self.sent_at(step) is not None or self.used_at(step) is not None

    def round_number(self, step: StepLike) -> StepLike:
        """The round of the schedule for the average that is used at the end of `step`."""
        return (step - self.delay) // self.every

    def roles(self, steps: np.ndarray) -> np.ndarray:
        """What each step does, `[steps, 3]`: the fragments sent and used, and the round; or -1."""
        sent = np.full(len(steps), -1)
        used = np.full(len(steps), -1)
        for fragment in range(self.fragments):
            sent[self.is_sent(fragment, steps)] = fragment
            used[self.is_used(fragment, steps)] = fragment
        rounds = np.full(len(steps), -1)
        if isinstance(self.average, Schedule):
            for number in np.flatnonzero(used >= 0):
                step = int(self.round_number(int(steps[number])))
                rounds[number] = self.average.index_at(step)
        return np.stack([sent, used, rounds], axis=1)

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on the roles repeat, and after how many steps."""
        start, length = ExchangePlan(
            self.average if isinstance(self.average, Schedule) else None
        ).cycle
        return self.delay + self.every * start, self.every * length


class OuterState(NamedTuple):
    """State of `gx.outer` for one node.

    Attributes:
      count: int32 scalar, the number of updates so far.
      inner: the state of the chain inside.
      local: the `GossipState` of a chain that holds none, with its residuals; else None.
      anchor: the model after the last outer step, like the parameters, float32 at least; the same
        on all nodes where `average="exact"`.
      outer: the state of the outer optimizer, by fragment.
      sent: this node's outer gradients, like `anchor`, each kept until its average is used; None
        without delay.
      sent_counts: int32 `[p]`, the updates before that after which each fragment was sent; -1
        before that, and once its average was used; None without delay.
      plan: static: the `OuterPlan`.
    """

    count: Any
    inner: Any
    local: Any
    anchor: Any
    outer: Any
    sent: Any
    sent_counts: Any
    plan: Any


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """All that decides which program a step needs: the rounds of the gossip and the outer steps.

    Attributes:
      exchange: the plan of the gossip.
      outer: the plan of the outer optimizer, if there is one.
      is_local: whether the chain inside the outer optimizer holds no gossip.
      accumulation: which steps make an update; the others exchange nothing.
    """

    exchange: ExchangePlan
    outer: OuterPlan | None = None
    is_local: bool = False
    accumulation: AccumulationPlan = EVERY_STEP

    @property
    def of_updates(self) -> StepPlan:
        """The plan of the chain inside `gx.accumulate`, whose steps are updates."""
        return dataclasses.replace(self, accumulation=EVERY_STEP)

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on all repeats, and after how many steps."""
        start, length = self.exchange.cycle
        if self.outer is None:
            return start, length
        outer_start, outer_length = self.outer.cycle
        return max(start, outer_start), math.lcm(length, outer_length)

    def goes_on_alike(self, step: int, other: int) -> bool:
        """Whether the steps from `step` on are those from `other` on."""
        start, length = self.cycle
        return step == other or (min(step, other) >= start and (step - other) % length == 0)

    def canonical_step(self, step: int) -> int:
        """The smallest step with the same compiled program as `step`; see `gx.canonical_step`."""
        if self.accumulation.every > 1:
            step = require_int(step, "step", 0)
            if not self.accumulation.makes_update(step):
                return 0
            update = self.of_updates.canonical_step(step // self.accumulation.every)
            return self.accumulation.last_step(update)
        canonical = self.exchange.canonical_step(step)
        if self.outer is None:
            return canonical
        cycle = _find_cycle(self.exchange, self.outer)
        return int(step) if cycle is None else cycle.canonical_step(step)

    @property
    def canonical_steps(self) -> tuple[int, ...] | range:
        """All values of `canonical_step`; more than `MAX_STEPS` are not listed."""
        if self.accumulation.every > 1:
            updates = self.of_updates.canonical_steps
            return (0, *map(self.accumulation.last_step, updates))
        if self.outer is None:
            return self.exchange.canonical_steps
        cycle = _find_cycle(self.exchange, self.outer)
        return range(MAX_STEPS) if cycle is None else cycle.canonical_steps


class _Cycle(NamedTuple):
    """The canonical step of each of the first steps, of which the last `length` repeat."""

    steps: np.ndarray
    length: int
    canonical_steps: tuple[int, ...]

    def canonical_step(self, step: int) -> int:
        start = len(self.steps) - self.length
        return int(self.steps[step if step < start else start + (step - start) % self.length])


@functools.lru_cache(64)
def _find_cycle(exchange: ExchangePlan, outer: OuterPlan) -> _Cycle | None:
    """None if one cycle of both is longer than `MAX_STEPS`."""
    gossip_start, gossip_length = exchange.cycle
    start, length = StepPlan(exchange, outer).cycle
    if start + length > MAX_STEPS:
        return None
    steps = np.arange(start + length)
    within = np.where(
        steps < gossip_start, steps, gossip_start + (steps - gossip_start) % gossip_length
    )
    rounds = [exchange.canonical_step(k) for k in range(gossip_start + gossip_length)]
    roles = np.column_stack([np.array(rounds)[within], outer.roles(steps)])
    _, first, inverse = np.unique(roles, axis=0, return_index=True, return_inverse=True)
    return _Cycle(first[inverse.ravel()], length, tuple(sorted(first.tolist())))
