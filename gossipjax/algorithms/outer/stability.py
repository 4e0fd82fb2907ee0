"""Simulates an outer optimizer to see whether nodes with different anchors come to agree.

docs/guides/transforms.md has a table of what is stable.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import follow_differences

ROUNDS = 1000  # of each segment of a schedule
WINDOW = 100  # rounds of which the largest difference counts, because nodes may swing
GROWTH = 4.0  # over the last half; of an optimizer whose steps are bounded it is at most 2
DIVERGED = 1e3  # from 1 at the start: a rate that falls comes too late
PARTS = 2.0 ** -np.arange(0, 3.5, 0.25)  # of the way, which local steps go to an optimum

Transform = optax.GradientTransformationExtraArgs


def require_stable(
    outer_tx: Transform, schedule: Schedule, pull: float, mix: float, gossip: Transform | None
) -> None:
    """Raises `ValueError` if differences between the nodes grow.

    Without `gossip`, no node moves. With `gossip`, every local step goes a part of the way to 0; 14
    such parts are simulated side by side.
    """
    starts = np.random.default_rng(0).normal(size=(schedule.size, 1))
    starts -= starts.mean()
    grows = False
    # A rate may be traced, or outer_tx may take no single number.
    with contextlib.suppress(Exception), jax.numpy_dtype_promotion("standard"):
        if gossip is None:
            move, values = _average_by_rounds(outer_tx, pull, mix, starts)
        else:
            move, values = _average_by_gossip(outer_tx, gossip, starts)
        grows = any(map(_grows, follow_differences(schedule, move, values, ROUNDS, _sizes)))
    if grows:
        raise ValueError(
            "outer must be stable, so that nodes come to agree, got an outer_tx by which they "
            "diverge over this average: take a smaller rate or momentum, gx.topology.random_pairs "
            "or ring, or of a gossip another, or damped=True; docs/guides/transforms.md has a "
            "table."
        )


def _sizes(values: Any) -> np.ndarray:
    return np.abs(values[0]).max(axis=0)


def _grows(logs: np.ndarray) -> bool:
    if not logs[-WINDOW:].max() <= math.log(DIVERGED):
        return True
    if len(logs) < 2 * WINDOW:  # a segment that ends before differences can grow
        return False
    late, half = (part[-WINDOW:].max(axis=0) for part in (logs, logs[: len(logs) // 2]))
    return bool((late > half + math.log(GROWTH)).any())


def _average_by_rounds(outer_tx: Transform, pull: float, keep: float, starts: np.ndarray) -> Any:
    """`D = P (a - x) + pull (a - P a); a <- a + outer_tx(D at a); x <- keep x + (1 - keep) a`."""
    state = _init_all(outer_tx.init, starts)
    update = _compile(jax.vmap(jax.vmap(outer_tx.update)), np.float32(starts), state, starts)

    def move(mix_nodes: Any, values: Any, step: int) -> Any:
        del step
        a, x, state = values
        D = mix_nodes(a - x - pull * a) + pull * a
        v, state = update(np.float32(D), state, np.float32(a))
        a = a + np.asarray(v, np.float64)
        return a, keep * x + (1 - keep) * a, state

    return move, (starts, starts, state)


def _average_by_gossip(outer_tx: Transform, gossip: Transform, starts: np.ndarray) -> Any:
    """`v = outer_tx(p z at z)` for every part p, and then a round of the gossip itself."""
    z = np.tile(np.float32(starts), len(PARTS))
    states = _init_all(lambda z: (outer_tx.init(z), gossip.init(z)), z)
    parts = np.float32(PARTS)

    def one_round(z: Any, part: Any, states: Any, step: Any) -> Any:
        outer_state, gossip_state = states
        v, outer_state = outer_tx.update(part * z, outer_state, z)
        change, gossip_state = gossip.update(v, gossip_state, z, step=step)
        return z + change, (outer_state, gossip_state)

    run = jax.vmap(one_round, (0, 0, 0, None))
    axis_names = states[1].wire.axis_name, states[1].wire.local_axis_name
    run = jax.vmap(run, (0, None, 0, None), axis_name=axis_names[0])
    if axis_names[1] is not None:  # every node has one device
        run = jax.vmap(run, (None,) * 4, None, axis_name=axis_names[1], axis_size=1)
    run = _compile(run, z, parts, states, np.int32(0))

    def move(mix_nodes: Any, values: Any, step: int) -> Any:
        del mix_nodes  # the gossip finds its round by the step
        return run(values[0], parts, values[1], np.int32(step))

    return move, (z, states)


def _init_all(init: Callable[[Any], Any], values: np.ndarray) -> Any:
    """The states of all numbers `[N, S]`, even where the caller is being traced."""
    with jax.ensure_compile_time_eval():
        return jax.vmap(jax.vmap(init))(jnp.asarray(values, jnp.float32))


def _compile(function: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(function).lower(*args).compile()
