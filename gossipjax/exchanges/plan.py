"""What is static about an exchange: when, with whom, in which form. A state carries it as a `Plan`.

Other code asks the plan about a step, and need not know the algorithm: training loops ask which
program the step needs, the cost model and `gx.bytes_per_step` what it sends, and `offload_outer`
which arrays it uses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable
from typing import Any, Literal, NamedTuple

import jax

from gossipjax.collectives import StepLike, group_rounds
from gossipjax.serialization import written_by_flax
from gossipjax.topology.schedule import Round, Schedule, require_int
from gossipjax.wire import Codec, Wire

DEFAULT_WIRE = Wire()
MAX_STEPS = 2**16  # of one cycle of all that is exchanged

Order = Literal["combine-while-adapting", "adapt-then-combine"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Says who takes part in an exchange that repeats, how much they send, how often and how late.

    Exchange m starts at the end of step `m every + phase`.

    Attributes:
      schedule: exchange m uses its round m; None if all nodes average at once.
      models: the trees like the parameters in a message, below 1 for a part of one; None if the
        algorithm does not say.
      wire: the codec of the values; None for their type.
      every: the steps from one exchange to the next.
      phase: the step at whose end the first exchange starts.
      late: the steps from the start to the step at whose end the result is used.
      pieces: the number of steps, the last ones up to the use, in which a part of the message
        travels.
      first: the first step in which something may travel.
      is_early: whether an exchange that is not late needs nothing that its step computes.
      to_all: whether each node gets every message by itself, if all nodes exchange at once.

    >>> Exchange(None, every=4, phase=3).find_piece(7)
    (1, 0)
    """

    schedule: Schedule | None
    models: float | None = 1
    wire: Codec | None = None
    every: int = 1
    phase: int = 0
    late: int = 0
    pieces: int = 1
    first: int = 0
    is_early: bool = False
    to_all: bool = False

    @property
    def gathers(self) -> bool:
        """Says whether each node gets the messages of all others, and not only their mean."""
        is_sparse = self.wire is not None and self.wire.is_sparse
        return self.schedule is None and (self.to_all or is_sparse)

    def find_piece(self, step: int) -> tuple[int, int] | None:
        """Returns the number of the exchange that travels in `step`, and of its piece; or None."""
        # Exchange m travels in the last `pieces` steps up to its use at m every + phase + late.
        since_first = step - self.phase - self.late + self.pieces - 1
        number, piece = divmod(since_first, self.every)
        return (number, piece) if step >= self.first and piece < self.pieces else None

    def round_of(self, number: int) -> Round | None:
        """Returns the round of exchange `number`; None if all nodes average at once."""
        return None if self.schedule is None else self.schedule.round_at(number)


class Used(NamedTuple):
    """The numbers of the fragments whose entry in a field of the state a step reads or writes."""

    read: frozenset[int]
    written: frozenset[int]


class Plan:
    """Answers what a step asks about exchanges: the base class of the plans in exchanging states.

    Attributes:
      wire: the axes and the form of messages.
      takes_gradients: whether the transform must get gradients, and not the updates of an
        optimizer.
      moves_by_zeros: whether an update of zeros moves the state too, or the model beyond the
        exchange. Every update must then carry a gradient.
    """

    wire: Wire
    takes_gradients: bool = False
    moves_by_zeros: bool = False

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on all roles repeat, and after how many steps they do; see `role`."""
        raise NotImplementedError

    def role(self, step: int) -> Hashable:
        """Returns everything static that a step depends on: steps of one role have one program."""
        raise NotImplementedError

    def exchanges(self) -> tuple[Exchange, ...]:
        """Returns all exchanges of a run. In one step, those of the same schedule send in turn."""
        raise NotImplementedError

    def when(self, step: StepLike) -> tuple[Any, Any, Schedule | None]:
        """Says how a step averages values other than the model, such as batch statistics.

        Returns whether it averages them, the number of the round, and the schedule of the round;
        None if all nodes average at once. If the step is traced, so are the first two.
        """
        raise NotImplementedError

    def mixes_in_place(self) -> bool:
        """Says whether a step reads the models of other nodes while these are replaced in place."""
        return False

    def is_one_program(self) -> bool:
        """Says whether simulated nodes can trace the step, and get one program without branches."""
        return False

    def lead(self, is_static: bool = True) -> int | None:
        """Says how many steps before its use an exchange can start, as a program of its own.

        0 is in the step that uses it, during its gradients. None if the exchange needs the update
        of that step, or depends on the number of the step, which is traced unless `is_static`.
        """
        return None

    def receives(self, step: int) -> bool:
        """Says whether the update of `step` can use an exchange that has started as `lead` says."""
        return self.lead() is not None

    def fields(self, step: int) -> dict[str, Used]:
        """Returns the state's fields that few steps use, and what `step` reads and writes of each.

        Such a field is a tuple with an entry for each fragment, which can be kept on the host.
        """
        return {}

    def in_words(self) -> str:
        """Says what is exchanged, in a line that people read."""
        raise NotImplementedError

    def settings(self) -> dict[str, str]:
        """Returns the settings, by name, that must be equal in a checkpoint and a resumed run."""
        return {} if self.wire.form is None else {".wire.codec": str(self.wire.form)}

    def _steps_of_all_roles(self) -> Iterable[int]:
        """Lists steps in which each role occurs, in order; none if they are too many to list."""
        count = sum(self.cycle)  # the steps before the cycle, and those of one cycle
        return range(count) if count <= MAX_STEPS else ()

    @functools.cached_property
    def _first_steps(self) -> dict[Hashable, int]:
        """The first step of each role."""
        first: dict[Hashable, int] = {}
        for step in self._steps_of_all_roles():
            first.setdefault(self.role(step), step)
        return first

    def canonical_step(self, step: int) -> int:
        """Returns the first step with the role of `step`, and so with its program."""
        step = require_int(step, "step", 0)
        return self._first_steps[self.role(step)] if self._first_steps else step

    @functools.cached_property
    def canonical_steps(self) -> tuple[int, ...] | range:
        """All values of `canonical_step`; the first `MAX_STEPS` steps if there are too many."""
        return tuple(self._first_steps.values()) or range(MAX_STEPS)

    def goes_on_alike(self, step: int, other: int) -> bool:
        """Says whether a run has the same roles from `step` on as from `other` on."""
        start, length = self.cycle
        return step == other or (min(step, other) >= start and (step - other) % length == 0)


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ExchangePlan(Plan):
    """The plan of a gossip transform, or of one that averages over all nodes."""

    schedule: Schedule | None = None  # None if all nodes exchange at once
    overlap: int = 0  # steps between sending a message and using it
    wire: Wire = DEFAULT_WIRE
    period: int = 1  # steps from one exchange to the next, if `schedule` is None
    order: Order = "adapt-then-combine"
    models: float | None = 1  # trees like the parameters that a step sends; None if not known
    takes_gradients: bool = False
    moves_by_zeros: bool = False
    # Whether updates may be the steps of an outer optimizer: what the state keeps besides the
    # model, if anything, then fits any update.
    mixes_any_update: bool = dataclasses.field(default=False, compare=False)
    # `models` of both messages of `gx.wire.low_rank`, which `init` counts.
    factors: tuple[float, float] | None = dataclasses.field(default=None, compare=False)

    @property
    def exchanges_early(self) -> bool:
        """Says whether the exchange of a step needs nothing that the step computes."""
        return self.overlap > 0 or self.order == "combine-while-adapting"

    def lead(self, is_static: bool = True) -> int | None:
        """Returns 0 if the exchange can run during the gradients of its step, else None."""
        return 0 if self.exchanges_early else None

    def mixes_in_place(self) -> bool:
        """Says whether nodes read each other's models; under overlap they read messages instead."""
        return self.schedule is not None and not self.overlap

    @functools.cached_property
    def schedule_by_step(self) -> Schedule | None:
        """The schedule of rounds by step: `schedule.every(overlap)`."""
        return None if self.schedule is None else self.schedule.every(max(1, self.overlap))

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on all roles repeat, and after how many steps they do; see `role`."""
        schedule = self.schedule_by_step
        if schedule is None:
            return 0, self.period
        *others, last = schedule.segments
        # Under overlap, a role also contains the rounds of the steps before.
        return (last.start + self.overlap if others else 0), len(last.cycle)

    def role(self, step: int) -> Hashable:
        """Returns the rounds at `step` and, under overlap, at the steps before it."""
        if self.schedule_by_step is None:
            return step % self.period
        return self.schedule_by_step.canonical_step(step, self.overlap)

    def _steps_of_all_roles(self) -> Iterable[int]:
        """Lists steps, in order, in which each role occurs; a schedule has a list of them."""
        if self.schedule_by_step is None:
            return range(self.period)
        return self.schedule_by_step.canonical_steps(self.overlap)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Returns the exchange that repeats; two for the two factors of `gx.wire.low_rank`.

        Gossip starts an exchange every `overlap` steps, and sends it in as many pieces. An
        all-reduce, which has no schedule, runs every `period` steps.
        """
        every = self.period if self.schedule is None else max(1, self.overlap)
        return tuple(
            Exchange(
                self.schedule,
                models=models,
                wire=self.wire.codec,
                every=every,
                late=self.overlap,
                pieces=max(1, self.overlap),
                is_early=self.exchanges_early,
            )
            for models in self.factors or (self.models,)
        )

    def in_words(self) -> str:
        """Says over whom models are averaged, how often and in which form, in one line."""
        if self == ExchangePlan():  # of a chain without gossip
            return "no gossip"
        who = "all nodes" if self.schedule is None else repr(self.schedule)
        how = [f"every {self.period} steps"] if self.period > 1 else []
        how += [f"overlap {self.overlap}"] if self.overlap else []
        how += [self.order] if self.schedule is not None and not self.overlap else []
        how += [f"wire {self.wire.form}"] if self.wire.form is not None else []
        return ", ".join((f"averages over {who}", *how))

    def when(self, step: StepLike) -> tuple[Any, Any, Schedule | None]:
        """Says how `step` averages values other than the model, by the triple of `Plan.when`.

        They are averaged when models are; under overlap, when models are sent.
        """
        is_now = True if self.schedule is not None else step % self.period == 0
        return is_now, step, self.schedule_by_step

    def is_one_program(self) -> bool:
        """Says whether all rounds exchange in the same way, and differ only in data."""
        if self.schedule is None or self.overlap > 1:
            return False
        return len(group_rounds(self.schedule)) == 1
