"""When an outer optimizer averages which fragment, and with whom."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import numpy as np

from gossipjax.collectives import MeanOver, StepLike
from gossipjax.exchanges.fragments import Fragment, LayerFragments, split_leaves
from gossipjax.exchanges.plan import DEFAULT_WIRE, Exchange, ExchangePlan, Plan, Used
from gossipjax.serialization import written_by_flax
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire

Average = Schedule | ExchangePlan | Literal["exact", "none"]
Shares = tuple[float, ...] | Literal["counted"] | None


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OuterPlan(Plan):
    """Says when an outer optimizer averages which fragment: arguments of `gx.outer`."""

    every: int
    average: Average = "exact"  # or the plan of the gossip that replaces it
    fragments: int | LayerFragments = 1
    delay: int = 0
    mix: float = 0.0  # 1 - strength
    pull: float = 1.0  # anchor_strength
    wire: Wire = DEFAULT_WIRE
    error_feedback: float | None = None
    mean_over: MeanOver = "nodes"
    shares: Shares = None  # how much each node counts, of mean 1; None if all count alike
    rule: Callable[..., Any] | None = None  # a robust rule in the place of the exact average
    # The plan of the gossip inside; None if the inner chain contains none.
    inner: ExchangePlan | None = dataclasses.field(default=None, compare=False)
    # By fragment, the models in both messages of `gx.wire.low_rank`, which `init` counts.
    factors: tuple[tuple[float, float], ...] | None = dataclasses.field(default=None, compare=False)

    takes_gradients = True

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of outer steps; None if all nodes average at once, or do not average."""
        if isinstance(self.average, ExchangePlan):
            return self.average.schedule
        return self.average if isinstance(self.average, Schedule) else None

    @property
    def fragment_count(self) -> int:
        """The number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else self.fragments.count

    def split(self, tree: Any) -> list[Fragment]:
        """Says for each fragment which leaves of `tree`, or pieces of them, are in it."""
        if isinstance(self.fragments, int):
            return split_leaves(tree, self.fragments)
        return self.fragments.split(tree)

    @property
    def replaces_all(self) -> bool:
        """Says whether an outer step replaces the whole models of all nodes by one model."""
        return self.average == "exact" and self.fragment_count == 1 and self.mix == 0

    def skips_exchange(self, step: StepLike) -> bool:
        """Says whether the inner gossip may leave out its exchange; False if `step` is traced.

        It may if the outer step after it replaces all models, weights and messages, because the
        exchange would not change the average of the models. With a codec nothing is left out,
        because the rounding depends on the models that nodes send.
        """
        is_known = isinstance(step, int | np.integer)
        can_skip = self.replaces_all and not self.delay and self.wire.form is None and is_known
        return can_skip and bool(self.is_used(0, step))  # the only fragment

    def is_sent(self, fragment: int, step: Any) -> Any:
        """Says whether nodes send a fragment at the end of `step`, which may be traced."""
        # Fragments are sent evenly over `every` steps, the last one in the last of these steps.
        offset = (fragment + 1) * self.every // self.fragment_count
        return (step + 1 - offset) % self.every == 0

    def is_used(self, fragment: int, step: Any) -> Any:
        """Says whether nodes use a fragment's average, `delay` steps after they have sent it."""
        return self.is_sent(fragment, step - self.delay) & (step >= self.delay)

    @functools.cached_property
    def _fragment_by_step(self) -> dict[int, int]:
        """From steps modulo `every` to the fragment that each sends; most steps send none."""
        count = self.fragment_count
        return {((f + 1) * self.every // count - 1) % self.every: f for f in range(count)}

    def sent_at(self, step: int) -> int | None:
        """Returns the fragment that nodes send at the end of `step`; None if they send none."""
        return self._fragment_by_step.get(step % self.every)

    def used_at(self, step: int) -> int | None:
        """Returns the fragment whose average is used at the end of `step`; None if none is."""
        return self.sent_at(step - self.delay) if step >= self.delay else None

    def round_number(self, step: StepLike) -> StepLike:
        """Returns the round of the schedule for the average that is used at the end of `step`."""
        return (step - self.delay) // self.every

    @property
    def cycle(self) -> tuple[int, int]:
        """The step from which on all roles repeat, and after how many steps they do; see `role`."""
        first_round, rounds = ExchangePlan(self.schedule).cycle
        start = self.delay + self.every * first_round
        inner_start, inner_length = (0, 1) if self.inner is None else self.inner.cycle
        return max(start, inner_start), math.lcm(self.every * rounds, inner_length)

    def role(self, step: int) -> Hashable:
        """Returns all that the program of `step` depends on.

        These are the fragments that the step sends and uses, the round by which they are averaged,
        and the role of the gossip inside.
        """
        used = self.used_at(step)
        round_ = None
        if used is not None and self.schedule is not None:
            round_ = self.schedule.index_at(int(self.round_number(step)))
        inner_role = None if self.inner is None else self.inner.role(step)
        return self.sent_at(step), used, round_, inner_role

    def exchanges(self) -> tuple[Exchange, ...]:
        """Returns the exchanges of the inner gossip, and those that average each fragment."""
        of_gossip = () if self.inner is None else self.inner.exchanges()
        if self.average == "none":
            return of_gossip
        # If `pull` is not 1, nodes send their anchors as well as their models.
        models = 1 if self.schedule is None or self.pull == 1 else 2
        codec = self.wire.codec
        if isinstance(self.average, ExchangePlan):
            models = self.average.models
            codec = self.average.wire.codec
        per_fragment = None if models is None else models / self.fragment_count
        averages = (
            Exchange(
                self.schedule,
                models=in_message,
                wire=codec,
                every=self.every,
                phase=phase,
                late=self.delay,
                first=self.delay,
                to_all=self.rule is not None,
            )
            for phase, fragment in self._fragment_by_step.items()
            # A fragment is one message, or with `gx.wire.low_rank` two, the factors.
            for in_message in (self.factors[fragment] if self.factors else (per_fragment,))
        )
        return (*of_gossip, *averages)

    def in_words(self) -> str:
        """Says who averages which part of the model, how often and how late, in one line."""
        who = {"exact": "all nodes", "none": "no node"}.get(str(self.average))
        details = f", in {self.fragment_count} fragments" if self.fragment_count > 1 else ""
        details += f", used {self.delay} steps later" if self.delay else ""
        return f"outer steps every {self.every} steps over {who or repr(self.schedule)}{details}"

    def when(self, step: StepLike) -> tuple[Any, Any, Schedule | None]:
        """Says how `step` averages values other than the model, by the triple of `Plan.when`.

        The inner gossip averages these values. Without inner gossip, they are averaged once in
        `every` steps, with the last fragment.
        """
        if self.inner is not None:
            return self.inner.when(step)
        is_now = self.average != "none" and self.is_used(self.fragment_count - 1, step)
        return is_now, self.round_number(step), self.schedule

    def mixes_in_place(self) -> bool:
        """Says whether the inner gossip mixes in place; an outer average reads no models."""
        return self.inner is not None and self.inner.mixes_in_place()

    def lead(self, is_static: bool = True) -> int | None:
        """Says how many steps before its use an exchange can start; None if only within its step.

        The exchange is the one of the gossip inside. Without gossip inside it is the average of a
        fragment, which can start in the step after the fragment was sent.
        """
        if self.inner is not None:
            return self.inner.lead(is_static)
        is_late = self.delay > 0 and self.average != "none"
        return self.delay - 1 if is_late and is_static else None

    def receives(self, step: int) -> bool:
        """Says whether `step` uses an exchange that can run by itself, as `lead` says."""
        if self.inner is not None:
            return not self.skips_exchange(step)
        return self.used_at(step) is not None

    def fields(self, step: int) -> dict[str, Used]:
        """Says which fragments of a field a step reads and writes; the others can stay on the host.

        An outer step that turns out to have nothing to use writes the old `sent` back, so `sent`
        is also read where it is only written.
        """
        sent, used = (
            frozenset(() if f is None else (f,)) for f in (self.sent_at(step), self.used_at(step))
        )
        return {
            "anchor": Used(sent | used, used),
            "outer": Used(used, used),
            "sent": Used(sent | used, sent),
            "error": Used(used, used),
            "basis": Used(used, used),
        }

    def settings(self) -> dict[str, str]:
        """Returns the arguments of `gx.outer`, which a checkpoint compares with the resumed run's.

        Of a schedule or a gossip it says only that there is one.
        """
        names = {Schedule: "a schedule", ExchangePlan: "a gossip"}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.compare}
        if self.rule is None:  # checkpoints from before there were rules have no such setting
            del values["rule"]
        return {f".plan.{name}": names.get(type(v), str(v)) for name, v in values.items()}
