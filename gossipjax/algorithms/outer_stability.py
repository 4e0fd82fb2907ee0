"""Whether anchors that differ between the nodes come to agree where no node moves."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms import frame
from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import Recurrence, require_stable

SCALE = 2.0**-10  # of the probes: optimizers that clip are linear there
LINEARITY = 1e-2  # relative deviation from which on an optimizer is not linear
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
