"""Whether nodes with different anchors come to agree: an outer optimizer is simulated.

docs/guides/transforms.md has a table of what is stable.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import optax

from gossipjax.algorithms.outer.plan import OuterPlan
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.stability import follow_nodes

ROUNDS = 1000  # of each segment of a schedule
WINDOW = 100  # rounds of which the largest difference counts, because nodes may swing
GROWTH = 4.0  # over the last half; of an optimizer whose steps are bounded it is at most 2
DIVERGED = 1e3  # from 1 at the start: a rate that falls comes too late
PARTS = 2.0 ** -np.arange(0, 3.5, 0.25)  # of the way, which local steps go to an optimum


def require_stable(tx: optax.GradientTransformationExtraArgs, plan: OuterPlan) -> None:
    """Raises `ValueError` if differences between nodes grow, where every step is an outer one.

    By rounds, local steps move no node. By a gossip, they go a part of the way to 0; 14 such parts
    are simulated side by side.
    """
    assert plan.schedule is not None
    start = np.random.default_rng(0).normal(size=(plan.schedule.size, 1))
    start -= start.mean()
    parts = PARTS if isinstance(plan.average, ExchangePlan) else np.zeros(1)
    start = np.tile(start, len(parts))
    grows = False
    with contextlib.suppress(Exception):  # a rate may be traced, or outer_tx take no single number
        segments = follow_nodes(tx, plan.schedule, plan.wire, start, ROUNDS, parts)
        grows = any(map(_grows, segments))
    if grows:
        raise ValueError(
            "outer must be stable, so that nodes come to agree, got an outer_tx by which they "
            "diverge over this average: take a smaller rate or momentum, gx.topology.random_pairs "
            "or ring, or of a gossip another, or damped=True; docs/guides/transforms.md has a "
            "table."
        )


def _grows(logs: np.ndarray) -> bool:
    if not logs[-WINDOW:].max() <= math.log(DIVERGED):
        return True
    if len(logs) < 2 * WINDOW:  # a segment that ends before differences can grow
        return False
    late, half = (part[-WINDOW:].max(axis=0) for part in (logs, logs[: len(logs) // 2]))
    return bool((late > half + math.log(GROWTH)).any())
