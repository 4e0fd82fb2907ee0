"""Which program a step of a chain needs. The plans in the state of the chain decide.

A chain contains at most one gossip state, inside `gx.outer` or not. The states of the gossip and of
`gx.outer` each contain a plan as static data, and a `StepPlan` contains both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from gossipjax.algorithms.outer.average import OuterPlan, OuterState
from gossipjax.collectives import group_rounds
from gossipjax.exchanges.state import (
    MAX_STEPS,
    ErrorFeedback,
    ExchangePlan,
    GossipState,
)

LEAF = jax.tree.structure(0)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Everything that decides which program a step needs: gossip rounds and outer steps."""

    exchange: ExchangePlan
    outer: OuterPlan | None = None
    is_local: bool = False  # whether the inner chain contains no gossip

    @functools.cached_property
    def is_one_program(self) -> bool:
        """Whether a traced step gives one program without branches, if nodes are simulated."""
        schedule = self.exchange.schedule
        if schedule is None or self.outer is not None or self.exchange.overlap > 1:
            return False
        return len(group_rounds(schedule)) == 1

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on everything repeats, and after how many steps."""
        start, length = self.exchange.cycle
        if self.outer is None:
            return start, length
        outer_start, outer_length = self.outer.cycle
        return max(start, outer_start), math.lcm(length, outer_length)

    def goes_on_alike(self, step: int, other: int) -> bool:
        """Whether the steps from `step` on equal the steps from `other` on."""
        start, length = self.cycle
        return step == other or (min(step, other) >= start and (step - other) % length == 0)

    def canonical_step(self, step: int) -> int:
        """The smallest step with the same compiled program as `step`; see `gx.canonical_step`."""
        canonical = self.exchange.canonical_step(step)
        if self.outer is None:
            return canonical
        start, length = self.cycle
        if start + length > MAX_STEPS:
            return int(step)
        steps = _canonical_steps(self.exchange, self.outer)
        return steps[step if step < start else start + (step - start) % length]

    @property
    def canonical_steps(self) -> tuple[int, ...] | range:
        """All values that `canonical_step` returns, if there are at most `MAX_STEPS`."""
        if self.outer is None:
            return self.exchange.canonical_steps
        if sum(self.cycle) > MAX_STEPS:
            return range(MAX_STEPS)
        return tuple(sorted(set(_canonical_steps(self.exchange, self.outer))))


@functools.lru_cache(64)
def _canonical_steps(exchange: ExchangePlan, outer: OuterPlan) -> list[int]:
    """The canonical step of each step, up to the end of the first cycle of both plans."""
    start, length = exchange.cycle
    rounds = [exchange.canonical_step(k) for k in range(start + length)]
    first: dict[Any, int] = {}
    steps = []
    for step in range(sum(StepPlan(exchange, outer).cycle)):
        number = rounds[step if step < start else start + (step - start) % length]
        steps.append(first.setdefault((number, outer.role(step)), step))
    return steps


def find_parts(tree: Any, *kinds: type) -> list[Any]:
    """Finds the states of these kinds in a tree, but not states inside of a found state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, kinds))
    return [part for part in leaves if isinstance(part, kinds)]


def outer_state(opt_state: optax.OptState) -> OuterState | None:
    """The state of `gx.outer` inside the state of a chain; None if there is none."""
    return next(iter(find_parts(opt_state, OuterState)), None)


def gossip_state(opt_state: optax.OptState) -> GossipState | None:
    """Returns the gossip state inside the state of a chain; None if there is none.

    Raises:
      ValueError: if the chain contains several gossip states, `opt_state` is None, or the gossip is
        inside a wrapper of optax that skips updates by what one node sees.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.ring(4), overlap=2))
    >>> state = gx.gossip_state(tx.init(jnp.zeros(3)))
    >>> state.schedule == gx.topology.ring(4), state.overlap
    (True, 2)
    """
    if opt_state is None:
        raise ValueError("opt_state must be what tx.init returns, got None.")
    states = _find_states(opt_state)
    if len(states) > 1:
        raise ValueError(
            f"an optimizer state must hold one gossip state at most, got {len(states)}: a chain "
            "has one gossip transform. Pass the part of the state that is meant."
        )
    return states[0] if states else None


def _find_states(opt_state: optax.OptState) -> list[GossipState]:
    states = []
    for part in jax.tree.leaves(
        opt_state, is_leaf=lambda part: isinstance(part, GossipState) or _skips_by_node(part)
    ):
        if isinstance(part, GossipState):
            states.append(part)
        elif _skips_by_node(part) and any(_find_states(inner) for inner in part):
            raise ValueError(
                "gossip must not stand inside optax.apply_if_finite or optax.MultiSteps with "
                "should_skip_update_fn, as nodes that decide by their own gradients would wait for "
                f"each other, got {type(part).__name__} around it: use gx.apply_if_finite, or put "
                "it before the gossip in the chain."
            )
    return states


def _skips_by_node(part: Any) -> bool:
    """Whether the state belongs to a wrapper that skips updates by what one node alone sees."""
    if isinstance(part, optax.MultiStepsState):
        return bool(jax.tree.leaves(part.skip_state))
    return type(part) is optax.ApplyIfFiniteState


def require_order(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if the state of a chain shows that its parts are in a wrong order.

    An optimizer must come neither after the gossip, nor before a part that needs gradients:
    `gx.allreduce`, `gx.outer`, or a gossip that is the optimizer itself. It also raises if a chain
    averages over the axis of its gossip. It cannot see transforms without a state, such as
    `optax.scale`.
    """
    for chain, place, exchange in _find_exchanges(opt_state):
        if isinstance(exchange, ErrorFeedback):
            if before := find_optimizer(chain[:place], keeps_arrays=True):
                raise ValueError(
                    "gx.allreduce must go first in a chain, as it averages gradients, got "
                    f"{before} before it: optax.chain(gx.allreduce(), optimizer)."
                )
            continue
        parts = chain[place + 1 :]
        after = next(filter(None, map(_describe, parts)), None) or find_optimizer(parts)
        if after is not None:
            raise ValueError(
                "gossip must be last in a chain, as its updates must reach the parameters as they "
                f"are, got {after} after it: optimizers go before, optax.chain(optimizer, gossip)."
            )
        is_outer = isinstance(exchange, OuterState)
        if is_outer or exchange.plan.takes_gradients:
            name = "gx.outer" if is_outer else "gossip that is the optimizer"
            if before := find_optimizer(chain[:place]):
                raise ValueError(
                    f"{name} must get gradients, got the updates of {before} before it: "
                    + ("put it inside, gx.outer(optimizer, ...)." if is_outer else "leave it out.")
                )
    _require_one_exchange(opt_state)


def _require_one_exchange(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if a chain averages gradients over all nodes and gossips models too."""
    # What `optax.masked` stands around is of other parameters, perhaps.
    kinds = (ErrorFeedback, GossipState, OuterState, optax.MaskedState, optax.PartitionState)
    for chain, _, exchange in _find_exchanges((opt_state,)):
        if isinstance(exchange, ErrorFeedback):
            continue
        inner = exchange.inner if isinstance(exchange, OuterState) else ()
        for part in find_parts((chain, inner), *kinds):
            axis_name = exchange.plan.wire.axis_name
            if isinstance(part, ErrorFeedback) and part.plan.wire.axis_name == axis_name:
                raise ValueError(
                    f"a chain must exchange over {axis_name!r} once, got gx.allreduce in one with "
                    "gossip or gx.outer: all nodes stay equal, and both are paid for. Leave one of "
                    'them out, or average inside a node, gx.allreduce("local").'
                )


def find_optimizer(parts: tuple[Any, ...], keeps_arrays: bool = False) -> str | None:
    """The types of the first optimizer's states in parts of a chain; None if there is none.

    An optimizer of optax is a chain, so its state is a tuple of states; clipping, decay and noise
    are not chains.
    """

    def is_optimizer(part: Any) -> bool:
        if type(part) is not tuple:
            name = type(part).__name__
            return name == "TraceState" or name.startswith("ScaleBy")
        is_chain = bool(part) and all(isinstance(state, tuple) for state in part)
        return is_chain and bool(jax.tree.leaves(part) or not keeps_arrays)

    for part in parts:
        for state in jax.tree.leaves(part, is_leaf=is_optimizer):
            if is_optimizer(state):
                return _describe(state) or "an optimizer without momentum"
    return None


def _describe(state: Any) -> str:
    """The types of the states in a part of a chain that have arrays."""
    parts = state if type(state) is tuple else (state,)
    return ", ".join(type(part).__name__ for part in parts if jax.tree.leaves(part))


def _find_exchanges(tree: Any) -> Iterator[tuple[tuple[Any, ...], int, Any]]:
    """Finds, in each chain of transforms, the parts that exchange: states, place, own state."""
    if isinstance(tree, GossipState | ErrorFeedback) or jax.tree.structure(tree) == LEAF:
        return
    for place, part in enumerate(tree if type(tree) is tuple else ()):
        for exchange in find_parts(part, ErrorFeedback, GossipState, OuterState):
            yield tree, place, exchange
    for child in jax.tree.leaves(tree, is_leaf=lambda part: part is not tree):
        yield from _find_exchanges(child)


def replace_gossip_state(opt_state: optax.OptState, **fields: Any) -> Any:
    """Returns the state of a chain with new values in these fields of its gossip state."""

    def replace(part: Any) -> Any:
        return part._replace(**fields) if isinstance(part, GossipState) else part

    return jax.tree.map(replace, opt_state, is_leaf=lambda part: isinstance(part, GossipState))


def exchange_plan(opt_state: optax.OptState) -> ExchangePlan:
    """The plan in the state of a chain; without gossip, the plan of a static all-reduce."""
    state = gossip_state(opt_state)
    return ExchangePlan() if state is None else state.plan


def step_plan(opt_state: optax.OptState) -> StepPlan:
    """Checks the state of a chain; returns the plan that decides which program a step needs."""
    return _plan_of(jax.tree.structure(opt_state))


# A training loop asks at every step, and a look through a thousand leaves takes milliseconds. Plans
# are static data of the structure, which is a key: its leaves may be anything.
@functools.lru_cache(256)
def _plan_of(structure: Any) -> StepPlan:
    opt_state = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    exchange = exchange_plan(opt_state)
    require_order(opt_state)
    require_updates_numbered(opt_state)
    outer = outer_state(opt_state)
    if outer is None:
        return StepPlan(exchange)
    if outer.local is not None:  # it exchanges at outer steps only
        return StepPlan(ExchangePlan(), outer.plan, True)
    return StepPlan(exchange, outer.plan)


def require_updates_numbered(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if step numbers differ from the numbers of the gossip's updates.

    They differ inside `optax.MultiSteps`. It also raises if `MultiSteps` hands zeros to a gossip
    that needs a gradient in every update.
    """
    for part in find_parts(opt_state, optax.MultiStepsState):
        if find_parts(part.inner_opt_state, GossipState):
            raise ValueError(
                "gossip must not stand inside optax.MultiSteps where steps are numbered, as the "
                "number of a step is not that of an update, got MultiStepsState around it: use "
                "gx.accumulate_gradients(gradients, every), or leave step out."
            )
    for chain, place, exchange in _find_exchanges(opt_state):
        moves = any(part.plan.moves_by_zeros for part in find_parts(exchange, GossipState))
        if moves and find_parts(chain[:place], optax.MultiStepsState):
            raise ValueError(
                "every update must carry a gradient where the gossip keeps a correction, a "
                "momentum or messages that move at each, got optax.MultiSteps before it, which "
                "hands on zeros in between: use gx.accumulate_gradients(gradients, every)."
            )


def canonical_step(opt_state: optax.OptState, step: int) -> int:
    """Maps a step number to a static one: steps that need the same program get the same number.

    The result is the smallest step number with the same round, the same outer step (if there are
    any), and, under overlap, the same rounds at the `overlap` steps before. Without an exchange the
    result is 0.

    Args:
      opt_state: the state of a chain, of one node or node-stacked.
      step: the number of the step, an integer from 0.

    Raises:
      ValueError: if `step` is negative or not an integer, the chain contains several gossip
        transforms or parts in a wrong order, or steps and updates are numbered differently, as
        inside `optax.MultiSteps`. The function warns if steps start anew while the state counts on.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> state = gx.sgp(gx.topology.one_peer_exponential(8)).init(jnp.zeros(3))
    >>> [gx.canonical_step(state, k) for k in range(5)]
    [0, 1, 2, 0, 1]
    """
    plan = step_plan(opt_state)
    canonical = plan.canonical_step(step)
    # The count is read only if a loop goes back, because the host then waits for the last step.
    last = _last_step(plan)
    if step < last[0]:
        try:
            start_at(opt_state, step)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    last[0] = step
    return canonical


@functools.lru_cache(256)
def _last_step(plan: StepPlan) -> list[int]:
    """A list with the step for which this plan was last asked; the caller updates the list."""
    del plan
    return [0]


def canonical_steps(opt_state: optax.OptState) -> list[int]:
    """All values of `canonical_step`, one for each program that a training loop compiles.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> gx.canonical_steps(gx.osgp(gx.topology.one_peer_exponential(4)).init(jnp.zeros(3)))
    [0, 1]
    """
    return list(step_plan(opt_state).canonical_steps)


def start_at(opt_state: optax.OptState, step: int) -> Any:
    """Returns the state with a count that continues from `step`, if a loop starts or jumps there.

    A state counts its updates. A smaller step therefore means that a loop counts from 0 again, and
    its rounds and outer steps start anew before all of them have come. Under overlap, the round of
    the step before delivers the messages in flight, so a state that has counted updates must
    continue at its own count, and cannot skip steps either. A state without updates can start at
    any step. The function reads the count on the host, so call it only at a start or a jump.
    """
    outer = outer_state(opt_state)
    gossip = gossip_state(opt_state)
    plan = step_plan(opt_state)
    overlapped = gossip if gossip is not None and gossip.overlap else None
    if plan.cycle == (0, 1) and overlapped is None:  # all steps are alike
        return opt_state
    state = overlapped or outer or gossip
    assert state is not None
    count = state.count
    if isinstance(count, Tracer | jax.ShapeDtypeStruct):
        return opt_state
    if isinstance(count, jax.Array):
        count = jax.device_get(count.addressable_data(0))
    count = int(np.max(np.asarray(count)))
    if count == step:
        return opt_state
    if count == 0 and overlapped is not None:
        return replace_gossip_state(opt_state, count=overlapped.count + np.int32(step))
    if count > step and not plan.goes_on_alike(step, count):
        raise ValueError(
            f"step must be {count} or more, as the state has counted {count} updates, got "
            f"{step}, from which on rounds and outer steps would come again before those that are "
            "due: count through, step = epoch * steps_per_epoch + k. A new run starts with a new "
            "state, and one that is resumed at the step at which its state was saved."
        )
    exchange = plan.exchange
    if overlapped and exchange.canonical_step(step) != exchange.canonical_step(count):
        raise ValueError(
            f"step must be {count}, or one with the same rounds before it, as the state of "
            f"an algorithm with overlap has counted {count} updates and its messages in flight are "
            f"delivered by the round before, got {step}: pass the step at which the state was "
            "saved, or start from the average model by gossipjax.checkpoint.change_nodes."
        )
    return opt_state
