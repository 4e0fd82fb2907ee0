"""An update of which the averages of an outer optimizer are programs of their own (JAX on CPU)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import optax

from gossipjax.algorithms.frame.chain import OuterState, outer_state, step_plan
from gossipjax.algorithms.frame.state import apply_updates
from gossipjax.algorithms.outer import average_sent
from gossipjax.spmd import Nodes
from gossipjax.train_step._background import Background, has_collectives, spmd_by_step


class DelayedUpdate:
    """An update beside which the averages of `gx.outer` are taken, over several steps.

    The average of a fragment starts when it is sent and is awaited at the step that uses it, after
    that step's gradients were dispatched. The state has all that an average needs: one that is not
    on its way, because the run has just begun with this state, starts anew, with the same result.

    Args:
      gradients, tx: as those of `gx.TrainStep`. Where `tx` has other collectives, these could
        overtake an average on one process and not on another, so that all is one program.
      nodes: where the nodes run.
      fused: the update as one program, `(step, params, opt_state, *inputs)`: of the steps that use
        no average, and of all steps beside other collectives.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        fused: Callable[..., Any],
    ):
        def update(
            step: int,
            params: optax.Params,
            opt_state: optax.OptState,
            grads: optax.Updates,
            average: Any,
        ) -> tuple[optax.Params, optax.OptState]:
            updates, opt_state = tx.update(
                grads, opt_state, params, step=step, outer_average=average
            )
            return apply_updates(params, updates), opt_state

        def update_alone(
            step: int, params: optax.Params, opt_state: optax.OptState, grads: optax.Updates
        ) -> Any:
            return tx.update(grads, opt_state, params, step=step)

        self._fused = fused
        self._update_alone = spmd_by_step(update_alone, nodes, is_static=True)
        self.is_beside: bool | None = None  # unknown before the first step
        self._gradients = nodes.spmd(gradients)
        self._update = spmd_by_step(update, nodes, is_static=True)
        self._average = Background(spmd_by_step(_average, nodes, is_static=True))
        self._pending: dict[int, Future[Any]] = {}  # by the update that uses it
        self._next_update: int | None = None
        self.close = self._average.close

    def __call__(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """As `TrainStep`, with the number of the step, not a canonical one."""
        delay = _require_outer(opt_state).plan.delay
        plan = step_plan(opt_state)
        number = plan.canonical_step(step)
        if self.is_beside is None:  # at the first update no average is used
            first = plan.accumulation.last_step(0)
            arguments = params, opt_state, params
            self.is_beside = not has_collectives(self._update_alone, first, *arguments)
        if not self.is_beside or not plan.accumulation.makes_update(step):
            return self._fused(number, params, opt_state, *inputs)
        update = int(plan.accumulation.update_number(step))
        if update != self._next_update:
            self.wait()
            self._pending.clear()
            # What was sent by the updates before is used by these.
            self._start(range(max(update, delay), update + delay), opt_state)
        self._next_update = update + 1
        if update in self._pending:
            grads, aux = self._gradients(params, *inputs)
            average = self._pending.pop(update).result()
            params, opt_state = self._update(number, params, opt_state, grads, average)
        else:
            params, opt_state, aux = self._fused(number, params, opt_state, *inputs)
        self._start(range(update + delay, update + delay + 1), opt_state)
        return params, opt_state, aux

    def _start(self, updates: range, opt_state: optax.OptState) -> None:
        """Starts the averages that are used by these updates, of what the state holds."""
        state = _require_outer(opt_state)
        message = OuterState(
            None, None, None, state.anchor, None, state.sent, state.sent_counts, state.plan
        )
        plan = step_plan(opt_state).of_updates
        for update in updates:
            if state.plan.used_at(update) is not None:
                number = plan.canonical_step(update)
                self._pending[update] = self._average.start(number, message)

    def wait(self) -> None:
        """Returns when all averages that are on their way have arrived."""
        for future in self._pending.values():
            future.result()


def _average(step: int, state: OuterState) -> Any:
    return average_sent(state, step)


def _require_outer(opt_state: optax.OptState) -> OuterState:
    state = outer_state(opt_state)
    assert state is not None
    return state
