"""The average of outer gradients, over all nodes, or over the neighbours of a round."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import StepLike, exact_average, mean_of_encoded, mix
from gossipjax.sharding import on_shards, specs_here
from gossipjax.topology.schedule import Schedule


def average_fragment(
    plan: frame.OuterPlan, sent: Any, anchor: Any, step: StepLike, count: jax.Array
) -> tuple[Any, Any]:
    """`D`: the outer gradient of a fragment that is used at `step`, of those that nodes sent.

    With error feedback also what this node's message leaves out, else None.

    `count` is the number of updates before that after which they were sent: the key of a codec
    that draws random numbers.
    """
    if plan.average == "none" or isinstance(plan.average, frame.ExchangePlan):
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
    plan: frame.OuterPlan, sent: Any, anchor: Any, count: jax.Array, round_number: StepLike
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
        return frame.subtract(anchor, mix_nodes(frame.subtract(anchor, sent))[0]), None
    mean, center = mix_nodes((sent, anchor))[0]
    return jax.tree.map(lambda d, a, c: d + plan.pull * (a - c), mean, anchor, center), None


def average_sent(opt_state: optax.OptState, step: int) -> Any:
    """The average of the fragment that is used at `step`, of what is in the state.

    It needs nothing of the steps since it was sent, so that it can be a program by itself:
    `tx.update(..., step=step, outer_average=average_sent(opt_state, step))`.
    """
    state = frame.outer_state(opt_state)
    assert state is not None
    fragment = state.plan.used_at(step)
    assert fragment is not None
    leaves = frame.split_leaves(state.anchor, state.plan.fragments)[fragment]
    sent, anchor = frame.pick(state.sent, leaves), frame.pick(state.anchor, leaves)
    return average_fragment(state.plan, sent, anchor, step, state.sent_counts[fragment])[0]
