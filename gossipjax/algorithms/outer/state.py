"""The state of an outer optimizer, and its average over all nodes or by a round."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.algorithms.outer.plan import OuterPlan
from gossipjax.collectives import (
    StepLike,
    axis_size,
    exact_average,
    mean_of_encoded,
    mix,
    receive_all,
    upcast,
)
from gossipjax.exchanges.chain import gossip_state
from gossipjax.exchanges.model import subtract
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Exchanging, GossipState
from gossipjax.sharding import Specs, on_shards, specs_here
from gossipjax.topology.schedule import Schedule


@Exchanging.register
class OuterState(NamedTuple):
    """State of `gx.outer` for one node."""

    count: Any  # int32 scalar, the number of updates so far
    inner: Any  # the state of the inner chain
    # None if the inner chain contains gossip. Otherwise a `GossipState` with residuals: if a gossip
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
    basis: Any = None  # by fragment, `Q` of `gx.wire.low_rank` for each leaf, as in `allreduce`

    mixes_models = True

    @property
    def _gossip_inside(self) -> GossipState:
        """The gossip state of the inner chain, which must contain one."""
        gossip = gossip_state(self.inner)
        assert gossip is not None
        return gossip

    def start_exchange(
        self, step: Any, params: Any, specs: Specs | None = None, axis_name: str | None = None
    ) -> Any:
        """Runs the exchange whose result `update` takes as `received` at `step`.

        With gossip inside, this is the exchange of that gossip, and returns a `PushSum`. Without
        gossip inside, it averages the outer gradients of the fragment that is used at `step`, and
        returns a tree like the fragment. The nodes have set these aside `delay` steps earlier, so
        the average needs nothing of this step, and can run while gradients are computed.
        """
        if self.plan.inner is not None:
            return self._gossip_inside.start_exchange(step, params, specs, axis_name)
        fragment = self.plan.used_at(step)
        assert fragment is not None
        by_fragment = self.sent, self.anchor, self.sent_counts
        sent, anchor, count = (field[fragment] for field in by_fragment)
        average, _ = average_fragment(self.plan, sent, anchor, step, count)
        return average  # with a delay there is no error feedback, and nothing left out

    def take_local_step(self, params: Any, updates: Any) -> Any:
        """Returns the model after the local step, before any exchange or outer step."""
        if self.local is None:
            return self._gossip_inside.take_local_step(params, updates)
        # The weight of a gossip between outer steps must not scale the local step.
        return self.local._replace(weight=None).take_local_step(params, updates)

    def weigh(self, shares: np.ndarray) -> OuterState:
        """Multiplies all anchors, `[N, ...]`, by the nodes' `shares`, as `Exchanging` says."""

        def weigh_leaf(leaf: Any) -> Any:
            return np.asarray(leaf, np.float64) * shares.reshape(-1, *[1] * (leaf.ndim - 1))

        return self._replace(anchor=jax.tree.map(weigh_leaf, self.anchor))


def average_fragment(
    plan: OuterPlan, sent: Any, anchor: Any, step: StepLike, count: jax.Array
) -> tuple[Any, Any]:
    """Averages the outer gradients `sent` of the fragment that is used at `step`.

    Returns the average `D`, and what the codec leaves out of this node's message; without error
    feedback the second is None. `count` is the number of updates before the update that sent the
    fragment; it seeds a codec that draws random numbers.
    """
    if plan.average == "none" or isinstance(plan.average, ExchangePlan):
        # Each node steps alone, or a gossip mixes after the outer step: in both cases the outer
        # optimizer gets the node's own outer gradient.
        return sent, None
    round_number = plan.round_number(step)
    average = partial(_average_shards, plan)
    args = (sent, anchor, count, round_number)
    specs = specs_here()
    if specs is None:
        return average(*args)
    in_specs = specs.of(args, sent)
    error_specs = None if plan.error_feedback is None else in_specs[0]
    out_specs = (in_specs[0], error_specs)
    return on_shards(average, specs, plan.wire.axis_name, in_specs, out_specs)(*args)


def _average_shards(
    plan: OuterPlan, sent: Any, anchor: Any, count: jax.Array, round_number: StepLike
) -> tuple[Any, Any]:
    """Runs `average_fragment` on a device, which has the whole fragment or a shard of it."""
    key = plan.wire.make_key(count)
    if plan.rule is not None:
        messages, left_out = receive_all(upcast(sent), plan.wire, key)
        nodes = axis_size(plan.wire.axis_name)
        weights = jnp.asarray(plan.shares or [1.0] * nodes, jnp.float32) / nodes
        # The own value is 0, of weight 0: with the node's gradient, nodes' averages would differ.
        center = jax.tree.map(jnp.zeros_like, upcast(sent))
        average = plan.rule(center, messages, weights, jnp.arange(nodes, dtype=jnp.int32))
        return average, None if plan.error_feedback is None else left_out
    if plan.error_feedback is not None:
        return mean_of_encoded(sent, plan.wire, key, plan.mean_over)
    if plan.average == "exact":
        # With a delay the average may run during the next steps, which must not wait for it.
        return exact_average(sent, plan.wire, key, is_beside=plan.delay > 0), None
    assert isinstance(plan.average, Schedule)
    mix_nodes = partial(
        mix, weight=None, schedule=plan.average, step=round_number, **plan.wire.arguments(), key=key
    )
    # `sent` is `a - x`, and `D = P (a - x) + s (a - P a)`. At `s = 1` this is `a - P x`, so only
    # the model `x` travels; at other `s` the anchor travels, too.
    if plan.pull == 1:
        return subtract(anchor, mix_nodes(subtract(anchor, sent))[0]), None
    mean, center = mix_nodes((sent, anchor))[0]
    return jax.tree.map(lambda d, a, c: d + plan.pull * (a - c), mean, anchor, center), None
