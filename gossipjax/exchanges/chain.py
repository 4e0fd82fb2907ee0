"""Finds what exchanges inside the state of a chain, and checks what a chain's states can show.

A chain exchanges models once. The state that does so may wrap the rest of the chain, and a
`GossipState` may be inside it.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
from jax.core import Tracer

from gossipjax.collectives import StepLike
from gossipjax.exchanges.plan import ExchangePlan, Plan
from gossipjax.exchanges.state import Exchanging, GossipState
from gossipjax.exchanges.weighted import WeightedState
from gossipjax.sharding import shard_specs
from gossipjax.wire import Wire

LEAF = jax.tree.structure(0)
# States of optax that prove an optimizer or a momentum. Other states are allowed everywhere: they
# may only watch, count or average.
_NAMES = ("COCOB", "DAdaptAdamW", "DoG", "DoWG", "Factored", "GaLore", "Hutchinson", "Madgrad")
_NAMES += ("Mechanic", "Momo", "MomoAdam", "Muon", "Prodigy", "ScheduleFree", "Sophia", "Trace")
OPTIMIZERS = tuple(
    kind
    for module in (optax, optax.contrib)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and (name.startswith("ScaleBy") or name[:-5] in _NAMES)
    and kind is not optax.EmptyState  # of LAMB's trust ratio, and of many others
)
MASKS = (optax.MaskedState, optax.PartitionState)


def find_parts(tree: Any, *kinds: type) -> list[Any]:
    """Finds the states of these kinds in a tree, but not states inside of a found state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, kinds))
    return [part for part in leaves if isinstance(part, kinds)]


def find_exchanging(tree: Any) -> list[Any]:
    """Finds all states that exchange; a state that wraps others comes before them."""
    found = []
    for part in find_parts(tree, Exchanging):
        # A state that wraps a chain may keep more states that exchange, in any of its fields.
        fields = tuple(part) if part.inner is not None else ()
        found += [part, *find_exchanging(fields)]
    return found


def find_exchange(opt_state: optax.OptState) -> Any:
    """Returns the state in a chain that exchanges models, with all it wraps; None if none does."""
    found = find_parts(opt_state, Exchanging)
    return next((state for state in found if state.mixes_models), None)


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
    _require_no_skips(opt_state)
    states = find_parts(opt_state, GossipState)
    if len(states) > 1:
        raise ValueError(
            f"an optimizer state must hold one gossip state at most, got {len(states)}: a chain "
            "has one gossip transform. Pass the part of the state that is meant."
        )
    return states[0] if states else None


def _require_no_skips(tree: Any) -> None:
    """Raises `ValueError` if gossip is inside a wrapper that skips updates by what a node sees."""
    for part in find_parts(tree, optax.MultiStepsState, optax.ApplyIfFiniteState):
        if isinstance(part, optax.MultiStepsState):
            skips = bool(jax.tree.leaves(part.skip_state))
        else:
            skips = type(part) is optax.ApplyIfFiniteState  # gx.apply_if_finite has a subclass
        if skips and find_parts(tuple(part), GossipState):
            raise ValueError(
                "gossip must not stand inside optax.apply_if_finite or optax.MultiSteps with "
                "should_skip_update_fn, as nodes that decide by their own gradients would wait for "
                f"each other, got {type(part).__name__} around it: use gx.apply_if_finite, or put "
                "it before the gossip in the chain."
            )
        _require_no_skips(tuple(part))


def require_order(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if states of a chain prove that its parts are in a wrong order.

    An optimizer or a momentum of optax must come neither after the gossip, nor before a part that
    needs gradients. `gx.weighted` must come directly before an exchange. A chain must not average
    gradients over the axis of its gossip. Parts of other kinds are allowed everywhere.
    """
    for chain, inside in _find_chains(opt_state, None):
        for i, part in enumerate(chain):
            if isinstance(part, WeightedState):
                _require_next_exchange(chain[i + 1 :], inside)
            outside_masks = find_parts(part, Exchanging, *MASKS)
            for exchange in find_parts(part, Exchanging):
                # If the exchange is masked, an optimizer in a mask may be of other parameters.
                is_masked = not any(exchange is state for state in outside_masks)
                ignored = MASKS if is_masked else ()
                _require_position(exchange, chain[:i], chain[i + 1 :], ignored)
    _require_one_exchange(opt_state)


def _require_position(
    exchange: Any, before: list[Any], after: list[Any], ignored: tuple[type, ...]
) -> None:
    """Raises `ValueError` if an optimizer stands on the wrong side of `exchange` in its chain.

    `before` and `after` are the states of its other parts; those of `ignored` kinds may be there.
    """
    late = _find_optimizer(after, ignored)
    if exchange.mixes_models and late:
        raise ValueError(
            "gossip must be last in a chain, as its updates must reach the parameters as they "
            f"are, got {late} after it: optimizers go before, optax.chain(optimizer, gossip)."
        )
    # A schedule may scale gradients before they are exchanged.
    early = _find_optimizer(before, (optax.ScaleByScheduleState, *ignored))
    if exchange.mixes_models and exchange.plan.takes_gradients and early:
        raise ValueError(
            f"the exchange must get gradients, got the updates of {early} before it: gossip that "
            "is the optimizer replaces it, and gx.outer(optimizer, ...) wraps it."
        )
    if not exchange.mixes_models and early:
        raise ValueError(
            f"gx.allreduce must go first in a chain, as it averages gradients, got {early} before "
            "it: optax.chain(gx.allreduce(), optimizer)."
        )


def _require_next_exchange(after: list[Any], inside: Any) -> None:
    """Raises `ValueError` unless an exchange follows on `gx.weighted`, before any optimizer.

    `after` are the states behind `gx.weighted` in its chain. `inside` is the exchanging state whose
    outer step follows on the chain; None if nothing does.
    """
    known = find_parts(after, Exchanging, WeightedState, *OPTIMIZERS)
    # After the last part of a chain inside gx.outer comes the outer step.
    following = known[0] if known else inside
    if not isinstance(following, Exchanging):
        got = "nothing that exchanges" if following is None else type(following).__name__
        raise ValueError(
            "gx.weighted must stand directly before the gossip, or first before gx.allreduce, got "
            f"{got} behind it, which undoes the weights: optax.chain(optimizer, "
            "gx.weighted(n), gossip) or optax.chain(gx.weighted(n), gx.allreduce(), optimizer)."
        )


def _require_one_exchange(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if a chain averages gradients over all nodes and gossips models too."""
    if all(part.mixes_models for part in find_exchanging(opt_state)):
        return  # nothing averages gradients
    for chain, _ in _find_chains((opt_state,), None):
        for exchange in find_parts(chain, Exchanging):
            if not exchange.mixes_models:
                continue
            axis_name = exchange.plan.wire.axis_name
            # `find_parts` does not look into what it finds. Masks may be of other parameters.
            for part in find_parts((chain, exchange.inner), Exchanging, *MASKS):
                is_average = isinstance(part, Exchanging) and not part.mixes_models
                if is_average and part.plan.wire.axis_name == axis_name:
                    raise ValueError(
                        f"a chain must exchange over {axis_name!r} once, got gx.allreduce in one "
                        "with gossip or gx.outer, which has no effect, as all nodes stay equal. "
                        "Leave one of them out, or average inside a node, "
                        'gx.allreduce(axis_name="local").'
                    )


def _find_optimizer(parts: list[Any], ignored: tuple[type, ...]) -> str:
    """Returns the name of the first state that proves an optimizer; "" if none does.

    States of the kinds `ignored` prove nothing, and neither do states inside of them.
    """
    found = find_parts(parts, *OPTIMIZERS, *ignored)
    return next((type(part).__name__ for part in found if type(part) not in ignored), "")


def _find_chains(tree: Any, wrapper: Any) -> Iterator[tuple[list[Any], Any]]:
    """Yields each chain in a state: the states of its parts, and the state that wraps the chain.

    The parts of a chain within a chain are parts of the outer one. `wrapper` is the exchanging
    state, such as that of `gx.outer`, whose step follows on the last part; None if nothing follows.
    """
    if _is_chain(tree):
        chain = _flatten_chain(tree)
        yield chain, wrapper
        for part in chain:
            yield from _find_chains(part, wrapper if part is chain[-1] else None)
    elif isinstance(tree, Exchanging):
        if tree.inner is not None:
            yield from _find_chains((tree.inner,), tree)  # a chain of one part
    elif jax.tree.structure(tree) != LEAF:
        children = jax.tree.leaves(tree, is_leaf=lambda part: part is not tree)
        for child in children:
            yield from _find_chains(child, wrapper)


def _is_chain(tree: Any) -> bool:
    """Says whether this is the state of `optax.chain`, or of `optax.named_chain`."""
    return type(tree) in (tuple, OrderedDict)


def _flatten_chain(tree: Any) -> list[Any]:
    """Returns the states of all parts of a chain, in order, and of the chains inside of it."""
    parts = tree.values() if isinstance(tree, OrderedDict) else tree
    return [x for part in parts for x in (_flatten_chain(part) if _is_chain(part) else [part])]


def wire_of_first_average(opt_state: optax.OptState, axis_name: str) -> Wire | None:
    """Returns the wire of the `gx.allreduce` over the nodes with which a chain begins.

    None if a chain begins with something else, or if this average keeps an error. Gradients can
    then not be averaged leaf by leaf before the chain gets them.
    """
    chain = _flatten_chain((opt_state,))
    first = chain[0] if chain else None
    keeps_error = bool(jax.tree.leaves(first))  # a plain average has a state without arrays
    if not isinstance(first, Exchanging) or first.mixes_models or keeps_error:
        return None
    return first.plan.wire if first.plan.wire.axis_name == axis_name else None


def replace_gossip_state(opt_state: optax.OptState, **fields: Any) -> Any:
    """Returns the state of a chain whose gossip state has new values in these fields."""

    def replace(part: Any) -> Any:
        return part._replace(**fields) if isinstance(part, GossipState) else part

    return jax.tree.map(replace, opt_state, is_leaf=lambda part: isinstance(part, GossipState))


def step_plan(opt_state: optax.OptState) -> Plan:
    """Checks the state of a chain; returns the plan that decides which program a step needs.

    Without gossip it is the plan of an average in every step.
    """
    return _plan_of(jax.tree.structure(opt_state))


@functools.lru_cache(256)
def _plan_of(structure: Any) -> Plan:
    """Returns the `step_plan` of a state of this structure, and caches it.

    A training loop asks at every step, and a look through a thousand leaves takes milliseconds. The
    plan is static data of the structure, so the leaves may be anything, here 0.
    """
    opt_state = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    gossip_state(opt_state)  # raises if there are several
    require_order(opt_state)
    require_updates_numbered(opt_state)
    state = find_exchange(opt_state)
    return ExchangePlan() if state is None else state.plan


def require_updates_numbered(opt_state: optax.OptState) -> None:
    """Raises `ValueError` if `optax.MultiSteps` stands at a wrong place in a chain with gossip.

    Around the gossip, the number of a step would not be that of an update. Before a gossip that
    needs a gradient in every update, `optax.MultiSteps` would hand on zeros in between.
    """
    accumulating = find_parts(opt_state, optax.MultiStepsState)
    for part in accumulating:
        if find_parts(part.inner_opt_state, GossipState):
            raise ValueError(
                "gossip must not stand inside optax.MultiSteps where steps are numbered, as the "
                "number of a step is not that of an update, got MultiStepsState around it: use "
                "gx.accumulate_gradients(gradients, every), or leave step out."
            )
    for chain, _ in _find_chains(opt_state, None) if accumulating else ():
        needs_gradients = [
            any(state.plan.moves_by_zeros for state in find_exchanging(part)) for part in chain
        ]
        first = needs_gradients.index(True) if any(needs_gradients) else 0
        if find_parts(chain[:first], optax.MultiStepsState):
            raise ValueError(
                "every update must carry a gradient where the gossip keeps a correction, a "
                "momentum or messages that move at each, got optax.MultiSteps before it, which "
                "hands on zeros in between: use gx.accumulate_gradients(gradients, every)."
            )


def canonical_step(opt_state: optax.OptState, step: int) -> int:
    """Maps a step number to a static one: steps that need the same program get the same number.

    The result is the smallest step number with the same round, the same outer step (if there are
    any), and, under overlap, the same rounds at the `overlap` steps before; 0 without exchange.

    Args:
      opt_state: the state of a chain, of one node or node-stacked.
      step: the number of the step, an integer from 0.

    Raises:
      ValueError: if `step` is negative or not an integer, the chain contains several gossip
        transforms or parts in a wrong order, or steps and updates are numbered differently, as
        inside `optax.MultiSteps`.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> state = gx.sgp(gx.topology.one_peer_exponential(8)).init(jnp.zeros(3))
    >>> [gx.canonical_step(state, k) for k in range(5)]
    [0, 1, 2, 0, 1]
    """
    return step_plan(opt_state).canonical_step(step)


def canonical_steps(opt_state: optax.OptState) -> list[int]:
    """Returns all values of `canonical_step`, one for each program that a training loop compiles.

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
    plan = step_plan(opt_state)
    gossip = gossip_state(opt_state)
    overlapped = gossip if gossip is not None and gossip.overlap else None
    if plan.cycle == (0, 1) and overlapped is None:  # all steps are alike
        return opt_state
    state = overlapped or find_exchange(opt_state)
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
    if overlapped and overlapped.plan.role(step) != overlapped.plan.role(count):
        raise ValueError(
            f"step must be {count}, or one with the same rounds before it, as the state of "
            f"an algorithm with overlap has counted {count} updates and its messages in flight are "
            f"delivered by the round before, got {step}: pass the step at which the state was "
            "saved, or start from the average model by gossipjax.checkpoint.change_nodes."
        )
    return opt_state


def exchange(
    opt_state: optax.OptState,
    step: StepLike,
    *,
    axis_name: str | None = None,
    params: optax.Params | None = None,
) -> Any:
    """Returns the first half of an update: an exchange that needs nothing that the step computes.

    - Under overlap (`osgp`) the exchange delivers messages that nodes sent before this step.
    - For algorithms that combine while they adapt (`dpsgd`, `adpsgd`, `sgp` in that order) the
      exchange mixes the models, `x, w <- P x, P w`, and the gradient then moves the mixed models.

    The exchange can run at the same time as the gradients, as a separate program. The second half
    is `tx.update(..., step=step, received=received)`. Both halves together equal
    `tx.update(..., step=step)`.

    Args:
      opt_state: the state of the transform, or of a whole chain that contains it.
      step: the step of the update that follows.
      axis_name: the mapped axis of the nodes; by default the axis of the transform.
      params: the parameters in your loop; under overlap you can leave them out.

    Raises:
      ValueError: if the exchange of this algorithm needs the update of its step (for `sgp` use
        `order="combine-while-adapting"`), if `params` are missing, or, when traced, if `gx.sgp`
        would raise it.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.osgp(gx.topology.one_peer_exponential(2))
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         received = gx.exchange(state, step)
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step, received=received)
    ...         z = z + updates
    ...     return z
    >>> jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 3.0])).tolist()
    [2.0, 1.0]
    """
    state = find_exchange(opt_state)
    if state is None or state.plan.lead() is None:
        raise ValueError(
            "the exchange must need nothing of its step, as of gx.osgp, gx.dpsgd or gx.sgp("
            'order="combine-while-adapting"), got the state of another algorithm, which exchanges '
            "inside tx.update."
        )
    require_updates_numbered(opt_state)
    return state.start_exchange(step, params, specs=shard_specs(opt_state), axis_name=axis_name)
