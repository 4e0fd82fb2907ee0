"""Simulates an outer optimizer to see whether nodes with different anchors come to agree.

docs/guides/transforms.md has a table of what is stable.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import multiply_round

ROUNDS = 1000  # of each part of a schedule
GROWTH = 4.0  # over the last half; of an optimizer whose steps are bounded it is at most 2
DIVERGED = 1e3  # from 1 at the start: a rate that falls comes too late
PARTS = 2.0 ** -np.arange(0, 3.5, 0.25)  # of the way, which local steps go to an optimum

Transform = optax.GradientTransformationExtraArgs


def require_stable(
    outer_tx: Transform, schedule: Schedule, pull: float, mix: float, gossip: set[str] | None
) -> None:
    """Raises `ValueError` if differences between the nodes grow.

    Without `gossip`, no node moves. With `gossip`, the names of what the state of a gossip keeps,
    every local step goes a part of the way to 0; 14 such parts are simulated side by side.
    """
    grows = False
    with contextlib.suppress(Exception):  # a rate is traced, or outer_tx takes no single number
        grows = any(
            _grows(outer_tx, [schedule.rounds[i] for i in part.cycle], pull, mix, gossip)
            for part in schedule.segments
        )
    if grows:
        raise ValueError(
            "outer must be stable, so that nodes come to agree, got an outer_tx by which they "
            "diverge over this average: take a smaller rate or momentum, gx.topology.random_pairs "
            "or ring, or of a gossip another, or damped=True; docs/guides/transforms.md has a "
            "table."
        )


def _grows(
    outer_tx: Transform, rounds: list[Any], pull: float, mix: float, gossip: set[str] | None
) -> bool:
    parts = np.ones(1) if gossip is None else PARTS
    starts = np.random.default_rng(0).normal(size=(rounds[0].size, 1))
    a = np.tile(starts, (1, len(parts)))
    a -= a.mean(axis=0)
    x = a
    w = np.ones_like(starts)
    c = np.zeros_like(a)  # the correction
    kept = np.zeros_like(a)  # what damping keeps
    sizes = []
    with jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard"):
        state = jax.vmap(jax.vmap(outer_tx.init))(jnp.asarray(a, jnp.float32))
        update = jax.jit(jax.vmap(jax.vmap(outer_tx.update)))
        for step in range(ROUNDS):
            P = rounds[step % len(rounds)]
            z = x / w
            if gossip is None:
                z = a
                D = multiply_round(P, a - x - pull * a) + pull * a
            else:
                D = parts * z
            v, state = update(np.float32(D), state, np.float32(z))
            v = np.asarray(v, np.float64)
            if gossip is None:
                a = a + v
                x = mix * x + (1 - mix) * a
            else:
                x, w, c, kept = _mix(P, x, w, c, kept, v, gossip)
            sizes.append(np.abs(a if gossip is None else x).max(axis=0))
            if not sizes[-1].max() < 1e12:
                return True
    late, half = (np.max(sizes[i - 100 : i], axis=0) for i in (ROUNDS, ROUNDS // 2))
    return bool((late > GROWTH * half).any() or late.max() > DIVERGED)


def _mix(P: Any, x: Any, w: Any, c: Any, kept: Any, v: Any, gossip: set[str]) -> tuple[Any, ...]:
    """A round of `gx.sgp` or `gx.gradient_tracking`, damped or not."""
    damping = np.minimum(1, w)
    if "damped" in gossip:
        v = kept + damping * (v - kept)
        kept = v
    if "held_back" in gossip:
        total = kept + v
        v = damping * total
        kept = total - v
    new_x = multiply_round(P, x + v + c)
    new_w = multiply_round(P, w)
    if "correction" in gossip:
        c = multiply_round(P, v + c) - v
    return new_x, new_w, c, kept
