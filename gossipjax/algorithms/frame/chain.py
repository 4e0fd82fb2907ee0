"""The gossip state inside the state of a chain, and the steps that its plan asks for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from gossipjax.algorithms.frame.accumulation import accumulation_plan, accumulation_state
from gossipjax.algorithms.frame.state import ExchangePlan, GossipState
from gossipjax.algorithms.outer.plan import OuterPlan, OuterState, StepPlan
from gossipjax.last import takes_gradients
from gossipjax.sharding import ShardedState
from gossipjax.traced import traced_arguments


def gossip_state(opt_state: optax.OptState) -> GossipState | None:
    """Returns the gossip state inside the state of a chain; None if there is none.

    Raises:
      ValueError: if there are several, it stands inside `optax.apply_if_finite` or an
        `optax.MultiSteps` with `should_skip_update_fn`, on which the nodes do not agree, or
        `opt_state` is None.

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
    for part in jax.tree.leaves(opt_state, is_leaf=_ends_search):
        if isinstance(part, GossipState):
            states.append(part)
        elif _skips_by_node(part):
            inside = [state for inner in part for state in _find_states(inner)]
            if inside:
                raise ValueError(
                    "gossip must not stand inside optax.apply_if_finite or optax.MultiSteps with "
                    "should_skip_update_fn, as nodes that decide by their own gradients would wait "
                    f"for each other, got {type(part).__name__} around it: use "
                    "gx.apply_if_finite, or put it before the gossip in the chain."
                )
    return states


def _skips_by_node(part: Any) -> bool:
    """Whether the state is of a wrapper that skips updates by what one node alone sees."""
    if is_multi_steps(part):
        return bool(jax.tree.leaves(part.skip_state))
    return type(part) is optax.ApplyIfFiniteState


def _ends_search(part: Any) -> bool:
    return isinstance(part, GossipState) or _skips_by_node(part)


def require_no_momentum(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if momentum stands before a gossip that is the optimizer itself."""
    for part in jax.tree.leaves(opt_state, is_leaf=_is_chain_of_gossip):
        if not _is_chain_of_gossip(part):
            continue
        place = _place_of_gossip(part)
        before = jax.tree.leaves(part[:place], is_leaf=_is_momentum)
        if takes_gradients(part[place]) and any(map(_is_momentum, before)):
            raise ValueError(
                "gossip that is the optimizer must get gradients, got updates of one with momentum "
                "before it: leave that out."
            )


def _is_chain_of_gossip(part: Any) -> bool:
    return type(part) is tuple and any(_as_gossip(state) is not None for state in part)


def _place_of_gossip(chain: tuple[Any, ...]) -> int:
    return next(i for i, state in enumerate(chain) if _as_gossip(state) is not None)


def _as_gossip(state: Any) -> GossipState | None:
    """The gossip state that stands in this place of a chain, by itself or inside `gx.sharded`."""
    inner = state.inner if isinstance(state, ShardedState) else state
    return inner if isinstance(inner, GossipState) else None


def _is_momentum(part: Any) -> bool:
    return isinstance(part, optax.TraceState | optax.ScaleByAdamState)


def replace_gossip_state(opt_state: optax.OptState, **fields: Any) -> Any:
    """Returns the state of a chain with these fields of its gossip state replaced."""

    def replace(part: Any) -> Any:
        return part._replace(**fields) if isinstance(part, GossipState) else part

    return jax.tree.map(replace, opt_state, is_leaf=lambda part: isinstance(part, GossipState))


def exchange_plan(opt_state: optax.OptState) -> ExchangePlan:
    """The plan in the state of a chain; without gossip, that of a static all-reduce."""
    state = gossip_state(opt_state)
    return ExchangePlan() if state is None else state.plan


def outer_state(opt_state: optax.OptState) -> OuterState | None:
    """The state of `gx.outer` inside the state of a chain; None if there is none."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_outer)
    return next(filter(_is_outer, leaves), None)


def _is_outer(part: Any) -> bool:
    return isinstance(part, OuterState)


def step_plan(opt_state: optax.OptState) -> StepPlan:
    """What decides which program a step of this chain needs.

    Raises:
      ValueError: as `require_updates_numbered`.
    """
    exchange = exchange_plan(opt_state)
    require_updates_numbered(opt_state)
    accumulation = accumulation_plan(opt_state)
    outer = outer_state(opt_state)
    if outer is None:
        return StepPlan(exchange, accumulation=accumulation)
    return StepPlan(exchange, outer.plan, outer.local is not None, accumulation)


def require_updates_numbered(opt_state: optax.OptState) -> None:
    """Raises `ValueError` where the number of a step is not that of an update of the gossip.

    So it is inside `optax.MultiSteps`, and beside `gx.accumulate`. Also where `MultiSteps` hands
    zeros to a gossip whose every update must carry a gradient.
    """
    for part in filter(_exchanges, jax.tree.leaves(opt_state, is_leaf=_exchanges)):
        _require_updates_numbered(opt_state, part.plan, is_numbered=True)


def require_updates_numbered_here(plan: ExchangePlan | OuterPlan, step: Any) -> None:
    """`require_updates_numbered` of the states that the program has got that is being traced.

    Args:
      plan: of the transform that asks.
      step: that it was given; without one it counts its updates.
    """
    _require_updates_numbered(traced_arguments(), plan, is_numbered=step is not None)


def _require_updates_numbered(tree: Any, plan: ExchangePlan | OuterPlan, is_numbered: bool) -> None:
    for part in filter(is_multi_steps, jax.tree.leaves(tree, is_leaf=is_multi_steps)):
        if is_numbered and _holds(part.inner_opt_state, plan):
            raise ValueError(
                "gossip must not stand inside optax.MultiSteps where steps are numbered, as the "
                "number of a step is not that of an update, got MultiStepsState around it: use "
                "gx.accumulate(tx, every), or leave step out."
            )
    for chain in filter(_is_chain_of_gossip, jax.tree.leaves(tree, is_leaf=_is_chain_of_gossip)):
        place = _place_of_gossip(chain)
        gossip = _as_gossip(chain[place])
        if gossip is None or gossip.plan != plan:
            continue
        if accumulation_state(chain) is not None:
            raise ValueError(
                "gossip must stand inside gx.accumulate, got it beside: it would exchange at every "
                "step. Write gx.accumulate(optax.chain(optimizer, gossip), every)."
            )
        before = jax.tree.leaves(chain[:place], is_leaf=is_multi_steps)
        if gossip.plan.moves_by_zeros and any(map(is_multi_steps, before)):
            raise ValueError(
                "every update must carry a gradient where the gossip keeps a correction, a "
                "momentum or messages that move at each, got optax.MultiSteps before it, which "
                "hands on zeros in between: use gx.accumulate_gradients(gradients, every), or "
                "gx.accumulate(tx, every) around the whole chain."
            )


def is_multi_steps(part: Any) -> bool:
    """Whether this is the state of `optax.MultiSteps`."""
    return isinstance(part, optax.MultiStepsState)


def _exchanges(part: Any) -> bool:
    return isinstance(part, GossipState | OuterState)


def _holds(tree: Any, plan: ExchangePlan | OuterPlan) -> bool:
    """Whether there is a state of this plan, not one inside `gx.outer`, which numbers its steps."""
    parts = filter(_exchanges, jax.tree.leaves(tree, is_leaf=_exchanges))
    return any(part.plan == plan for part in parts)


def canonical_step(opt_state: optax.OptState, step: int) -> int:
    """The static step number of a training loop: equal for steps that need the same program.

    It is the smallest number with the same round at it and, under overlap, at the `overlap` steps
    before it, and with the same outer step, if there is one; 0 for a chain without either, and
    under `gx.accumulate` for steps that make no update. Pass it as the static `step` of a train
    step, and one program is compiled per distinct round.

    Args:
      opt_state: the state of a chain, of one node or node-stacked.
      step: the number of the step, an integer from 0.

    Raises:
      ValueError: if `step` is negative or not an integer, the chain holds several gossip
        transforms, or steps are not numbered as updates are: inside `optax.MultiSteps`.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> state = gx.sgp(gx.topology.one_peer_exponential(8)).init(jnp.zeros(3))
    >>> [gx.canonical_step(state, k) for k in range(5)]
    [0, 1, 2, 0, 1]
    """
    return step_plan(opt_state).canonical_step(step)


def canonical_steps(opt_state: optax.OptState) -> list[int]:
    """All values of `canonical_step`: one per program that a training loop compiles.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> gx.canonical_steps(gx.osgp(gx.topology.one_peer_exponential(4)).init(jnp.zeros(3)))
    [0, 1]
    """
    return list(step_plan(opt_state).canonical_steps)


def start_at(opt_state: optax.OptState, step: int) -> Any:
    """Returns the state of a loop that starts or jumps to `step`: its count follows from now on.

    A state has counted its updates, so a smaller step is one of a loop that counts from 0 again:
    its rounds, and outer steps, start anew before they have all come. Under overlap the messages in
    flight are delivered by the round before, so a state that has counted updates must go on where
    it was, forwards as well. One that has counted none starts at any step. Reads the count on the
    host: call it where a loop starts or jumps, not at every step.

    Raises:
      ValueError: if the state has counted more updates than `step` and other steps than those due
        would follow, or messages in flight would be delivered by another round than their own.
    """
    accumulation = accumulation_state(opt_state)
    every = 1 if accumulation is None else accumulation.plan.every
    update = step // every
    pending = 0 if accumulation is None else _read_count(accumulation.pending)
    if pending not in (0, step % every, None):
        raise ValueError(
            f"step must be that at which the state was saved, one after {pending} others of its "
            f"update, got {step}: their gradients would go into another update. Count through, "
            "step = epoch * steps_per_epoch + k."
        )
    outer = outer_state(opt_state)
    gossip = gossip_state(opt_state)
    plan = step_plan(opt_state).of_updates
    overlapped = gossip if gossip is not None and gossip.overlap else None
    if plan.cycle == (0, 1) and overlapped is None:  # all steps are alike
        return opt_state
    state = overlapped or outer or gossip
    assert state is not None
    count = _read_count(state.count)
    if count is None or count == update:
        return opt_state
    if count == 0 and overlapped is not None:
        return replace_gossip_state(opt_state, count=overlapped.count + np.int32(update))
    if count > update and not plan.goes_on_alike(update, count):
        raise ValueError(
            f"step must be {count * every} or more, as the state has counted {count} updates, got "
            f"{step}, from which on rounds and outer steps would come again before those that are "
            "due: count through, step = epoch * steps_per_epoch + k. A new run starts with a new "
            "state, and one that is resumed at the step at which its state was saved."
        )
    exchange = plan.exchange
    if overlapped and exchange.canonical_step(update) != exchange.canonical_step(count):
        raise ValueError(
            f"step must be {count * every}, or one with the same rounds before it, as the state of "
            f"an algorithm with overlap has counted {count} updates and its messages in flight are "
            f"delivered by the round before, got {step}: pass the step at which the state was "
            "saved, or start from the average model by gossipjax.checkpoint.change_nodes."
        )
    return opt_state


def _read_count(count: Any) -> int | None:
    """The number of updates of all nodes; None if it is traced."""
    if isinstance(count, Tracer):
        return None
    if isinstance(count, jax.Array):
        count = jax.device_get(count.addressable_data(0))
    return int(np.max(np.asarray(count)))
