"""What `gx.outer` refuses, with a way out."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.outer.plan import OuterPlan, Shares
from gossipjax.collectives import MeanOver, require_doubly_stochastic
from gossipjax.exchanges.chain import find_exchanging, gossip_state
from gossipjax.exchanges.mask import make_mask
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState
from gossipjax.exchanges.transform import require_choice, require_number, require_transform
from gossipjax.exchanges.weighted import make_shares
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Codec, Wire


def require_gossip(average: Any) -> tuple[optax.GradientTransformationExtraArgs, ExchangePlan]:
    """Returns the gossip that replaces the average, and its plan.

    Raises `ValueError` unless this gossip can mix models that an outer optimizer has just moved.
    """
    gossip = require_transform(average, "average of outer, if no name and no gx.Schedule,")
    state: Any = None
    with contextlib.suppress(Exception):  # some transforms cannot take a single number
        state = jax.eval_shape(gossip.init, jax.ShapeDtypeStruct((), jnp.float32))
    plan = state.plan if isinstance(state, GossipState) else ExchangePlan()
    is_gossip = plan.schedule is not None
    mixes_before_updates = plan.exchanges_early
    # For example the copies that gx.choco keeps, which fit only updates of its own.
    keeps_more = is_gossip and state.extra is not None and not plan.mixes_any_update
    if not is_gossip or mixes_before_updates or keeps_more:
        raise ValueError(
            "average of outer must be 'exact', 'none', a gx.Schedule, or one of gx.sgp, gx.dpsgd "
            "and gx.gradient_tracking by itself that adapts, then combines, got another transform: "
            "give order='adapt-then-combine', and put other transforms into outer_tx or around "
            "gx.outer."
        )
    return gossip, plan


def require_whole_steps(plan: OuterPlan) -> None:
    """Raises `ValueError` unless outer steps with a gossip as `average` move whole models."""
    if plan.fragment_count > 1 or plan.delay or plan.mix:
        raise ValueError(
            "fragments of outer must be 1, delay 0 and strength 1 where average is a gossip, which "
            "moves whole models at once, got "
            f"{plan.fragment_count}, {plan.delay} and {1 - plan.mix:.6g}."
        )


def require_average(average: Any, anchor_strength: Any) -> None:
    """Raises `ValueError` unless `average` is known to `gx.outer`, and fits `anchor_strength`."""
    if isinstance(average, Schedule):
        require_doubly_stochastic(average, "outer")
        name = "anchor_strength of outer"
        require_number(anchor_strength, name, "from 0", lambda s: 0 <= s < float("inf"))
        return
    is_named = isinstance(average, str) and average in ("exact", "none")
    if not is_named and not isinstance(average, ExchangePlan):
        raise ValueError(
            "average of outer must be 'exact', 'none', a gx.Schedule or a gossip, as gx.sgp, got "
            f"{average!r}."
        )
    if anchor_strength != 1:
        name = repr(average) if is_named else "a gossip"
        raise ValueError(
            f"anchor_strength of outer must be 1 where average is {name}, got {anchor_strength!r}: "
            "only the rounds of a schedule draw different anchors together."
        )


def require_feedback(factor: Any, average: Any, delay: Any, wire: Any) -> None:
    """Raises `ValueError` if error feedback has no codec, or no exact average without delay."""
    if factor is None:
        return
    name = "error_feedback of outer"
    require_number(factor, name, "from 0 to 1, or None", lambda b: 0 <= b <= 1)
    if not isinstance(average, str) or average != "exact" or delay or wire is None:
        raise ValueError(
            f"{name} must be None unless average is 'exact', delay 0 and wire a codec, got {factor}"
            f" with average={average!r}, delay={delay!r} and wire={wire!r}: change these, or leave "
            "it out."
        )


def require_mean_over(mean_over: Any, factor: Any, codec: Codec | None, weights: Any) -> None:
    """Raises `ValueError` for `mean_over="senders"` if all values are sent, or nodes weighed."""
    require_choice(mean_over, "mean_over of outer", get_args(MeanOver))
    has_sparse_feedback = codec is not None and codec.is_sparse and factor is not None
    if mean_over == "senders" and not (has_sparse_feedback and weights is None):
        raise ValueError(
            "mean_over of outer must be 'nodes' unless error_feedback is given, wire is sparse, "
            f"such as gx.wire.block_top_k(), and weights is None, got {mean_over!r}: other wires "
            "send all values, and with weights the senders of a value do not count alike."
        )


def require_rule(rule: Any, wire: Wire, mean_over: Any, weights: Any) -> None:
    """Raises `ValueError` unless a robust rule gets every message, and weights that are fixed."""
    is_counted = isinstance(weights, str) and weights == "counted"
    if rule is not None and (wire.low_rank is not None or mean_over != "nodes" or is_counted):
        raise ValueError(
            "average of outer can be a rule if wire is not low_rank, mean_over is 'nodes' and "
            f"weights are numbers, got {wire.form}, {mean_over!r} and {weights!r:.60}: low_rank "
            "and 'senders' add messages up, so a rule cannot judge each, and with 'counted' liars "
            "choose their own weight."
        )
    hash(rule)  # raises if it cannot be a part of the plan, by which compiled programs are found


def make_outer_shares(weights: Any, average: Any, delay: int) -> Shares:
    """Returns how much each node counts in the average, `N n_i / sum_j n_j` of its weight `n_i`.

    Returns "counted" for "counted", because nodes then give their weights with each update, and
    None for None, with which all count alike. Raises `ValueError` if `average` cannot weigh nodes.
    """
    if weights is None:
        return None
    if average != "exact":
        raise ValueError(
            "weights of outer must be None unless average is 'exact', as a round of gossip counts "
            f"nodes alike, got average={average!r:.60}: weigh the updates inside, "
            "optax.chain(optimizer, gx.weighted(weights))."
        )
    if not isinstance(weights, str) or weights != "counted":
        return make_shares(weights, "weights of outer, if not 'counted',")
    if delay:
        raise ValueError(
            f"delay of outer must be 0 where weights are 'counted', got {delay}: the "
            "counts of an average would contain steps after its messages were sent. Give numbers "
            "as weights, or no delay."
        )
    return "counted"


def require_inner(plan: OuterPlan, inner: Any, params: Any) -> None:
    """Raises `ValueError` if outer steps cannot set the models of the inner chain."""
    gossip = gossip_state(inner)
    sets_part_of_model = plan.fragment_count > 1 or plan.mix > 0
    got = None
    if any(state.inner is not None for state in find_exchanging(inner)):
        got = "another outer optimizer"
    elif gossip is None:
        return
    elif plan.rule is not None:
        got = "gossip, through which one liar moves all"
    elif plan.shares is not None:
        got = "gossip of nodes that have weights: weigh the updates before it by gx.weighted"
    elif isinstance(plan.average, ExchangePlan):
        got = "gossip where average is one: leave one of them out"
    elif gossip.extra is not None or gossip.mask != make_mask(params):
        kept = ", ".join(gossip.extra or ()) or "a mask"
        got = f"one that keeps {kept}: optax.masked may stand around gx.outer"
    elif sets_part_of_model and plan.average == "exact" and gossip.in_flight is not None:
        got = "gx.osgp, whose messages carry whole models, with fragments or a strength below 1"
    if got is not None:
        raise ValueError(
            "inner of outer must contain no gossip, or gx.sgp, gx.osgp or gx.dpsgd of all "
            f"parameters, whose models an outer step can set, got {got}."
        )
