"""The steps of an outer optimizer: what it takes of the nodes' models, and what it gives them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.frame.accumulation import require_no_accumulation
from gossipjax.algorithms.frame.chain import (
    gossip_state,
    outer_state,
    replace_gossip_state,
    require_updates_numbered_here,
)
from gossipjax.algorithms.frame.masks import make_mask
from gossipjax.algorithms.frame.messages import mass_in_flight
from gossipjax.algorithms.frame.rounding import as_update, predict, residuals, zeros_like_model
from gossipjax.algorithms.frame.state import (
    ExchangePlan,
    GossipState,
    add,
    common_model,
    init_state,
    models,
    numerators,
    push_sum_weight,
)
from gossipjax.algorithms.frame.transform import Combined, gossip_transform, require_like
from gossipjax.algorithms.outer.averages import average_fragment
from gossipjax.algorithms.outer.fragments import merge, pick, split_leaves
from gossipjax.algorithms.outer.plan import OuterPlan, OuterState
from gossipjax.algorithms.outer.reset import zero_moments
from gossipjax.algorithms.outer.stability import require_agreement
from gossipjax.collectives import (
    StepLike,
    cast_like,
    cond,
    default_step,
    vary,
    vary_where_mapped,
)
from gossipjax.last import APPLIED, PARAMS, UPDATES, mark


@dataclasses.dataclass(frozen=True)
class OuterSteps:
    """`init` and `update` of `outer`."""

    plan: OuterPlan
    inner: optax.GradientTransformationExtraArgs
    outer_tx: optax.GradientTransformationExtraArgs
    reset_inner: bool

    def init(self, params: Any) -> OuterState:
        plan = self.plan
        inner = self.inner.init(params)
        gossip = gossip_state(inner)
        local = self._local().init(params) if gossip is None else None
        self._require_inner(inner, gossip, params)
        require_agreement(plan, self.outer_tx, ExchangePlan() if gossip is None else gossip.plan)
        is_exact = plan.average == "exact"
        axis_name = plan.wire.axis_name
        anchor = common_model(params, axis_name if is_exact else None)
        outer_states = self._init_outer(anchor)
        if jax.tree.leaves(anchor):  # none in the placeholder of optax.tree_map_params
            first = split_leaves(anchor, plan.fragments)[0]
            self._require_outer(pick(anchor, first), outer_states[0])
        return vary_where_mapped(
            OuterState(
                count=jnp.zeros((), jnp.int32),
                inner=inner,
                local=local,
                anchor=anchor,
                outer=outer_states,
                sent=zeros_like_model(params) if plan.delay else None,
                sent_counts=jnp.full(plan.fragments, -1, jnp.int32) if plan.delay else None,
                plan=plan,
            ),
            axis_name,
        )

    def _init_outer(self, anchor: Any) -> tuple[optax.OptState, ...]:
        """The state of the outer optimizer, by fragment."""
        fragments = split_leaves(anchor, self.plan.fragments)
        return tuple(self.outer_tx.init(pick(anchor, leaves)) for leaves in fragments)

    def _local(self) -> optax.GradientTransformationExtraArgs:
        """The last part of a chain without gossip: `x <- x + u`, with the residuals of 16 bits."""
        plan = ExchangePlan(wire=self.plan.wire)

        def init(params: optax.Params) -> GossipState:
            return init_state(params, plan, push_sum=False)

        def combine(
            x: Any, updates: optax.Updates, state: GossipState, step: StepLike, received: Any
        ) -> Combined:
            del step, received
            return Combined(add(x, updates), state)

        return gossip_transform("outer", plan, init, combine)

    def _require_inner(self, inner: Any, gossip: GossipState | None, params: Any) -> None:
        """Raises `ValueError` where outer steps cannot set the models of the chain inside."""
        if outer_state(inner) is not None:
            raise ValueError("inner of outer must hold no other outer optimizer, got one.")
        require_no_accumulation(inner, "inner of outer", "write gx.accumulate(gx.outer(...)).")
        if gossip is None:
            return
        plan = self.plan
        if gossip.extra is not None or gossip.mask != make_mask(params):
            kept = "a mask" if gossip.extra is None else ", ".join(gossip.extra)
            raise ValueError(
                "inner of outer must hold no gossip, or that of gx.sgp, gx.osgp or gx.dpsgd of all "
                f"parameters, got one that keeps {kept}: an outer step would not reach these. "
                "optax.masked may stand around gx.outer."
            )
        in_parts = plan.fragments > 1 or plan.mix > 0
        if in_parts and plan.average == "exact" and gossip.in_flight is not None:
            raise ValueError(
                "fragments of outer must be 1 and mix 0 around gx.osgp, got "
                f"{plan.fragments} and {plan.mix}: its messages in flight carry the whole model "
                "with one weight. Use gx.sgp."
            )

    def _require_outer(self, anchor: Any, state: Any) -> None:
        """Raises `ValueError` unless the outer optimizer makes updates of gradients alone."""
        if gossip_state(state) is not None:
            raise ValueError(
                "outer_tx of outer must exchange nothing, got one with gossip in it: average says "
                "who takes part."
            )
        try:
            updates, _ = jax.eval_shape(self.outer_tx.update, anchor, state, anchor)
        except Exception as error:
            raise ValueError(
                "outer_tx of outer must make its update of the outer gradient and the anchor "
                "alone, as optax.sgd, optax.adam and their like do, got one that raises "
                f"{type(error).__name__}: {error}"
            ) from error
        require_like(anchor, updates, "the updates of outer_tx")

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        outer_average: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        params = mark(params, PARAMS)
        if params is None:
            raise ValueError(
                "the params of outer must be given, as it averages them, got None: call "
                "tx.update(updates, state, params)."
            )
        plan = self.plan
        old = self._require_own_state(state)
        require_updates_numbered_here(plan, step)
        step = default_step(step, old.count, plan.wire.axis_name)
        require_like(params, updates, "the updates of outer")
        require_like(params, old.anchor, "the anchor in the state of outer")
        if plan.skips_exchange(step):
            extra_args["skip_exchange"] = True
        change, inner = self.inner.update(updates, old.inner, params, step=step, **extra_args)
        local = old.local
        if local is not None:
            change, local = self._local().update(change, local, params, step=step)
        new = old._replace(count=optax.safe_increment(old.count), inner=inner, local=local)
        carry = vary((cast_like(mark(change, APPLIED), params), new), plan.wire.axis_name)
        for fragment, leaves in enumerate(split_leaves(old.anchor, plan.fragments)):
            step_of = _FragmentStep(self, fragment, leaves, params, step, outer_average, old.count)
            if plan.delay:
                carry = cond(plan.is_used(fragment, step), step_of.use, _keep, *carry)
                carry = cond(plan.is_sent(fragment, step), step_of.send, _keep, *carry)
            else:
                carry = cond(plan.is_used(fragment, step), step_of.use_at_once, _keep, *carry)
        return mark(carry[0], UPDATES), carry[1]

    def _require_own_state(self, state: Any) -> OuterState:
        """Returns `state`; raises `ValueError` unless it was made for this plan."""
        if not isinstance(state, OuterState):
            raise ValueError(
                f"the state of outer must be an OuterState, got {type(state).__name__}, the state "
                "of another transform: make it by tx.init(params) of the same chain."
            )
        names = [field.name for field in dataclasses.fields(self.plan)]
        pairs = [(name, getattr(self.plan, name), getattr(state.plan, name)) for name in names]
        outer = jax.tree.structure(jax.eval_shape(self._init_outer, state.anchor))
        for name, expected, actual in [
            *pairs,
            ("outer_tx", outer, jax.tree.structure(state.outer)),
        ]:
            if expected != actual:
                raise ValueError(
                    f"the state of outer must have been made with its {name}, {expected}, got one "
                    f"of {actual}: make it by tx.init(params) of the same chain, where params may "
                    "be the average model of a run."
                )
        return state


def _keep(updates: optax.Updates, state: OuterState) -> tuple[optax.Updates, OuterState]:
    return updates, state


@dataclasses.dataclass(frozen=True)
class _FragmentStep:
    """What happens to one fragment at the end of a step."""

    steps: OuterSteps
    fragment: int
    leaves: range
    params: Any
    step: StepLike
    average: Any  # of what was sent, if it was computed before
    count: jax.Array  # of the updates before this one

    def send(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        sent = merge(state.sent, self._outer_gradient(updates, state), self.leaves)
        return updates, state._replace(sent=sent, sent_counts=self._note(state, self.count))

    def use(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        """The outer step; nothing where the fragment was not sent, as the run began after that."""
        sent_count = state.sent_counts[self.fragment]
        # Steps that `gx.apply_if_finite` skips are not counted: there may be fewer than the delay.
        was_sent = (sent_count >= 0) & (self.count - sent_count <= self.steps.plan.delay)
        sent = pick(state.sent, self.leaves)
        new_updates, new = self._apply(sent, updates, state, sent_count)
        new = new._replace(sent_counts=self._note(new, jnp.int32(-1)))
        return jax.tree.map(partial(jnp.where, was_sent), (new_updates, new), (updates, state))

    def _note(self, state: OuterState, count: jax.Array) -> jax.Array:
        """`sent_counts` with this fragment's replaced."""
        return state.sent_counts.at[self.fragment].set(count)

    def use_at_once(self, updates: Any, state: OuterState) -> tuple[Any, OuterState]:
        return self._apply(self._outer_gradient(updates, state), updates, state, self.count)

    def _outer_gradient(self, updates: Any, state: OuterState) -> Any:
        """`D` of this node: the nodes' mean of `w a - x` is `a - sum x / sum w`, as `sum w = N`."""
        gossip = gossip_state(state)
        z = predict(self.params, updates)
        anchor = pick(state.anchor, self.leaves)
        if self.steps.plan.average != "exact":
            return jax.tree.map(jnp.subtract, anchor, pick(models(z, gossip), self.leaves))
        in_flight = mass_in_flight(z, gossip)
        weight = push_sum_weight(gossip)
        if in_flight.weight is not None:
            weight = weight + in_flight.weight
        x = pick(add(numerators(z, gossip), in_flight.x), self.leaves)
        return jax.tree.map(lambda a, leaf: weight.astype(a.dtype) * a - leaf, anchor, x)

    def _apply(
        self, sent: Any, updates: Any, state: OuterState, sent_count: jax.Array
    ) -> tuple[Any, OuterState]:
        """The outer step, and what the local model becomes by it."""
        plan = self.steps.plan
        leaves = self.leaves
        anchor = pick(state.anchor, leaves)
        average = self.average
        if average is None:
            average = average_fragment(plan, sent, anchor, self.step, sent_count)
        change, outer = self.steps.outer_tx.update(average, state.outer[self.fragment], anchor)
        anchor = add(anchor, change)
        gossip = gossip_state(state)
        assert gossip is not None
        model = anchor
        if plan.mix:
            local = pick(models(predict(self.params, updates), gossip), leaves)
            model = jax.tree.map(lambda x, a: plan.mix * x + (1 - plan.mix) * a, local, anchor)
        params = pick(self.params, leaves)
        part = as_update(params, model)
        fields = {}
        if gossip.residual is not None:
            rest = residuals(model, predict(params, part))
            fields["residual"] = merge(gossip.residual, rest, leaves)
        if plan.replaces_all:
            # All mass is now that of the anchor, or the next de-biasing would bring the old back.
            fields["weight"] = jax.tree.map(jnp.ones_like, gossip.weight)
            fields["in_flight"] = jax.tree.map(jnp.zeros_like, gossip.in_flight)
        if self.steps.reset_inner:
            state = state._replace(inner=zero_moments(self.steps.inner, state.inner))
        state = replace_gossip_state(state, **fields)
        outer_states = list(state.outer)
        outer_states[self.fragment] = outer
        state = state._replace(
            anchor=merge(state.anchor, anchor, leaves), outer=tuple(outer_states)
        )
        return vary((merge(updates, part, leaves), state), plan.wire.axis_name)
