"""The averages of outer gradients, of what the nodes have sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.frame.chain import outer_state
from gossipjax.algorithms.outer.fragments import pick, split_leaves
from gossipjax.algorithms.outer.plan import OuterPlan
from gossipjax.collectives import StepLike, exact_average, mix
from gossipjax.sharding import on_shards, specs_here
from gossipjax.topology.schedule import Schedule


def average_fragment(
    plan: OuterPlan, sent: Any, anchor: Any, step: StepLike, count: jax.Array
) -> Any:
    """`D`: the outer gradient of a fragment that is used at `step`, of those that nodes sent.

    `count` is the number of updates before that after which they were sent: the key of a codec
    that draws random numbers.
    """
    if plan.average == "none":
        return sent
    round_number = plan.round_number(step)
    average = partial(_average_parts, plan)
    args: tuple[Any, ...] = (sent, anchor, count, round_number)
    if isinstance(round_number, int | np.integer):  # it must stay known when traced
        average = partial(average, round_number=round_number)
        args = (sent, anchor, count)
    specs = specs_here()
    if specs is None:
        return average(*args)
    in_specs = specs.of(args, sent)
    return on_shards(average, specs, plan.wire.axis_name, in_specs, in_specs[0])(*args)


def _average_parts(
    plan: OuterPlan, sent: Any, anchor: Any, count: jax.Array, round_number: StepLike
) -> Any:
    key = plan.wire.make_key(count)
    if plan.average == "exact":
        return exact_average(sent, plan.wire, key, is_beside=plan.delay > 0)
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
        model = jax.tree.map(jnp.subtract, anchor, sent)
        return jax.tree.map(jnp.subtract, anchor, mix_nodes(model)[0])
    mean, center = mix_nodes((sent, anchor))[0]
    return jax.tree.map(lambda d, a, c: d + plan.pull * (a - c), mean, anchor, center)


def average_sent(opt_state: optax.OptState, step: int) -> Any:
    """The average of the fragment that is used at `step`, of what is in the state.

    It needs nothing of the steps since it was sent, so that it can be a program by itself:
    `tx.update(..., step=step, outer_average=average_sent(opt_state, step))`.
    """
    state = outer_state(opt_state)
    assert state is not None
    fragment = state.plan.used_at(step)
    assert fragment is not None
    leaves = split_leaves(state.anchor, state.plan.fragments)[fragment]
    sent, anchor = pick(state.sent, leaves), pick(state.anchor, leaves)
    return average_fragment(state.plan, sent, anchor, step, state.sent_counts[fragment])
