"""An update whose exchange is a separate program that a thread runs (JAX on CPU)."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import optax

from gossipjax.exchanges.chain import exchange
from gossipjax.exchanges.plan import Plan
from gossipjax.nodes import Nodes, donate_on_accelerators
from gossipjax.nodes.program import Program
from gossipjax.step.gradients import Gradients, UpdateOfNode


class Exchanger:
    """The thread on which an update exchanges, and whether it does."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        # The thread ends with the step that owns it, also if nobody closes it.
        self.close = weakref.finalize(self, self._executor.shutdown, wait=False)
        self.is_beside: bool | None = None  # unknown before the first step

    def wait(self) -> None:
        """Returns when all exchanges that are on their way have arrived."""


class UpdateBeside(Exchanger):
    """An update that runs while a thread exchanges.

    An exchange starts `plan.lead()` steps before the step that uses it. That step first dispatches
    its gradients, and then waits for the exchange. Steps that use none run `fused`, the update as
    one program, and so do the first steps of a run, whose exchanges should have started before it.
    """

    def __init__(
        self,
        gradients: Gradients,
        update: UpdateOfNode,
        nodes: Nodes,
        plan: Plan,
        is_static: bool,
        fused: Program,
    ):
        def start(step: Any, params: optax.Params, opt_state: optax.OptState) -> Any:
            return exchange(opt_state, step, params=params)

        def update_alone(step: int, params: Any, opt_state: Any) -> Any:
            return update(step, params, opt_state, params, None)

        super().__init__()
        lead = plan.lead(is_static)
        assert lead is not None
        by_step: dict[str, Any] = {"static_argnums" if is_static else "shared_argnums": 0}
        # Arrays that a thread still reads must not be donated.
        donated = () if lead else donate_on_accelerators(1, 2)
        self._plan = plan
        self._axis_name = nodes.axis_name
        self._lead = lead
        self._is_static = is_static
        self._fused = fused
        # The calling thread compiles, because JAX's context (x64, matrix precision, mesh) matters
        # then. The other thread, which has no such context, only runs the program.
        self._start = nodes.spmd(start, **by_step)
        self._gradients = nodes.spmd(gradients)
        self._update = nodes.spmd(update, donate_argnums=donated, **by_step)
        self._update_alone = nodes.spmd(update_alone, **by_step)
        # Other collectives could overtake, on one process and not on another, an exchange that
        # takes several steps.
        self.is_beside = None if lead else True
        self._pending: dict[int, Future[Any]] = {}  # by the step that uses it
        self._next_step: int | None = None

    def __call__(
        self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """One step; `number` is its number as the programs take it."""
        if self.is_beside is None:  # in the first update nothing is received
            arguments = 0, params, opt_state
            self.is_beside = not self._update_alone.has_collective(self._axis_name, *arguments)
        if not self.is_beside:
            return self._fused(number, params, opt_state, *inputs)
        self._start_exchanges(step, number, params, opt_state)
        pending = self._pending.pop(step, None)
        if pending is None:
            params, opt_state, aux = self._fused(number, params, opt_state, *inputs)
        else:
            grads, aux = self._gradients(params, *inputs)
            # The update may have collectives, which must not overtake the exchange on some
            # processes.
            received = pending.result()
            params, opt_state = self._update(number, params, opt_state, grads, aux, received)
        if self._lead:  # what was sent in this step can travel before the next call
            self._start_exchange(step + 1 + self._lead, params, opt_state)
        return params, opt_state, aux

    def _start_exchanges(self, step: int, number: Any, params: Any, opt_state: Any) -> None:
        """Starts what can start now, before the gradients of `step`."""
        if step != self._next_step:
            self.wait()
            self._pending.clear()
        self._next_step = step + 1
        if not self._is_static:
            self._pending[step] = self._dispatch(number, params, opt_state)
        else:
            self._start_exchange(step + self._lead, params, opt_state)

    def _start_exchange(self, user: int, params: Any, opt_state: Any) -> None:
        """Starts the exchange that step `user` uses, unless it has none or is on its way."""
        if user not in self._pending and self._plan.receives(user):
            canonical = self._plan.canonical_step(user)
            self._pending[user] = self._dispatch(canonical, params, opt_state)

    def _dispatch(self, *args: Any) -> Future[Any]:
        """Starts an exchange; when the future is done, its result is on the devices."""
        return self._executor.submit(self._start.prepare(*args))

    def wait(self) -> None:
        """Returns when all exchanges that are on their way have arrived."""
        for future in self._pending.values():
            future.result()
