"""Rounds and schedules: validated mixing matrices, and which of them a step uses. NumPy only.

`P[i, j]` is the weight with which receiver `i` takes what sender `j` sends. Every column sums to 1
(no mass is lost) and every `P[i, i] > 0` (every node keeps a part of its own).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gossipjax.edge_coloring import Slot, color_edges

TOLERANCE = 1e-6  # of a column's or a row's sum: matrices that were stored in float32 pass
MOST_STEPS = 2**31  # traced steps are int32


def require_whole(value: Any, what: str, minimum: int) -> int:
    """`value` as an int; `ValueError` unless it is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{what} is a whole number of at least {minimum}; given {value!r}.")
    return int(value)


class Round:
    """One exchange: the mixing matrix `P` `[N, N]` and its decomposition into slots.

    Columns that sum to 1 within 1e-6 only are divided by their sum.

    Raises:
      ValueError: if `matrix` is not square, has a negative or non-finite entry, a column that does
        not sum to 1, or a zero on its diagonal (SGP-19, assumption 4).

    >>> Round([[0.5, 0.5], [0.5, 0.5]], "pair").slots[0].receivers.tolist()
    [1, 0]
    """

    def __init__(self, matrix: np.typing.ArrayLike, name: str = "round 0"):
        if np.iscomplexobj(matrix):
            raise ValueError(f"{name}: weights are real; given complex ones.")
        matrix = np.array(matrix, dtype=np.float64)
        _validate(matrix, name)
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
        """Nobody sends anything."""
        return not (self.matrix - np.diag(np.diag(self.matrix))).any()

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Every entry is 1/N: the exact average."""
        return bool(np.allclose(self.matrix, 1 / self.size, rtol=TOLERANCE, atol=0))

    @functools.cached_property
    def is_doubly_stochastic(self) -> bool:
        """Rows sum to 1 too, so the push-sum weights stay 1."""
        return bool(np.allclose(self.matrix.sum(axis=1), 1, rtol=0, atol=TOLERANCE))

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The off-diagonal part as K full permutations, K the largest in- or out-degree."""
        return color_edges(self.matrix)


def _validate(matrix: np.ndarray, name: str) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"{name}: a mixing matrix is [N, N]; given shape {list(matrix.shape)}.")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        i, j = np.argwhere(~(matrix >= 0) | ~np.isfinite(matrix))[0]
        raise ValueError(
            f"{name}: P[{i}, {j}] = {matrix[i, j]}; weights are finite and not negative."
        )
    sums = matrix.sum(axis=0)
    if (np.abs(sums - 1) > TOLERANCE).any():
        j = int(np.argmax(np.abs(sums - 1)))
        hint = ""
        if np.allclose(matrix.sum(axis=1), 1, rtol=0, atol=TOLERANCE):
            hint = " Its rows do: give the transpose, P[i, j] is what receiver i takes of sender j."
        raise ValueError(
            f"{name}: column {j} sums to {sums[j]:.9g}; every column of P sums to 1, or mass "
            f"would be lost.{hint}"
        )
    if (np.diag(matrix) == 0).any():
        i = int(np.argmin(np.diag(matrix)))
        raise ValueError(
            f"{name}: P[{i}, {i}] = 0; every node keeps a part of its own model (SGP-19, "
            "assumption 4). Give the diagonal a positive weight."
        )


class Piece(NamedTuple):
    """From step `start` on, the rounds with these numbers, in a cycle."""

    start: int
    cycle: tuple[int, ...]


class Schedule:
    """Which round every step uses. Built by `gossipjax.topology`.

    Schedules with the same rounds at every step are equal, and hash alike.

    Attributes:
      rounds: the distinct rounds, whatever the length of the cycle.
      pieces: from which step on which of them, in a cycle; one piece unless made by `piecewise`.

    Raises:
      ValueError: if the rounds differ in size, or the rounds of a cycle together do not connect
        every node to every other.

    >>> import gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(8)
    >>> schedule.size, schedule.period, schedule.matrices().shape
    (8, 3, (3, 8, 8))
    """

    def __init__(self, rounds: Sequence[Round], pieces: Sequence[Piece] | None = None):
        if not all(isinstance(r, Round) for r in rounds):
            raise ValueError("a schedule is built by gx.topology; from_matrices takes matrices.")
        if not rounds:
            raise ValueError("a schedule needs at least one round; given none.")
        if len({r.size for r in rounds}) > 1:
            raise ValueError(f"rounds of different sizes: N = {sorted({r.size for r in rounds})}.")
        if pieces is None:
            pieces = [Piece(0, tuple(range(len(rounds))))]
        keys = [r.matrix.tobytes() for r in rounds]
        by_key = dict(zip(keys, rounds, strict=True))
        used = dict.fromkeys(keys[k] for piece in pieces for k in piece.cycle)
        number = {key: k for k, key in enumerate(used)}
        self.rounds: tuple[Round, ...] = tuple(by_key[key] for key in used)
        self.pieces: tuple[Piece, ...] = tuple(
            Piece(piece.start, tuple(number[keys[k]] for k in piece.cycle)) for piece in pieces
        )
        self._first_steps: dict[int, dict[tuple[int, ...], int]] = {}  # by lookback
        if self.pieces[-1].start >= MOST_STEPS:
            raise ValueError(f"steps are below 2^31; a piece starts at {self.pieces[-1].start}.")
        for piece in self.pieces:
            self._require_connected(piece)

    def _require_connected(self, piece: Piece) -> None:
        adjacency = np.sum([self.rounds[k].matrix for k in set(piece.cycle)], axis=0) > 0
        for direction, links in (("send to", adjacency.T), ("hear from", adjacency)):
            reached = np.arange(self.size) == 0
            while (grown := reached | links[reached].any(axis=0)).sum() > reached.sum():
                reached = grown
            if not reached.all():
                raise ValueError(
                    f"this schedule (T = {len(piece.cycle)}) never connects all {self.size} nodes: "
                    f"node 0 can never {direction} node {int(np.argmin(reached))}, not even "
                    "through others. Add rounds, or edges."
                )

    def __repr__(self) -> str:
        pieces = ", ".join(f"{p.start}: rounds {list(p.cycle)}" for p in self.pieces)
        slots = [
            0 if r.is_identity else self.size - 1 if r.is_uniform else len(r.slots)
            for r in self.rounds
        ]
        return f"Schedule(size={self.size}, {{{pieces}}}, peers by round {slots})"

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.pieces, tuple(r.matrix.tobytes() for r in self.rounds)

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
        """T, the number of rounds of one cycle. A piecewise schedule has none."""
        only, *others = self.pieces
        if others:
            raise AttributeError(
                "a piecewise schedule has no period; its parts are in schedule.pieces."
            )
        return len(only.cycle)

    @property
    def is_doubly_stochastic(self) -> bool:
        """Rows sum to 1 as well as columns, in every round."""
        return all(r.is_doubly_stochastic for r in self.rounds)

    def index_at(self, step: int) -> int:
        """The number in `rounds` of the round at `step`; steps before 0 wrap."""
        piece = next((p for p in reversed(self.pieces) if p.start <= step), self.pieces[0])
        return piece.cycle[(step - piece.start) % len(piece.cycle)]

    def round_at(self, step: int) -> Round:
        """The round of step number `step`; steps before 0 wrap.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> schedule.round_at(4) is schedule.round_at(1)
        True
        """
        return self.rounds[self.index_at(step)]

    def matrices(self, steps: int | None = None) -> np.ndarray:
        """The mixing matrices of the first `steps` steps (one cycle if not given), `[T, N, N]`.

        Raises:
          AttributeError: without `steps` on a piecewise schedule, which has no cycle.
        """
        count = self.period if steps is None else require_whole(steps, "steps", 1)
        return np.stack([self.round_at(k).matrix for k in range(count)])

    def every(self, k: int, phase: int = 0) -> Schedule:
        """The same schedule with `k - 1` rounds of no exchange after each round: local steps.

        Round `r` falls on step `r * k + phase`. A phase of `k - 1` puts the exchange at the end of
        every k steps, where `optax.MultiSteps` emits its update. The switches of a piecewise
        schedule are moved to `k` times their step, since the rounds are what is counted.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).period
        6
        """
        k = require_whole(k, "k of every(k)", 1)
        if require_whole(phase, "the phase", 0) >= k:
            raise ValueError(f"every({k}, phase) needs a phase of 0 to {k - 1}; given {phase!r}.")
        if k == 1:
            return self
        silence = len(self.rounds)
        spread = [
            Piece(
                p.start * k,
                tuple(number if i == phase else silence for number in p.cycle for i in range(k)),
            )
            for p in self.pieces
        ]
        return Schedule([*self.rounds, Round(np.eye(self.size))], spread)

    def _window(self, step: int, lookback: int) -> tuple[int, ...]:
        return tuple(self.index_at(step - i) for i in range(lookback + 1))

    def _windows(self, lookback: int) -> dict[tuple[int, ...], int]:
        """The first step of every distinct window of `lookback + 1` rounds."""
        if lookback not in self._first_steps:
            first: dict[tuple[int, ...], int] = {}
            ends = [p.start for p in self.pieces[1:]]
            for piece, end in zip(self.pieces, [*ends, None], strict=True):
                # From start + lookback on the window lies in this piece and repeats with its cycle.
                stop = piece.start + lookback + len(piece.cycle)
                for step in range(piece.start, stop if end is None else min(stop, end)):
                    first.setdefault(self._window(step, lookback), step)
            self._first_steps[lookback] = first
        return self._first_steps[lookback]

    def canonical_step(self, step: int, lookback: int = 0) -> int:
        """The smallest step number with the same rounds at it and at the `lookback` steps before.

        Pass it as the static `step` of a train step: one program is compiled per distinct round.
        Steps before 0 wrap.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> [schedule.canonical_step(k) for k in range(5)]
        [0, 1, 2, 0, 1]
        """
        step, lookback = require_whole(step, "step", 0), require_whole(lookback, "lookback", 0)
        return self._windows(lookback)[self._window(step, lookback)]

    def canonical_steps(self, lookback: int = 0) -> list[int]:
        """All values that `canonical_step` takes: one per program that a loop compiles.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).canonical_steps()
        [0, 1, 2, 4]
        """
        return sorted(self._windows(lookback).values())
