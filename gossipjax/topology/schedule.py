"""Schedules, which say which round each step uses. NumPy only."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from gossipjax.renamed import renamed
from gossipjax.topology._round import TOLERANCE, Round, find_unreached, require_int

__all__ = ["MAX_STEP", "TOLERANCE", "Round", "Schedule", "Segment", "require_int"]

MAX_STEP = 2**31 - 1  # traced steps are int32
MAX_LOOKBACK = 2**10  # how many earlier steps may decide about the program of a step

P = ParamSpec("P")


class Segment(NamedTuple):
    """The cycle of rounds that a schedule repeats from step `start` on.

    `cycle` holds indices into `Schedule.rounds`.

    >>> import gossipjax as gx
    >>> gx.topology.one_peer_exponential(8).segments
    (Segment(start=0, cycle=(0, 1, 2)),)
    """

    start: int
    cycle: tuple[int, ...]


class Schedule:
    """Says which round each step uses. The functions of `gossipjax.topology` build schedules.

    Schedules with the same rounds at every step are equal and have equal hashes.

    Attributes:
      rounds: the distinct rounds, in the order of their first use.
      segments: the cycles of rounds, each with the step at which it starts. Only `piecewise` makes
        more than one segment.
      deaths: a dict from a node to the step from which it exchanges nothing any more. A segment
        starts at this step. Only `gx.faults.apply` makes deaths.

    Raises:
      ValueError: if the rounds differ in size, or the rounds of a cycle do not connect all living
        nodes.

    >>> import gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(8)
    >>> schedule
    one_peer_exponential(8): 8 nodes, period 3
    >>> schedule.matrices().shape
    (3, 8, 8)
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        segments: Sequence[Segment] | None = None,
        deaths: Mapping[int, int] | None = None,
    ):
        if not len(rounds) or not all(isinstance(round_, Round) for round_ in rounds):
            raise ValueError(
                "rounds must be at least one Round object, and nothing else, got a "
                f"{type(rounds).__name__}: gx.topology.from_matrices takes matrices, and "
                "gx.topology.from_graph a graph."
            )
        sizes = sorted({round_.size for round_ in rounds})
        if len(sizes) > 1:
            raise ValueError(f"rounds must all have the same size, got N = {sizes}.")
        if segments is None:
            segments = [Segment(0, tuple(range(len(rounds))))]
        # Equal rounds are kept once, in the order of their first use.
        used = dict.fromkeys(rounds[k] for segment in segments for k in segment.cycle)
        index_by_round = {round_: index for index, round_ in enumerate(used)}
        new_index = [index_by_round.get(round_, -1) for round_ in rounds]  # -1 if no step uses it
        self.rounds: tuple[Round, ...] = tuple(used)
        self.segments: tuple[Segment, ...] = tuple(
            Segment(segment.start, tuple(new_index[k] for k in segment.cycle))
            for segment in segments
        )
        self.deaths = dict(deaths or {})
        self._name = "Schedule"  # for `repr` alone: schedules of different names may be equal
        self._starts = [segment.start for segment in self.segments]
        self._canonical_steps: dict[int, list[list[int]]] = {}  # by lookback
        self._made_by_every: dict[tuple[int, int], Schedule] = {}  # by the arguments of `every`
        for segment in self.segments:
            self._require_connected(segment)

    def _require_connected(self, segment: Segment) -> None:
        """Raises `ValueError` if a living node cannot reach another, so that they never agree."""
        used = [self.rounds[k] for k in dict.fromkeys(segment.cycle)]
        dead = [node for node, step in self.deaths.items() if step <= segment.start]
        if (unreached := find_unreached(used, dead)) is not None:
            raise ValueError(
                f"a schedule must connect all {self.size - len(dead)} nodes, got one (T = "
                f"{len(segment.cycle)}) in which {unreached}, not even through other nodes. Add "
                "rounds or edges."
            )

    def __repr__(self) -> str:
        count = len(self.segments)
        repeats = f"period {self.period}" if count == 1 else f"{count} segments"
        return f"{self._name}: {self.size} node{'s' * (self.size > 1)}, {repeats}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles no caches: the cached hash would be wrong in another process.
        arguments = self.rounds, self.segments, self.deaths
        return Schedule, arguments, {"_name": self._name}

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Schedule)
            and (self.segments, self.rounds) == (other.segments, other.rounds)
        )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.rounds))

    @property
    def size(self) -> int:
        """N, the number of nodes."""
        return self.rounds[0].size

    @property
    def period(self) -> int:
        """T, the number of rounds in one cycle; `AttributeError` for a piecewise schedule."""
        first, *others = self.segments
        if others:
            raise AttributeError(
                "a piecewise schedule has no period; the cycles of its parts are in "
                "schedule.segments."
            )
        return len(first.cycle)

    @property
    def is_doubly_stochastic(self) -> bool:
        """Says whether rows and columns both sum to 1 in every round."""
        return all(round_.is_doubly_stochastic for round_ in self.rounds)

    def index_at(self, step: int) -> int:
        """Returns the index into `rounds` of the round at `step`; steps before 0 wrap around.

        Raises:
          ValueError: if `step` is not an integer, or is traced.
        """
        try:
            step = operator.index(step)
        except TypeError as error:  # JAX's error for traced values is a TypeError
            raise ValueError(
                f"step must be an integer, got {step!r}. Rounds of a traced step are known only "
                "when the program runs: pass the step to gx.mix or to the update of an algorithm."
            ) from error
        start, cycle = self.segments[self._segment_index_at(step)]
        return cycle[(step - start) % len(cycle)]

    def _segment_index_at(self, step: int) -> int:  # the first segment for steps before 0
        return max(0, bisect.bisect_right(self._starts, step) - 1)

    def round_at(self, step: int) -> Round:
        """Returns the round at `step`; steps before 0 wrap around.

        Raises:
          ValueError: if `step` is not an integer, or is traced.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> schedule.round_at(4) is schedule.round_at(1)
        True
        """
        return self.rounds[self.index_at(step)]

    def matrices(self, steps: int | None = None) -> np.ndarray:
        """Returns the mixing matrices `[steps, N, N]` of the first steps, by default of one cycle.

        Raises:
          AttributeError: if you do not give `steps` and the schedule is piecewise, so that it has
            no period.

        >>> import gossipjax as gx
        >>> gx.topology.directed_ring(2).matrices(3).shape
        (3, 2, 2)
        """
        count = self.period if steps is None else require_int(steps, "steps", 1)
        return np.stack([self.round_at(step).matrix for step in range(count)])

    def every(self, k: int, phase: int = 0) -> Schedule:
        """Makes a schedule whose nodes exchange only at every k-th step; other steps are local.

        Nodes use round `r` at step `r * k + phase`. With `phase = k - 1` nodes exchange at the last
        of every k steps, at which `optax.MultiSteps` makes its update. The steps at which a
        piecewise schedule switches are multiplied by `k`. If you call `every` again with equal
        arguments, you get the same object.

        Raises:
          ValueError: if `k` is below 1, or `phase` is not one of `0, ..., k - 1`.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).period
        6
        """
        k = require_int(k, "k of every(k, phase)", 1)
        phase = require_int(phase, f"phase of every({k}, phase)", 0, k - 1)
        if k == 1:
            return self
        if (k, phase) not in self._made_by_every:
            identity = len(self.rounds)  # the index of the round that is added below
            segments = []
            for start, cycle in self.segments:
                longer = [identity] * (k * len(cycle))
                longer[phase::k] = cycle
                segments.append(Segment(start * k, tuple(longer)))
            nodes = range(self.size)
            rounds = [*self.rounds, Round.from_entries(self.size, nodes, nodes, 1)]
            deaths = {node: step * k for node, step in self.deaths.items()}
            longer_schedule = Schedule(rounds, segments, deaths)
            longer_schedule._name = f"{self._name}.every({k}{f', {phase}' if phase else ''})"
            self._made_by_every[k, phase] = longer_schedule
        return self._made_by_every[k, phase]

    def _find_canonical_steps(self, lookback: int) -> list[list[int]]:
        """Finds for each segment the canonical steps of its first `lookback + len(cycle)` steps.

        The window of a step is its round and the rounds of the `lookback` steps before it. Of all
        steps with the same window, the first is canonical. Once windows lie within the segment,
        canonical steps repeat after each cycle.
        """
        lookback = require_int(lookback, "lookback", 0)
        if len(self.segments) == 1:
            lookback = min(lookback, self.period - 1)  # longer windows contain no other round
        require_int(lookback, "lookback", 0, MAX_LOOKBACK)
        if lookback not in self._canonical_steps:
            first_step: dict[tuple[int, ...], int] = {}  # by the rounds of the window
            ends = [*self._starts[1:], math.inf]
            self._canonical_steps[lookback] = []
            for (start, cycle), end in zip(self.segments, ends, strict=True):
                steps = range(start, int(min(start + lookback + len(cycle), end)))
                rounds = [self.index_at(step) for step in range(start - lookback, steps.stop)]
                windows = [tuple(rounds[i : i + lookback + 1]) for i in range(len(steps))]
                self._canonical_steps[lookback].append(
                    [first_step.setdefault(w, k) for w, k in zip(windows, steps, strict=True)]
                )
        return self._canonical_steps[lookback]

    def canonical_step(self, step: int, lookback: int = 0) -> int:
        """Returns the smallest step that compiles to the same program as `step`.

        The result uses the same round as `step`. The `lookback` steps before the result use the
        same rounds as those before `step`; the rounds before step 0 are those of the end of the
        period. Pass the result as the static `step` of a train step: without `lookback`, JAX
        then compiles one program per distinct round.

        Raises:
          ValueError: if `step` or `lookback` is not an integer >= 0, or `lookback` and the period
            are above 1024.

        >>> import gossipjax as gx
        >>> schedule = gx.topology.one_peer_exponential(8)
        >>> [schedule.canonical_step(k) for k in range(5)]
        [0, 1, 2, 0, 1]
        """
        step = require_int(step, "step", 0)
        index = self._segment_index_at(step)
        start, cycle = self.segments[index]
        steps = self._find_canonical_steps(lookback)[index]
        offset = step - start
        if offset >= len(steps):  # beyond the list, its last `len(cycle)` entries repeat
            offset = len(steps) - len(cycle) + (offset - len(steps)) % len(cycle)
        return steps[offset]

    def canonical_steps(self, lookback: int = 0) -> list[int]:
        """Returns all values of `canonical_step`: a training loop compiles one program for each.

        >>> import gossipjax as gx
        >>> gx.topology.one_peer_exponential(8).every(2).canonical_steps()
        [0, 1, 2, 4]
        """
        return sorted(set(itertools.chain(*self._find_canonical_steps(lookback))))


def named(build: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Decorates a builder: the `repr` of its schedules begins with the call, such as `ring(8)`."""
    checked = renamed(n="nodes")(build)  # the old argument `n` raises an error that says `nodes`

    @functools.wraps(build)
    def build_named(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        schedule = checked(*args, **kwargs)
        arguments = [*map(_format_argument, args)]
        arguments += [f"{key}={_format_argument(value)}" for key, value in kwargs.items()]
        schedule._name = f"{build.__name__}({', '.join(arguments)})"
        return schedule

    return build_named


def _format_argument(argument: Any) -> str:
    """Formats an argument of a builder for the `repr`; of an array or a graph, only its type."""
    if isinstance(argument, Schedule):
        return argument._name
    if isinstance(argument, Mapping):
        items = [f"{key}: {_format_argument(value)}" for key, value in argument.items()]
        return f"{{{', '.join(items)}}}"
    is_short = isinstance(argument, str | int | np.integer)
    return f"{argument!r}" if is_short else type(argument).__name__
