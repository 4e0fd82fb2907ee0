"""Outer optimizers: nodes take `every` steps, and an optimizer then moves the average model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.outer.checks import (
    make_outer_shares,
    require_average,
    require_feedback,
    require_gossip,
    require_inner,
    require_mean_over,
    require_rule,
    require_whole_steps,
)
from gossipjax.algorithms.outer.plan import OuterPlan
from gossipjax.algorithms.outer.stability import require_stable
from gossipjax.algorithms.outer.state import OuterState, average_fragment
from gossipjax.collectives import (
    MeanOver,
    StepLike,
    cast_like,
    change_if,
    default_step,
    init_basis,
    mean_of_low_rank,
    vary,
    vary_where_mapped,
)
from gossipjax.exchanges.chain import find_exchanging, gossip_state, replace_gossip_state
from gossipjax.exchanges.fragments import Fragment, LayerFragments, merge, pick
from gossipjax.exchanges.model import (
    add,
    as_update,
    common_model,
    models,
    numerators,
    predict,
    push_sum_weight,
    residuals,
    scale,
    subtract,
    zeros_like_model,
)
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState, mass_in_flight
from gossipjax.exchanges.transform import (
    move_locally,
    require_like,
    require_number,
    require_params,
    require_plan,
    require_state,
    require_transform,
)
from gossipjax.exchanges.weighted import require_node_weight, scale_by_share
from gossipjax.renamed import renamed
from gossipjax.sharding import constrain, inner_axes, specs_here
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import Wire, WireLike

Average = Schedule | optax.GradientTransformation | Callable[..., Any] | Literal["exact", "none"]


@renamed(mix="strength=1 - mix", pull="anchor_strength")
def outer(
    inner: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    every: int,
    *,
    average: Average = "exact",
    fragments: int | LayerFragments = 1,
    delay: int = 0,
    strength: float = 1.0,
    wire: WireLike | None = None,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    anchor_strength: float = 1.0,
    reset_inner: bool = False,
    error_feedback: float | None = None,
    mean_over: MeanOver = "nodes",
    weights: Sequence[float] | np.ndarray | Literal["counted"] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Puts an outer optimizer around a chain; its gradient is how far all nodes moved together.

    The anchor `a` is the model after the last outer step. At the end of every H-th step
    (`H = every`; steps H - 1, 2 H - 1, ...):

        D = a - avg(x);    a <- a + outer_tx(D at a);    x <- a

    `D` is a gradient, so it points away from where the nodes went. You get Local SGD, SlowMo,
    DiLoCo, Streaming DiLoCo, NoLoCo, SparseLoCo and MuLoCo by different arguments.
    docs/guides/transforms.md shows the code for each, what goes together, and what is stable.

    Args:
      inner: the chain, which contains `sgp`, `osgp`, `dpsgd` or no gossip.
      outer_tx: any optax optimizer; it gets one outer gradient and the anchor, nothing else.
      every: H, steps from one average of a fragment to the next.
      average: "exact" averages over all nodes. With "none" each node steps alone. With a doubly
        stochastic schedule, outer step m mixes by round m: `D = P (a - x) + s (a - P a)`, with
        `s = anchor_strength`. For any directed graph, give a gossip: `gx.sgp`,
        `gx.gradient_tracking` or `gx.dpsgd(order="adapt-then-combine")`. Nodes then mix after their
        outer steps, `y, w <- P (y + v), P w` with `v = outer_tx(a - x at a)`. A robust rule, such
        as `gx.contrib.TrimmedMean(2)`, takes the place of `avg`: each node sends `a - x` to all,
        and all get `rule(0, [a - x_j], p)`, with a center of 0.
      fragments: p, the number of parts into which the leaves are cut, in their order. Part f is
        averaged at the end of every step `k` with `k + 1 = (f + 1) H // p (mod H)`. For a model
        that scans over stacked layers give `gx.layer_fragments`. An `outer_tx` that is not
        elementwise, as Muon or clipping by a norm, sees each part alone, and a cut leaf as pieces.
      delay: steps between sending a fragment and using its average, below H.
      strength: how far a node's model goes to the anchor when an average is used, above 0 and at
        most 1: `x <- (1 - strength) x + strength a`.
      wire: the form of outer gradients, a narrower type or a codec, such as `gx.wire.int4()`. A
        sparse codec and `gx.wire.low_rank(rank)` need `error_feedback`. A gossip in `average` has
        its own `wire`.
      axis_name, local_axis_name: as in `gx.sgp`.
      anchor_strength: how strongly anchors are drawn together, if `average` is a schedule.
      reset_inner: whether an outer step also sets the momentum and moments of the inner chain to 0;
        counts stay. You cannot reset around `optax.MultiSteps`, because the sums in its state would
        be lost.
      error_feedback: b, from 0 to 1. A node keeps what codec C left out of its messages and adds it
        to the next message: `e <- b e + (a - x); q = C(e); e <- e - q; D = mean q`. With
        `gx.wire.low_rank`, `q = D` is the `M^` of all `e`. It needs an exact average without delay.
      mean_over: "nodes", or, for sparse codecs without `weights`, "senders", which divides each
        value by the number of nodes that sent it.
      weights: how much each node counts in an exact average, such as its number of examples:
        `D = a - sum_i p_i x_i` with `p_i = n_i / sum n`; `gx.weighted` says what this minimizes.
        "counted" adds up `update(..., node_weight=)`, such as the tokens of each step, from one
        average to the next, so nodes that make fewer steps count less.

    All nodes must start from the same parameters. `update` takes `step=` as in `gx.sgp`. The step
    also decides when outer steps happen, and with a delay you may not leave out a step.

    Raises:
      ValueError: if an argument is out of its range, or nodes would diverge with `outer_tx` over
        this average. In `init`: if there are more fragments than leaves, `outer_tx` exchanges
        something, or `inner` contains another kind of algorithm. Also if `gx.sgp` would raise it.

    References: docs/names.md lists the papers. On 40 steps of recorded gradients of 4 nodes, in
    float64, results are equal to 1e-14 to those of OpenDiloco@a5b7236, torchft@73dafea,
    CCLoco@c01a785, templar@142666f without its clipping, and MuLoCo@475bbf4.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = gx.outer(optax.sgd(1.0), optax.sgd(0.5), every=2)
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update(z, state, z, step=step)
    ...         z = z + updates
    ...     return z, state.anchor[0]
    >>> z = jnp.array([1.0, 3.0])  # after one local step both are 0
    >>> [a.tolist() for a in jax.vmap(two_steps, axis_name="nodes")(z)]
    [[1.0, 1.0], [1.0, 1.0]]
    """
    inner = require_transform(inner, "inner of outer")
    outer_tx = require_transform(outer_tx, "outer_tx of outer")
    every = require_int(every, "every of outer", 1)
    # The plan contains only static data: the plan of a gossip, or "exact" and the rule.
    gossip = rule = None
    planned_average: Any = average
    if callable(average):
        rule = average
        planned_average = "exact"
    elif not isinstance(average, str | Schedule):
        gossip, planned_average = require_gossip(average)
    require_average(planned_average, anchor_strength)
    if (planned_average == "none" or gossip is not None) and wire is not None:
        raise ValueError(
            "wire of outer must be None where average is 'none' and nothing is sent, or a gossip, "
            f"which has its own, got {wire!r}."
        )
    require_feedback(error_feedback, planned_average, delay, wire)
    has_feedback = error_feedback is not None
    route = Wire.make(axis_name, local_axis_name, wire, has_feedback, takes_low_rank=has_feedback)
    require_mean_over(mean_over, error_feedback, route.codec, weights)
    require_rule(rule, route, mean_over, weights)
    fragment_count = fragments.count if isinstance(fragments, LayerFragments) else fragments
    require_int(fragment_count, "fragments of outer", 1, every)
    require_number(strength, "strength of outer", "above 0 and at most 1", lambda s: 0 < s <= 1)
    plan = OuterPlan(
        every=every,
        average=planned_average,
        fragments=fragments,
        delay=require_int(delay, "delay of outer", 0, every - 1),
        mix=1 - strength,
        pull=float(anchor_strength),
        wire=route,
        error_feedback=None if error_feedback is None else float(error_feedback),
        mean_over=mean_over,
        shares=make_outer_shares(weights, planned_average, delay),
        rule=rule,
    )
    if reset_inner and plan.fragment_count > 1:
        raise ValueError(
            "reset_inner of outer must be False where there are fragments, got "
            f"{plan.fragment_count}: their outer steps come at different times."
        )
    if gossip is not None:
        require_whole_steps(plan)
    if plan.schedule is not None:
        # The simulation takes an outer step after every step, in full precision.
        axes = Wire(axis_name, local_axis_name)
        simulated = dataclasses.replace(plan, every=1, fragments=1, delay=0, wire=axes)
        no_optimizer = optax.with_extra_args_support(optax.identity())
        steps = _OuterSteps(simulated, no_optimizer, outer_tx, reset_inner=False, gossip=gossip)
        require_stable(optax.GradientTransformationExtraArgs(steps.init, steps.update), simulated)
    steps = _OuterSteps(plan, inner, outer_tx, bool(reset_inner), gossip)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


@dataclasses.dataclass(frozen=True)
class _OuterSteps:
    """Makes the `init` and `update` of `gx.outer`."""

    plan: OuterPlan
    inner: optax.GradientTransformationExtraArgs
    outer_tx: optax.GradientTransformationExtraArgs
    reset_inner: bool
    gossip: optax.GradientTransformationExtraArgs | None = None  # replaces the average

    def init(self, params: Any) -> OuterState:
        """Returns the state at the start: all anchors are the parameters, cut into fragments."""
        plan = self.plan
        inner = self.inner.init(params)
        inner_gossip = gossip_state(inner)
        local = None
        if inner_gossip is None:
            # The state of a gossip inside would keep what 16-bit parameters round away. Here the
            # gossip that replaces the average keeps it, or a transform that exchanges nothing.
            local = (self.gossip or move_locally("outer", plan.wire)).init(params)
        require_inner(plan, inner, params)
        if inner_gossip is not None:
            plan = dataclasses.replace(plan, inner=inner_gossip.plan)
        is_exact = plan.average == "exact"
        axis_name = plan.wire.axis_name
        # An exact average needs equal anchors, so they start as the mean over the nodes. With any
        # other average, the anchor of a node starts as its own parameters.
        model = common_model(params, axis_name if is_exact else None)
        anchors = tuple(pick(model, leaves) for leaves in plan.split(model))  # by fragment
        anchors = tuple(self.constrain(anchor, anchor) for anchor in anchors)
        outer_states = tuple(self.constrain(self.outer_tx.init(a), a) for a in anchors)
        if find_exchanging(outer_states):
            raise ValueError(
                "outer_tx of outer must exchange nothing, got one that does: average says who "
                "takes part."
            )
        if (specs := specs_here()) is not None:
            for anchor in anchors:
                specs.require(anchor, inner_axes(axis_name), may_repeat=True)
        low_rank = plan.wire.low_rank
        basis = None
        if low_rank is not None:
            # The sizes of the two factors that travel for a fragment, known only from the shapes.
            factors = tuple(low_rank.find_sizes(anchor, model) for anchor in anchors)
            plan = dataclasses.replace(plan, factors=factors)
            basis = tuple(init_basis(anchor, low_rank, axis_name) for anchor in anchors)
        return vary_where_mapped(
            OuterState(
                count=jnp.zeros((), jnp.int32),
                inner=inner,
                local=local,
                anchor=anchors,
                outer=outer_states,
                sent=self.make_zeros(anchors) if plan.delay else None,
                sent_counts=jnp.full(plan.fragment_count, -1, jnp.int32) if plan.delay else None,
                plan=plan,
                error=None if plan.error_feedback is None else self.make_zeros(anchors),
                counted=jnp.zeros(plan.fragment_count) if plan.shares == "counted" else None,
                basis=basis,
            ),
            axis_name,
        )

    def make_zeros(self, anchors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Makes zeros like the anchor of each fragment, float32 at least, and sharded alike."""
        return tuple(self.constrain(zeros_like_model(anchor), anchor) for anchor in anchors)

    def constrain(self, tree: Any, anchor: Any) -> Any:
        """Shards those arrays of `tree` that are like leaves of a fragment's `anchor` as these are.

        Without `gx.sharded` around `gx.outer` nothing is sharded inside a node.
        """
        return constrain(tree, specs_here(), self.plan.wire.axis_name, anchor)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        received: Any = None,
        node_weight: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Takes a step of the inner chain, and then the outer steps that are due after it.

        `received` is what `gx.exchange` has returned for this step, if it was called: the result of
        the gossip inside, or, without gossip inside, the average of the fragment that is used now.
        """
        params = require_params(params, "outer")
        plan = self.plan
        old = require_state(state, OuterState, "outer")
        require_plan(plan, old.plan, "outer")
        step = default_step(step, old.count, plan.wire.axis_name)
        require_like(params, updates, "the updates of outer")
        fragments = plan.split(params)
        has_gossip_inside = old.local is None
        average = None if has_gossip_inside else received
        if plan.skips_exchange(step):  # the outer step of `step` replaces all models anyway
            extra_args["skip_exchange"] = True
        elif has_gossip_inside:
            extra_args["received"] = received
        if node_weight is not None:
            extra_args["node_weight"] = node_weight
        change, inner = self.inner.update(updates, old.inner, params, step=step, **extra_args)
        local = old.local
        if not has_gossip_inside:
            change, local = self._move_locally(change, local, params, step)
        new = old._replace(count=optax.safe_increment(old.count), inner=inner, local=local)
        if old.counted is not None:
            new = new._replace(counted=old.counted + require_node_weight(node_weight, "outer"))
        results = vary((cast_like(change, params), new), plan.wire.axis_name)
        for fragment, leaves in enumerate(fragments):
            fragment_step = _FragmentStep(self, fragment, leaves, params, step, average, old.count)
            use = fragment_step.use_sent if plan.delay else fragment_step.use_at_once
            results = change_if(plan.is_used(fragment, step), use, *results)
            if plan.delay:
                results = change_if(plan.is_sent(fragment, step), fragment_step.send, *results)
        return results

    def _move_locally(
        self, change: Any, local: GossipState, params: Any, step: StepLike
    ) -> tuple[Any, GossipState]:
        """Takes the local step `z <- z + u` with `u = change`, for a chain without gossip.

        Returns the update of the parameters, and `local` with what 16-bit parameters round away.
        """
        without_weight = local
        if self.gossip is not None:
            # The gossip that mixes anchors keeps a weight, which must not scale local steps.
            plan = ExchangePlan(wire=self.plan.wire)
            without_weight = GossipState(
                local.count, residual=local.residual, plan=plan, mask=local.mask
            )
        new_local: Any
        local_step = move_locally("outer", self.plan.wire)
        change, new_local = local_step.update(change, without_weight, params, step=step)
        if self.gossip is not None:
            new_local = local._replace(residual=new_local.residual)
        return change, new_local


@dataclasses.dataclass(frozen=True)
class _FragmentStep:
    """Sends a fragment at the end of a step, or uses the average of this fragment."""

    steps: _OuterSteps
    fragment: int
    leaves: Fragment
    params: Any
    step: StepLike
    received: Any  # the average of what was sent, if `gx.exchange` has computed it; else None
    count: jax.Array  # of the updates before this one
    was_sent: jax.Array | None = None  # whether nodes have sent the fragment; None if certain

    def _put_if_sent(self, by_fragment: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
        """Replaces the entry of this fragment, if it was sent, in a field of the state."""
        f = self.fragment
        return (*by_fragment[:f], self._if_sent(new, by_fragment[f]), *by_fragment[f + 1 :])

    def _if_sent(self, new: Any, old: Any) -> Any:
        """Returns `new` if the fragment was sent, or else `old`, which keeps the state unchanged.

        Give it pieces of leaves where you can, because XLA would copy whole leaves.
        """
        if self.was_sent is None:
            return new
        return jax.tree.map(partial(jnp.where, self.was_sent), new, old)

    def use_at_once(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """Averages all nodes' outer gradients without a delay, and takes the outer step.

        With error feedback a message also contains what earlier messages left out.
        """
        plan = self.steps.plan
        message = self._outer_gradient(updates, state)
        if state.counted is not None:
            counted = state.counted.at[self.fragment].set(0)  # count anew for the next average
            state = state._replace(counted=counted)
        if plan.error_feedback is not None:
            left_out = scale(state.error[self.fragment], plan.error_feedback)
            message = add(left_out, message)
        anchor = state.anchor[self.fragment]
        if plan.wire.low_rank is None:
            average, error = average_fragment(plan, message, anchor, self.step, self.count)
        else:
            basis = state.basis[self.fragment]
            average, error, basis = mean_of_low_rank(message, basis, plan.wire)
            state = state._replace(basis=self._put_if_sent(state.basis, basis))
        if plan.error_feedback is not None:
            state = state._replace(error=self._put_if_sent(state.error, error))
        return self._apply(average, updates, state)

    def _outer_gradient(self, updates: Any, state: OuterState) -> Any:
        """Returns this node's outer gradient `w a - x`, from numerators `x` and the weight `w`.

        The weights of all nodes and messages sum to N. So the mean over the nodes is
        `a - sum x / sum w`: the anchor `a` minus the average model. If the average is not exact, no
        sums are needed, and the result is `a` minus the model.
        """
        plan = self.steps.plan
        gossip = gossip_state(state)
        z = predict(self.params, updates)
        anchor = state.anchor[self.fragment]
        if plan.average != "exact":
            return subtract(anchor, pick(models(z, gossip), self.leaves))
        in_flight = mass_in_flight(z, gossip)
        weight = push_sum_weight(gossip)
        if in_flight.weight is not None:
            weight = weight + in_flight.weight
        x = pick(add(numerators(z, gossip), in_flight.x), self.leaves)
        gradient = subtract(scale(anchor, weight), x)
        if plan.shares is None or plan.rule is not None:  # the rule gets the shares
            return gradient
        node_weight = None if state.counted is None else state.counted[self.fragment]
        shares = None if plan.shares == "counted" else plan.shares
        return scale_by_share(gradient, shares, node_weight, plan.wire.axis_name, "outer")

    def _apply(self, average: Any, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """Takes the outer step by the average `D`: `a <- a + outer_tx(D at a); x <- a`.

        A gossip mixes the new anchors `a` of the nodes before the models `x` are set.
        """
        anchor = state.anchor[self.fragment]
        change, new_outer = self.steps.outer_tx.update(average, state.outer[self.fragment], anchor)
        outer = self._put_if_sent(state.outer, self.steps.constrain(new_outer, anchor))
        if self.steps.gossip is not None:
            change, state = self._mix_anchors(self.steps.gossip, change, anchor, state)
        anchor = add(anchor, change)
        if self.steps.reset_inner:
            inner = zero_moments(self.steps.inner, state.inner)
            state = state._replace(inner=self._if_sent(inner, state.inner))
        state = state._replace(anchor=self._put_if_sent(state.anchor, anchor), outer=outer)
        return self._set_model(anchor, updates, state)

    def _set_model(self, anchor: Any, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """Sets `x <- mix x + (1 - mix) a` in this fragment, and what the gossip state keeps of `x`.

        `a` is the anchor. `updates` lead from the user's parameters to `x`, the model after the
        local step. Nothing changes if the fragment was not sent.
        """
        plan = self.steps.plan
        leaves = self.leaves
        gossip = gossip_state(state)
        assert gossip is not None
        model = anchor
        if plan.mix:
            local_x = pick(models(predict(self.params, updates), gossip), leaves)
            model = jax.tree.map(lambda x, a: plan.mix * x + (1 - plan.mix) * a, local_x, anchor)
        params = pick(self.params, leaves)
        new_updates = self._if_sent(as_update(params, model), pick(updates, leaves))
        # If XLA fused these with the rest of the leaves, it could not write them in place.
        new_updates = jax.lax.optimization_barrier(new_updates)
        fields = {}
        if gossip.residual is not None:
            residual = residuals(model, predict(params, new_updates))
            residual = self._if_sent(residual, pick(gossip.residual, leaves))
            fields["residual"] = merge(gossip.residual, residual, leaves)
        if plan.replaces_all:
            # Weight 1, and nothing in flight: mass from before would bring back the old model.
            old = gossip.weight, gossip.in_flight
            new = jax.tree.map(jnp.ones_like, old[0]), jax.tree.map(jnp.zeros_like, old[1])
            fields["weight"], fields["in_flight"] = self._if_sent(new, old)
        state = replace_gossip_state(state, **fields)
        return vary((merge(updates, new_updates, leaves), state), plan.wire.axis_name)

    def _mix_anchors(
        self, gossip: Any, change: Any, anchor: Any, state: OuterState
    ) -> tuple[Any, OuterState]:
        """Adds `change` to the nodes' anchors, and mixes them by one round of `gossip`.

        Returns how the anchor of this node changes by both, and the new state.
        """
        # The residual belongs to the local model; an anchor is in full precision and needs none.
        without_residual = state.local._replace(residual=None)
        change, mixed = gossip.update(
            change, without_residual, anchor, step=self.steps.plan.round_number(self.step)
        )
        mixed = mixed._replace(residual=state.local.residual)
        return change, state._replace(local=self._if_sent(mixed, state.local))

    def send(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """Keeps this node's outer gradient, which `use_sent` averages `delay` steps later."""
        sent = self._put_if_sent(state.sent, self._outer_gradient(updates, state))
        sent_counts = state.sent_counts.at[self.fragment].set(self.count)
        return updates, state._replace(sent=sent, sent_counts=sent_counts)

    def use_sent(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """Averages what `send` has kept `delay` steps earlier, and takes the outer step.

        Nothing changes if the run began only after the step at which nodes send this fragment.
        """
        sent_count = state.sent_counts[self.fragment]
        # There are fewer than `delay` updates if `gx.apply_if_finite` has skipped some steps.
        was_sent = (sent_count >= 0) & (self.count - sent_count <= self.steps.plan.delay)
        average = self.received
        if average is None:
            sent, anchor = state.sent[self.fragment], state.anchor[self.fragment]
            average, _ = average_fragment(self.steps.plan, sent, anchor, self.step, sent_count)
        fragment_step = dataclasses.replace(self, was_sent=was_sent)
        updates, state = fragment_step._apply(average, updates, state)
        new_count = jnp.where(was_sent, -1, sent_count)  # -1: no average is waiting
        sent_counts = state.sent_counts.at[self.fragment].set(new_count)
        return updates, state._replace(sent_counts=sent_counts)


def zero_moments(tx: optax.GradientTransformation, opt_state: Any) -> Any:
    """Sets the momentum and moments of a chain to zeros; counts and gossip stay.

    optax finds the arrays like the parameters, also in the gossip state. So the gossip state, which
    must stay, is taken out before, and put back after.
    """

    def is_gossip(part: Any) -> bool:
        return isinstance(part, GossipState)

    def without_gossip(tree: Any) -> Any:
        return jax.tree.map(
            lambda part: optax.EmptyState() if is_gossip(part) else part, tree, is_leaf=is_gossip
        )

    zeros = optax.tree_map_params(
        lambda params: without_gossip(tx.init(params)), jnp.zeros_like, without_gossip(opt_state)
    )
    return jax.tree.map(
        lambda part, new: part if is_gossip(part) else new, opt_state, zeros, is_leaf=is_gossip
    )
