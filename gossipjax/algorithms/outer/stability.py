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
GROWTH = 4.0  # over the last half; with bounded steps differences at most double in it
DIVERGED = 1e3  # times the start: nodes diverged, even if a falling rate calms them later
PARTS = 2.0 ** -np.arange(0, 3.5, 0.25)  # of the way to the optimum that local steps go


def require_stable(tx: optax.GradientTransformationExtraArgs, plan: OuterPlan) -> None:
    """Simulates `tx`, an outer step in each step; raises `ValueError` if nodes drift apart.

    If the rounds of a schedule average, local steps do not move the nodes. If a gossip replaces the
    average, local steps go a part of the way to the optimum, 0; all `PARTS` run side by side.
    """
    assert plan.schedule is not None
    start = np.random.default_rng(0).normal(size=(plan.schedule.size, 1))
    start -= start.mean()
    parts = PARTS if isinstance(plan.average, ExchangePlan) else np.zeros(1)
    start = np.tile(start, len(parts))
    grows = False
    # A simulation may fail: a rate is traced, or outer_tx cannot take a single number.
    with contextlib.suppress(Exception):
        segments = follow_nodes(tx, plan.schedule, plan.wire, start, ROUNDS, parts)
        grows = any(map(_has_grown, segments))
    if grows:
        raise ValueError(
            "outer must be stable, so that nodes come to agree, got an outer_tx by which they "
            "diverge over this average: take a smaller rate or momentum, gx.topology.random_pairs "
            "or ring; if average is a gossip, another one, or damped=True. "
            "docs/guides/transforms.md has a table."
        )


def _has_grown(logs: np.ndarray) -> bool:
    """Says whether the nodes of any of S simulated runs drift apart, within R rounds.

    `logs` `[R, S]` are logarithms of how far apart they are after each round, over the start. They
    drift apart if they end `DIVERGED` times as far apart, or `GROWTH` times as far as at half-time.
    """
    if not logs[-WINDOW:].max() <= math.log(DIVERGED):  # also if it is NaN
        return True
    if len(logs) < 2 * WINDOW:  # a segment that ends before differences can grow
        return False
    at_half = logs[: len(logs) // 2][-WINDOW:].max(axis=0)
    at_end = logs[-WINDOW:].max(axis=0)
    return bool((at_end > at_half + math.log(GROWTH)).any())
