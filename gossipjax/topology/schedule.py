"""Rounds and schedules: validated mixing matrices, and which of them each step uses. NumPy only.

`P[i, j]` is the weight that receiver `i` gives to what sender `j` sends. Every column sums to 1 (no
mass is lost) and every `P[i, i] > 0` (every node keeps part of its model).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gossipjax.topology._edge_coloring import Slot, color_edges

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

TOLERANCE = 1e-6  # of the sum of a column or row: matrices that were stored in float32 pass
MAX_STEP = 2**31 - 1  # traced steps are int32


def require_int(value: Any, what: str, minimum: int) -> int:
    """Return `value` as an int; raise `ValueError` unless it is an integer >= `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{what} must be an integer >= {minimum}, got {value!r}.")
    return int(value)


class Round:
    """One exchange: a mixing matrix `P` `[N, N]` and its decomposition into slots.

    Columns that sum to 1 only within 1e-6 are divided by their sum.

    Args:
      matrix: `P`, `[N, N]`; it is copied.
      name: the name of the round in error messages.

    Raises:
      ValueError: if `matrix` is not square, has a negative or non-finite entry, a column that does
        not sum to 1, or a zero on its diagonal.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      arXiv:1811.10792, assumption 4 (the diagonal).

    >>> Round([[0.5, 0.5], [0.5, 0.5]], "pair").slots[0].receivers.tolist()
    [1, 0]
    """

    def __init__(self, matrix: ArrayLike, name: str = "round 0"):
        if np.iscomplexobj(matrix):
            raise ValueError(f"the weights of {name} must be real, got complex ones.")
        matrix = np.array(matrix, dtype=np.float64)
        _require_mixing_matrix(matrix, name)
        sums = matrix.sum(axis=0)
        matrix /= np.where(abs(sums - 1) > 1e-12, sums, 1)
        matrix.setflags(write=False)
        self.matrix = matrix

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return len(self.matrix)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether no node sends anything."""
        return not (self.matrix - np.diag(np.diag(self.matrix))).any()

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether every entry is 1/N: the exact average."""
        return bool(np.allclose(self.matrix, 1 / self.size, rtol=TOLERANCE, atol=0))

    @functools.cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether rows sum to 1 as well, so that push-sum weights stay 1."""
        return bool(np.allclose(self.matrix.sum(axis=1), 1, rtol=0, atol=TOLERANCE))

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The off-diagonal part as K full permutations; K is the largest in- or out-degree."""
        return color_edges(self.matrix)


def _require_mixing_matrix(matrix: np.ndarray, name: str) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(
            f"the mixing matrix of {name} must have shape [N, N], got {list(matrix.shape)}."
        )
    valid = np.isfinite(matrix) & (matrix >= 0)
    if not valid.all():
        i, j = np.argwhere(~valid)[0]
        raise ValueError(
            f"the weights of {name} must be finite and not negative, "
            f"got P[{i}, {j}] = {matrix[i, j]}."
        )
    sums = matrix.sum(axis=0)
    if (np.abs(sums - 1) > TOLERANCE).any():
        j = int(np.argmax(np.abs(sums - 1)))
        hint = ""
        if np.allclose(matrix.sum(axis=1), 1, rtol=0, atol=TOLERANCE):
            hint = (
                " The rows sum to 1: pass the transpose. P[i, j] is the weight that receiver i "
                "gives to sender j."
            )
        raise ValueError(
            f"the columns of {name} must sum to 1, or mass is lost, got {sums[j]:.9g} for column "
            f"{j}.{hint}"
        )
    if (np.diag(matrix) == 0).any():
        i = int(np.argmin(np.diag(matrix)))
        raise ValueError(
            f"the diagonal of {name} must be positive, so that every node keeps part of its "
            f"model, got P[{i}, {i}] = 0. Give each node a weight for itself."
        )


class Segment(NamedTuple):
    """The cycle of rounds that a schedule repeats from step `start` on.

    `cycle` holds indices into `Schedule.rounds`.
    """

    start: int
    cycle: tuple[int, ...]


class Schedule:
    """Which round each step uses. Built by `gossipjax.topology`.

    Schedules with the same rounds at every step are equal and have equal hashes.

    Attributes:
      rounds: the distinct rounds, in the order of their first use.
      segments: when each cycle of rounds starts; one segment unless made by `piecewise`.

    Raises:
      ValueError: if the rounds differ in size, or the rounds of a cycle together do not connect
        every node to every other.

    >>> import gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(8)
    >>> schedule.size, schedule.period, schedule.matrices().shape
    (8, 3, (3, 8, 8))
    """

    def __init__(self, rounds: Sequence[Round], segments: Sequence[Segment] | None = None):
        for round_ in rounds:
            if not isinstance(round_, Round):
                raise ValueError(
                    f"rounds must be Round objects, got {type(round_).__name__}. Use "
                    "gx.topology.from_matrices to build a schedule from matrices."
                )
        if not rounds:
            raise ValueError("a schedule must have at least one round, got none.")
        sizes = sorted({round_.size for round_ in rounds})
        if len(sizes) > 1:
            raise ValueError(f"rounds must all have the same size, got N = {sizes}.")
        if segments is None:
            segments = [Segment(0, tuple(range(len(rounds))))]
        if segments[-1].start > MAX_STEP:
            raise ValueError(
                f"steps must be below 2^31, got a segment that starts at {segments[-1].start}."
            )
        keys = [round_.matrix.tobytes() for round_ in rounds]
        round_by_key = dict(zip(keys, rounds, strict=True))
        used = dict.fromkeys(keys[k] for segment in segments for k in segment.cycle)
        index_by_key = {key: index for index, key in enumerate(used)}
        self.rounds: tuple[Round, ...] = tuple(round_by_key[key] for key in used)
        self.segments: tuple[Segment, ...] = tuple(
            Segment(segment.start, tuple(index_by_key[keys[k]] for k in segment.cycle))
            for segment in segments
        )
        self._steps_by_window: dict[int, dict[tuple[int, ...], int]] = {}  # by lookback
        self._local_steps: dict[tuple[int, int], Schedule] = {}  # by k and phase of `every`
        for segment in self.segments:
            self._require_connected(segment)

    def _require_connected(self, segment: Segment) -> None:
        receives = np.sum([self.rounds[k].matrix for k in set(segment.cycle)], axis=0) > 0
        for direction, links in (("send to", receives.T), ("receive from", receives)):
            reached = np.arange(self.size) == 0
            while (grown := reached | links[reached].any(axis=0)).sum() > reached.sum():
                reached = grown
            if not reached.all():
                raise ValueError(
                    f"a schedule must connect all {self.size} nodes, got one (T = "
                    f"{len(segment.cycle)}) in which node 0 can never {direction} node "
                    f"{int(np.argmin(reached))}, not even through other nodes. Add rounds or edges."
                )

    def __repr__(self) -> str:
        segments = ", ".join(f"{s.start}: rounds {list(s.cycle)}" for s in self.segments)
        peers = [_count_peers(round_) for round_ in self.rounds]
        return f"Schedule(size={self.size}, {{{segments}}}, peers by round {peers})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the caches: the hash of bytes differs between processes.
        return Schedule, (self.rounds, self.segments)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.segments, tuple(round_.matrix.tobytes() for round_ in self.rounds)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Schedule) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return self.rounds[0].size

    @property
    def period(self) -> int:
        """T, the number of rounds in one cycle. A piecewise schedule has none.

        Raises:
          AttributeError: on a piecewise schedule.
        """
        first, *others = self.segments
        if others:
            raise AttributeError(
                "a piecewise schedule has no period; the cycles of its parts are in "
                "schedule.segments."
            )
        return len(first.cycle)

    @property
    def is_doubly_stochastic(self) -> bool:
        """Whether rows sum to 1 as well as columns, in every round."""
        return all(round_.is_doubly_stochastic for round_ in self.rounds)

    def index_at(self, step: int) -> int:
        """Index into `rounds` of the round at `step`; steps before 0 wrap."""
        segment = next((s for s in reversed(self.segments) if s.start <= step), self.segments[0])
        return segment.cycle[(step - segment.start) % len(segment.cycle)]

    def round_at(self, step: int) -> Round:
        """The round at `step`; steps before 0 wrap.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> schedule.round_at(4) is schedule.round_at(1)
        True
        """
        return self.rounds[self.index_at(step)]

    def matrices(self, steps: int | None = None) -> np.ndarray:
        """Mixing matrices of the first `steps` steps, `[steps, N, N]`; by default of one cycle.

        Raises:
          AttributeError: without `steps` on a piecewise schedule, which has no period.

        >>> import gossipjax as gx
        >>> gx.topology.directed_ring(2).matrices(3).shape
        (3, 2, 2)
        """
        count = self.period if steps is None else require_int(steps, "steps", 1)
        return np.stack([self.round_at(k).matrix for k in range(count)])

    def every(self, k: int, phase: int = 0) -> Schedule:
        """The same schedule with `k - 1` rounds without exchange after each round: local steps.

        Round `r` is used at step `r * k + phase`. With `phase = k - 1` the exchange comes last of
        every k steps, where `optax.MultiSteps` emits its update. The switch points of a piecewise
        schedule count rounds, so `every(k)` multiplies them by `k`. The result is kept: equal
        arguments return the same object.

        Raises:
          ValueError: if `k` is below 1 or `phase` is not one of `0, ..., k - 1`.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).period
        6
        """
        k = require_int(k, "k of every(k, phase)", 1)
        phase = require_int(phase, "phase of every(k, phase)", 0)
        if phase >= k:
            raise ValueError(f"phase of every({k}, phase) must be at most {k - 1}, got {phase}.")
        if k == 1:
            return self
        if (k, phase) not in self._local_steps:
            self._local_steps[k, phase] = self._insert_idle_rounds(k, phase)
        return self._local_steps[k, phase]

    def _insert_idle_rounds(self, k: int, phase: int) -> Schedule:
        idle = len(self.rounds)
        segments = []
        for start, cycle in self.segments:
            longer = [idle] * (k * len(cycle))
            longer[phase::k] = cycle
            segments.append(Segment(start * k, tuple(longer)))
        return Schedule([*self.rounds, Round(np.eye(self.size))], segments)

    def _window_at(self, step: int, lookback: int) -> tuple[int, ...]:
        return tuple(self.index_at(step - i) for i in range(lookback + 1))

    def _first_steps(self, lookback: int) -> dict[tuple[int, ...], int]:
        """The first step of every distinct window of `lookback + 1` rounds."""
        if lookback not in self._steps_by_window:
            steps: dict[tuple[int, ...], int] = {}
            ends = [*(segment.start for segment in self.segments[1:]), None]
            for (start, cycle), end in zip(self.segments, ends, strict=True):
                # From start + lookback on, a window lies in this segment and repeats with its
                # cycle.
                stop = start + lookback + len(cycle)
                for step in range(start, stop if end is None else min(stop, end)):
                    steps.setdefault(self._window_at(step, lookback), step)
            self._steps_by_window[lookback] = steps
        return self._steps_by_window[lookback]

    def canonical_step(self, step: int, lookback: int = 0) -> int:
        """The smallest step with the same rounds at it and at the `lookback` steps before it.

        Pass it as the static `step` of a train step: one program is compiled per distinct round.
        Steps before 0 wrap.

        Raises:
          ValueError: if `step` or `lookback` is not an integer >= 0.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> [schedule.canonical_step(k) for k in range(5)]
        [0, 1, 2, 0, 1]
        """
        step = require_int(step, "step", 0)
        lookback = require_int(lookback, "lookback", 0)
        return self._first_steps(lookback)[self._window_at(step, lookback)]

    def canonical_steps(self, lookback: int = 0) -> list[int]:
        """All values of `canonical_step`: a training loop compiles one program for each.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).canonical_steps()
        [0, 1, 2, 4]
        """
        lookback = require_int(lookback, "lookback", 0)
        return sorted(self._first_steps(lookback).values())


def _count_peers(round_: Round) -> int:
    """The largest in- or out-degree; unlike `len(round_.slots)`, without colouring the edges."""
    edges = round_.matrix > 0
    return int(max(edges.sum(axis=0).max(), edges.sum(axis=1).max())) - 1
