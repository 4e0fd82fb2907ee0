"""Whether nodes that disagree come to agree under a linear recurrence. NumPy only."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import multiply_round

STEPS = 2**12
COLUMNS = 4  # random starts that are followed at once
AGREEMENT = -30.0  # logarithm of the differences, from 1 at the start, where nodes surely agree
DIVERGENCE = 100.0  # and where they surely do not
TOLERANCE = 1e-4  # of the growth: a factor of 1.2 in 1,500 steps
MAX_WORK = 2**28  # numbers that are computed, after which it stops: a second or two
MAX_DENSE_NODES = 2**10  # whose rounds between the steps are multiplied

Matrix = tuple[tuple[float, ...], ...]


class Recurrence(NamedTuple):
    """A step of the nodes, linear in m numbers of each, `v` `[N, m]`; P is the round:

        v <- v A^T + P v B^T

    Attributes:
      local: A, `[m, m]`.
      mixed: B, `[m, m]`.
      schedule: the rounds; None for the identity.
      between: a schedule that mixes the first of the m numbers before each step.
      window: `(every, first, count)`: before step k come the `count` rounds of `between` from
        number `k every + first` on.
    """

    local: Matrix
    mixed: Matrix
    schedule: Schedule | None
    between: Schedule | None = None
    window: tuple[int, int, int] = (1, 0, 0)


def require_stable(name: str, recurrence: Recurrence) -> None:
    """Raises `ValueError` where differences between the nodes grow; `name` is whose they are.

    >>> import gossipjax as gx
    >>> require_stable("x <- 2 x", Recurrence(((2.0,),), ((0.0,),), gx.topology.ring(4)))
    Traceback (most recent call last):
    ...
    ValueError: x <- 2 x must be stable, so that nodes come to agree where no gradient drives \
them apart, got a spectral radius of 2.0000 per round for their differences: take \
gx.topology.random_pairs or ring, or a smaller rate or momentum.
    """
    growth = growth_of_differences(recurrence)
    if growth > 1 + TOLERANCE:
        raise ValueError(
            f"{name} must be stable, so that nodes come to agree where no gradient drives them "
            f"apart, got a spectral radius of {growth:.4f} per round for their differences: take "
            "gx.topology.random_pairs or ring, or a smaller rate or momentum."
        )


@functools.lru_cache(256)
def growth_of_differences(recurrence: Recurrence) -> float:
    """The factor per step by which differences between the nodes grow in the long run.

    It is the spectral radius of the recurrence over a cycle, per step, on all v that are not the
    same on every node; from 1 on, nodes that differ never agree. It is found by power iteration in
    float64 from random differences: 4096 steps, or fewer where the nodes agree or diverge before;
    near 1 to about 1e-4. From about 5,000 nodes on there are fewer steps as well. Of a piecewise
    schedule it is the largest of its parts; of `between` the last part counts, and NaN stands for
    more than 1024 nodes.

    >>> import gossipjax as gx
    >>> ring = gx.topology.directed_ring(4)
    >>> round(growth_of_differences(Recurrence(((0.0,),), ((1.0,),), ring)), 2)  # x <- P x
    0.71
    """
    schedule = recurrence.schedule
    between = recurrence.between
    if between is not None and between.size > MAX_DENSE_NODES:
        return math.nan
    if schedule is not None:
        return max(_follow(recurrence, schedule.size, part.cycle) for part in schedule.segments)
    return 0.0 if between is None else _follow(recurrence, between.size, ())


def _follow(recurrence: Recurrence, size: int, cycle: tuple[int, ...]) -> float:
    local, mixed, schedule, between, (every, first, count) = recurrence
    identity = np.eye(COLUMNS)
    A, B = (np.kron(np.array(matrix), identity).T for matrix in (local, mixed))
    v = np.random.default_rng(0).normal(size=(size, len(A)))
    windows: dict[int, np.ndarray] = {}  # by their first round
    work = 0
    logs = [0.0]  # of the size of the differences
    while len(logs) <= STEPS and AGREEMENT < logs[-1] < DIVERGENCE and work < MAX_WORK:
        step = len(logs) - 1
        if between is not None:
            inner = between.segments[-1].cycle
            start = (step * every + first) % len(inner)
            if start not in windows:
                windows[start] = _multiply_window(between, start, count)
                work += min(count, len(inner)) * size**2
            v[:, :COLUMNS] = windows[start] @ v[:, :COLUMNS]
        sent = v @ B
        if schedule is not None:
            sent = multiply_round(schedule.rounds[cycle[step % len(cycle)]], sent)
        v = v @ A + sent
        v -= v.mean(axis=0)  # what all nodes have in common is no difference
        norm = np.linalg.norm(v)
        if not norm:
            return 0.0
        logs.append(logs[-1] + math.log(norm) if step else 0.0)
        v /= norm
        work += v.size
    half = logs[len(logs) // 2 :]
    return math.exp(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else math.nan


def _multiply_window(schedule: Schedule, start: int, count: int) -> np.ndarray:
    """The product of `count` rounds of the last cycle, `[N, N]`, of which the first is `start`."""
    cycle = schedule.segments[-1].cycle
    cycle = cycle[start:] + cycle[:start]
    repeats, rest = divmod(count, len(cycle))
    product = np.eye(schedule.size)
    if repeats:
        for index in cycle:
            product = multiply_round(schedule.rounds[index], product)
        product = np.linalg.matrix_power(product, repeats)
    for index in cycle[:rest]:
        product = multiply_round(schedule.rounds[index], product)
    return product
