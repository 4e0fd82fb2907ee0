"""Schedules composed of given mixing matrices or of other schedules. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gossipjax.topology._round import Round, read_numbers, require_int
from gossipjax.topology._static import complete
from gossipjax.topology.schedule import MAX_CYCLE, Schedule, Segment

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def from_matrices(matrices: ArrayLike) -> Schedule:
    """Schedule of given mixing matrices, `[N, N]` or `[T, N, N]`.

    Raises:
      ValueError: for a column that does not sum to 1 (within 1e-6), a negative weight, a zero on a
        diagonal, or rounds that never connect all nodes; it names the round, and the column, entry
        or node. Also for rows of different lengths, and traced arrays, which have no values yet.

    >>> from_matrices([[0.5, 0.25], [0.5, 0.75]]).is_doubly_stochastic
    False
    """
    stacked = read_numbers(matrices, "[N, N] or [T, N, N]")
    if stacked.ndim == 2:
        stacked = stacked[None]
    if stacked.ndim != 3:
        raise ValueError(
            f"matrices must have shape [N, N] or [T, N, N], got {list(stacked.shape)}."
        )
    return Schedule([Round(matrix, f"round {t}") for t, matrix in enumerate(stacked)])


def piecewise(schedules: Mapping[int, Schedule]) -> Schedule:
    """One schedule after another, switched at the given steps.

    Each schedule starts at its own round 0. The result has no `.period`, unless only one schedule
    is given. The switch points count rounds, so they are multiplied by `k` in `.every(k)`: to
    switch at step 300 of training with an exchange every 2 steps, give 150.

    Args:
      schedules: the schedules by the step at which each starts; one must start at step 0.

    Raises:
      ValueError: if `schedules` is not a mapping, no schedule starts at 0, a start is negative, a
        schedule is piecewise itself, or the schedules differ in size.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      arXiv:1811.10792, table 3 (hybrids).

    >>> import gossipjax as gx
    >>> hybrid = piecewise({0: gx.topology.complete(8), 300: gx.topology.one_peer_exponential(8)})
    >>> hybrid.round_at(299).is_uniform, hybrid.round_at(300).is_uniform
    (True, False)
    """
    if not isinstance(schedules, Mapping):
        raise ValueError(
            "schedules must be a mapping from steps to schedules, such as {0: first, 300: second}, "
            f"got {type(schedules).__name__}."
        )
    for start, schedule in schedules.items():
        require_int(start, "each start of piecewise", 0)
        if not isinstance(schedule, Schedule):
            raise ValueError(
                f"the schedule from step {start} must be a Schedule, got "
                f"{type(schedule).__name__}: gx.topology builds them."
            )
    starts = sorted(schedules)
    if not starts or starts[0] != 0:
        raise ValueError(
            f"one schedule of piecewise must start at step 0, got the starts {starts}."
        )
    sizes = {start: schedules[start].size for start in starts}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the schedules of piecewise must have the same size, got N = {sizes} by start."
        )
    rounds: list[Round] = []
    segments = []
    for start in starts:
        schedule = schedules[start]
        first, *others = schedule.segments
        if others:
            raise ValueError(
                f"the schedule from step {start} must not be piecewise itself, got "
                f"{len(schedule.segments)} segments. Add each of them here with its start."
            )
        segments.append(Segment(int(start), tuple(len(rounds) + k for k in first.cycle)))
        rounds.extend(schedule.rounds)
    return Schedule(rounds, segments)


def periodic(schedule: Schedule, every: int) -> Schedule:
    """The schedule with the exact average in place of its round at every `every`-th step.

    Steps `every - 1`, `2 every - 1`, ... average exactly; every other step `k` uses the round that
    `schedule` has at step `k`, so that the round in place of which the average stands is left out.
    With `sgp`, or `dpsgd`, it is Gossip-PGA. Under overlap the average arrives as late as other
    messages.

    Raises:
      ValueError: if `every` is not an integer >= 1, or a cycle would have more than 2^20 steps.

    References:
      Chen et al., "Accelerating Gossip SGD with Periodic Global Averaging", ICML 2021,
      arXiv:2105.09080.

    >>> import gossipjax as gx
    >>> gossip_pga = periodic(gx.topology.one_peer_exponential(8), 4)
    >>> [gossip_pga.round_at(k).is_uniform for k in range(5)]
    [False, False, False, True, False]
    """
    every = require_int(every, "every of periodic(schedule, every)", 1)
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"the schedule of periodic must be a Schedule, got {type(schedule).__name__}."
        )
    exact = len(schedule.rounds)
    segments = []
    for start, cycle in schedule.segments:
        length = math.lcm(len(cycle), every)
        if length > MAX_CYCLE:
            raise ValueError(
                f"every of periodic(schedule, every) must make cycles of at most {MAX_CYCLE} "
                f"steps, got {every}: with a cycle of {len(cycle)} rounds they have {length}."
            )
        rounds = [cycle[k % len(cycle)] for k in range(length)]
        rounds[every - 1 - start % every :: every] = [exact] * (length // every)
        segments.append(Segment(start, tuple(rounds)))
    return Schedule([*schedule.rounds, *complete(schedule.size).rounds], segments)
