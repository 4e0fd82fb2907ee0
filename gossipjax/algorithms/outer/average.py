"""When an outer optimizer averages which fragment, and the average over all nodes or by a round."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from gossipjax.collectives import MeanOver, StepLike, exact_average, mean_of_encoded, mix
from gossipjax.exchanges.fragments import Fragment, LayerFragments, split_leaves
from gossipjax.exchanges.state import DEFAULT_WIRE, ExchangePlan, subtract
from gossipjax.serialization import written_by_flax
from gossipjax.sharding import on_shards, specs_here
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire

Average = Schedule | ExchangePlan | Literal["exact", "none"]
Shares = tuple[float, ...] | Literal["counted"] | None


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OuterPlan:
    """When an outer optimizer averages which fragment: arguments of `gx.outer`."""

    every: int
    average: Average = "exact"  # or the plan of the gossip in its place
    fragments: int | LayerFragments = 1
    delay: int = 0
    mix: float = 0.0
    pull: float = 1.0
    wire: Wire = DEFAULT_WIRE
    error_feedback: float | None = None
    mean_over: MeanOver = "nodes"
    shares: Shares = None  # `N p_i` of each node, of mean 1; None if nodes count alike

    @property
    def schedule(self) -> Schedule | None:
        """The rounds of the periods; None if all nodes average at once, or none does."""
        if isinstance(self.average, ExchangePlan):
            return self.average.schedule
        return self.average if isinstance(self.average, Schedule) else None

    @property
    def fragment_count(self) -> int:
        """p."""
        return self.fragments if isinstance(self.fragments, int) else self.fragments.count

    def split(self, tree: Any) -> list[Fragment]:
        """The parts of a tree like the parameters that are in each fragment."""
        if isinstance(self.fragments, int):
            return split_leaves(tree, self.fragments)
        return self.fragments.split(tree)

    @property
    def replaces_all(self) -> bool:
        """Whether an outer step replaces the averaged models completely."""
        return self.average == "exact" and self.fragment_count == 1 and self.mix == 0

    def skips_exchange(self, step: StepLike) -> bool:
        """Whether the inner gossip may skip its exchange at `step`, if tracing knows the step.

        The exchange would not change the average over all nodes, and the outer step then replaces
        all models, weights and messages.
        """
        is_known = isinstance(step, int | np.integer)
        return self.replaces_all and not self.delay and is_known and bool(self.is_used(0, step))

    @property
    def can_run_beside(self) -> bool:
        """Whether an average can run during the steps between sending and using a fragment."""
        return self.delay > 0 and self.average != "none"

    def is_sent(self, fragment: int, step: Any) -> Any:
        """Whether the fragment's outer gradient is taken at the end of `step`."""
        offset = (fragment + 1) * self.every // self.fragment_count
        return (step + 1 - offset) % self.every == 0

    def is_used(self, fragment: int, step: Any) -> Any:
        """Whether the average that was sent `delay` steps before is used at the end of `step`."""
        return self.is_sent(fragment, step - self.delay) & (step >= self.delay)

    def sent_at(self, step: int) -> int | None:
        """The fragment whose outer gradient is taken at the end of `step`."""
        return next((f for f in range(self.fragment_count) if self.is_sent(f, step)), None)

    def used_at(self, step: int) -> int | None:
        """The fragment whose average is used at the end of `step`."""
        return next((f for f in range(self.fragment_count) if self.is_used(f, step)), None)

    def round_number(self, step: StepLike) -> StepLike:
        """The round of the schedule for the average that is used at the end of `step`."""
        return (step - self.delay) // self.every

    def role(self, step: int) -> tuple[int | None, int | None, int | None]:
        """What happens at the end of `step`: the fragments sent and used, and the round."""
        used = self.used_at(step)
        round_ = None
        if used is not None and self.schedule is not None:
            round_ = self.schedule.index_at(int(self.round_number(step)))
        return self.sent_at(step), used, round_

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on the roles repeat, and after how many steps."""
        start, length = ExchangePlan(self.schedule).cycle
        return self.delay + self.every * start, self.every * length


class OuterState(NamedTuple):
    """State of `gx.outer` for one node."""

    count: Any  # int32 scalar, the number of updates so far
    inner: Any  # the state of the inner chain
    # A `GossipState` with residuals, if the inner chain contains no gossip, else None. If a gossip
    # replaces the average, its state.
    local: Any
    # The model after the last outer step, float32 at least, by fragment: p trees like the
    # parameters, each with its fragment. With `average="exact"` equal on all nodes.
    anchor: Any
    outer: Any  # the state of the outer optimizer, by fragment
    sent: Any  # this node's outer gradients, like `anchor`, until they are used; None without delay
    # int32 `[p]`, the number of updates before the update that sent each fragment; -1 if no average
    # is waiting; None without delay.
    sent_counts: Any
    plan: Any  # static: the `OuterPlan`
    error: Any = None  # what messages have left out, like `anchor`; None without error feedback
    counted: Any = None  # float32 `[p]`, the sum of this node's weights since the last averages


def average_fragment(
    plan: OuterPlan, sent: Any, anchor: Any, step: StepLike, count: jax.Array
) -> tuple[Any, Any]:
    """The outer gradient `D` of the fragment that is used at `step`, averaged over what nodes sent.

    With error feedback it also returns what this node's message leaves out, else None.

    `count` is the number of updates before the update that sent the fragment. It is the key of a
    codec that draws random numbers.
    """
    if plan.average == "none" or isinstance(plan.average, ExchangePlan):
        return sent, None
    round_number = plan.round_number(step)
    average = partial(_average_parts, plan)
    args = (sent, anchor, count, round_number)
    specs = specs_here()
    if specs is None:
        return average(*args)
    in_specs = specs.of(args, sent)
    out_specs = in_specs[0], None if plan.error_feedback is None else in_specs[0]
    return on_shards(average, specs, plan.wire.axis_name, in_specs, out_specs)(*args)


def _average_parts(
    plan: OuterPlan, sent: Any, anchor: Any, count: jax.Array, round_number: StepLike
) -> tuple[Any, Any]:
    key = plan.wire.make_key(count)
    if plan.error_feedback is not None:
        return mean_of_encoded(sent, plan.wire, key, plan.mean_over)
    if plan.average == "exact":
        return exact_average(sent, plan.wire, key, is_beside=plan.delay > 0), None
    assert isinstance(plan.average, Schedule)
    mix_nodes = partial(
        mix,
        weight=None,
        schedule=plan.average,
        step=round_number,
        **plan.wire.arguments(),
        key=key,
    )
    if plan.pull == 1:
        return subtract(anchor, mix_nodes(subtract(anchor, sent))[0]), None
    mean, center = mix_nodes((sent, anchor))[0]
    return jax.tree.map(lambda d, a, c: d + plan.pull * (a - c), mean, anchor, center), None


def average_sent(state: OuterState, step: int) -> Any:
    """The average of the fragment that is used at `step`, from outer gradients in the state.

    It needs no result of the steps since the fragment was sent, so it can be a separate program:
    `tx.update(..., step=step, outer_average=average_sent(state, step))`.
    """
    fragment = state.plan.used_at(step)
    assert fragment is not None
    sent, anchor = state.sent[fragment], state.anchor[fragment]
    return average_fragment(state.plan, sent, anchor, step, state.sent_counts[fragment])[0]
