"""Whether nodes with anchors of their own come to agree: where no node moves, and where all do."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms import frame
from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import (
    AGREEMENT,
    DIVERGENCE,
    GROWTH_TOLERANCE,
    MAX_WORK,
    Recurrence,
    multiply_round,
    require_stable,
)

SCALE = 2.0**-10  # of the probes: optimizers that clip are linear there
LINEARITY = 1e-2  # relative deviation from which on an optimizer is not linear
PULLS = 2.0 ** np.arange(0, -3.5, -0.25)  # the part of their way that local steps go to an optimum
MAX_ROUNDS = 2**11  # of outer steps that are followed
RESCALED = 8  # outer steps after which models are scaled to 1
COUNTS = np.array([0, *(8**k for k in range(11))], np.int32)  # at which a rate may differ


def require_agreement(
    plan: frame.OuterPlan,
    outer_tx: optax.GradientTransformationExtraArgs,
    inner: frame.ExchangePlan | None,
) -> None:
    """Raises `ValueError` where differences between the anchors grow without any gradient.

    With J the outer optimizer, `(u, s') = J (D, a, s)`, where `s` is its momentum, and `x` the
    local model, mixed by the gossip inside until it is sent, the outer step is linear:

        D = pull a + P (a - x - pull a);    a' = a + u;    x' = mix x + (1 - mix) a'

    What is not linear, such as Adam, is not checked. `inner` is the plan of the gossip inside; its
    weights count as 1, and its messages as used at once. None if it is not known yet.
    """
    schedule = plan.average if isinstance(plan.average, Schedule) else None
    if plan.average == "exact" or inner is None or not (schedule or inner.schedule):
        return
    if schedule and inner.schedule and schedule.size != inner.schedule.size:
        raise ValueError(
            "average of outer must be a schedule of as many nodes as the gossip inside, "
            f"{inner.schedule.size}, got {schedule.size}."
        )
    for J in _find_linear_maps(outer_tx):
        local, mixed = _outer_step(J, plan)
        recurrence = Recurrence(
            tuple(map(tuple, local.tolist())),
            tuple(map(tuple, mixed.tolist())),
            schedule,
            inner.schedule_by_step,
            (plan.every, plan.delay, plan.every - plan.delay),
        )
        require_stable("outer", recurrence)


def _outer_step(J: np.ndarray, plan: frame.OuterPlan) -> tuple[np.ndarray, np.ndarray]:
    """A and B of `Recurrence`, of `v = (x, a, s)`."""
    size = J.shape[1]
    local, mixed = np.zeros((2, size, size))  # v -> (D, a, s)
    local[1:, 1:] = np.eye(size - 1)
    local[0, 1] = plan.pull
    mixed[0, :2] = -1, 1 - plan.pull
    after = []
    for part, anchor in ((J @ local, np.eye(size)[1]), (J @ mixed, 0)):
        a = anchor + part[0]
        after.append(np.stack([(1 - plan.mix) * a, a, *part[1:]]))
    after[0][0, 0] += plan.mix
    return after[0], after[1]


def require_stable_gossip(
    outer_tx: optax.GradientTransformationExtraArgs, gossip: frame.GossipState
) -> None:
    """Raises `ValueError` where nodes diverge from an optimum that is the same for all.

    Local steps go to it for the fraction p of their way, `D = p z`, with any p up to 1. `gossip` is
    the state of one number of the gossip that takes the updates, `u, s = J (D, z, s)`; where they
    are zeros, it always agrees. What is not linear, such as Adam, is not checked.
    """
    maps = _find_linear_maps(outer_tx)
    if not len(maps):
        return
    kept = gossip.extra or {}
    growth = _growth_of_gossip(
        tuple(map(float, maps.ravel())),
        maps.shape,
        gossip.plan.schedule,
        "correction" in kept,
        bool({"damped", "held_back"} & set(kept)),
    )
    if not growth <= 1 + GROWTH_TOLERANCE:
        raise ValueError(
            "outer_tx of outer must be stable with the gossip in average, so that nodes come to "
            "the optimum where it is the same for all, got a spectral radius of "
            f"{growth:.4f} per outer step: take a smaller rate or momentum, gx.sgp instead of "
            "gx.gradient_tracking or the reverse, damped=True where weights are uneven, or "
            "gx.topology.random_peer."
        )


@functools.lru_cache(256)
def _growth_of_gossip(
    values: tuple[float, ...],
    shape: tuple[int, ...],
    schedule: Schedule,
    is_tracking: bool,
    is_damped: bool,
) -> float:
    """The factor per outer step by which models grow in the long run: the largest of all p and J.

    By a power iteration in float64, of all p and J at once, as `growth_of_differences`.
    """
    J = np.array(values).reshape(shape)  # [C, 1 + q, 2 + q]
    return max(
        _follow_gossip(J, [schedule.rounds[i] for i in part.cycle], is_tracking, is_damped)
        for part in schedule.segments
    )


def _follow_gossip(J: np.ndarray, cycle: list[Any], is_tracking: bool, is_damped: bool) -> float:
    nodes = cycle[0].size
    count = len(J)
    shape = (nodes, count, len(PULLS))
    inputs = np.zeros((nodes, count, J.shape[2], len(PULLS)))  # D, z and the moments
    x = np.random.default_rng(0).normal(size=shape)
    w = np.ones((nodes, 1, 1))
    c, kept = np.zeros((2, *shape))  # the correction; what damping keeps
    size = x[0].size
    work = 0
    logs = [np.zeros(shape[1:])]
    for step in range(MAX_ROUNDS):
        np.divide(x, w, out=inputs[:, :, 1])
        np.multiply(inputs[:, :, 1], PULLS, out=inputs[:, :, 0])
        results = J @ inputs
        v = results[:, :, 0]
        if is_damped:
            damping = np.minimum(1, w)
            total = kept + v
            v = kept + damping * (v - kept) if is_tracking else damping * total
            kept = v if is_tracking else total - v
        t = v + c
        parts = [x + t, t, w]
        mixed = np.concatenate([part.reshape(nodes, -1) for part in parts], axis=1)
        mixed = multiply_round(cycle[step % len(cycle)], mixed)
        x = mixed[:, :size].reshape(shape)
        w = mixed[:, -1:, None]
        if is_tracking:
            c = mixed[:, size:-1].reshape(shape) - v
        inputs[:, :, 2:] = results[:, :, 1:]
        if step % RESCALED:
            continue
        norm = np.sqrt((x**2 + c**2 + kept**2 + (inputs[:, :, 2:] ** 2).sum(axis=2)).sum(axis=0))
        norm[norm == 0] = 1
        x, c, kept = (part / norm for part in (x, c, kept))
        inputs[:, :, 2:] /= norm[:, None]
        logs.append(logs[-1] + np.log(norm) if step else logs[-1])
        work += 4 * RESCALED * inputs.size
        if not AGREEMENT < logs[-1].max() < DIVERGENCE or work > MAX_WORK:
            break
    half = np.array(logs[len(logs) // 2 :]).reshape(-1, size)
    slopes = np.polyfit(np.arange(len(half)), half, 1)[0] if len(half) > 1 else half[0]
    return math.exp(slopes.max() / RESCALED)


def find_inner_plan(inner: optax.GradientTransformation) -> frame.ExchangePlan | None:
    """The plan of the gossip in a chain; None if its `init` takes no scalar for the parameters."""
    try:
        return frame.exchange_plan(
            jax.eval_shape(inner.init, jax.ShapeDtypeStruct((), jnp.float32))
        )
    except Exception:
        return None


@functools.lru_cache(64)
def _find_linear_maps(outer_tx: optax.GradientTransformationExtraArgs) -> np.ndarray:
    """The maps from `(D, a, s)` to `(u, s')`, `[C, 1 + q, 2 + q]`, where `s` has q numbers.

    They are those at the counts 0, 1, 8, 64, ..., as far as they differ. There are none of an
    optimizer that is not linear, or that does not take a single number.
    """
    with (
        contextlib.suppress(Exception),
        jax.ensure_compile_time_eval(),
        jax.numpy_dtype_promotion("standard"),
    ):
        state = outer_tx.init(jnp.zeros(()))
        is_moving = jax.tree.leaves(
            optax.tree_map_params(
                outer_tx, lambda _: True, state, transform_non_params=lambda _: False
            )
        )
        values, structure = jax.tree.flatten(state)
        size = 2 + sum(is_moving)

        def update(v: jax.Array, count: jax.Array) -> jax.Array:
            moved = iter(v[2:])
            leaves = [
                value + next(moved).astype(value.dtype) if moving else _at_count(value, count)
                for value, moving in zip(values, is_moving, strict=True)
            ]
            u, new = outer_tx.update(v[0], jax.tree.unflatten(structure, leaves), v[1])
            after = zip(jax.tree.leaves(new), is_moving, strict=True)
            numbers = [u, *(value for value, moving in after if moving)]
            return jnp.stack([number.astype(jnp.float32) for number in numbers])

        sums = np.stack([np.arange(1, size + 1), -np.ones(size)])
        probes = SCALE * np.concatenate([np.zeros((1, size)), np.eye(size), sums])
        by_count = jax.vmap(jax.vmap(update, (0, None)), (None, 0))
        results = np.asarray(jax.jit(by_count)(probes.astype(np.float32), COUNTS), np.float64)
        changes = (results[:, 1:] - results[:, :1]) / SCALE  # [C, probes, 1 + q]
        maps = changes[:, :size].swapaxes(1, 2)
        expected = np.einsum("cij,pj->cpi", maps, sums)
        errors = abs(changes[:, size:] - expected).max(axis=(1, 2))
        is_linear = errors <= LINEARITY * (1 + abs(expected).max(axis=(1, 2)))
        return np.unique(maps[is_linear], axis=0)
    return np.zeros((0, 1, 2))


def _at_count(value: Any, count: jax.Array) -> Any:
    """The count in the place of what counts: a rate may follow it."""
    is_count = jnp.issubdtype(value.dtype, jnp.integer) and not value.shape
    return count.astype(value.dtype) if is_count else value
