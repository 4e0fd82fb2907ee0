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
    """Base class of updates that have a thread, which runs their exchange as its own program."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        # The thread ends with the step that owns it, also if nobody closes it.
        self.close = weakref.finalize(self, self._executor.shutdown, wait=False)
        # Whether the exchange really runs on the thread; None before a step has told.
        self.is_on_thread: bool | None = None

    def wait(self) -> None:
        """Returns when all exchanges on their way have arrived; by default there are none."""


class UpdateDuringExchange(Exchanger):
    """An update whose gradients are computed while a thread exchanges models.

    An exchange starts `plan.lead()` steps before the step that uses it. That step first dispatches
    its gradients, and then waits for the exchange. A step without an exchange runs `fused`, the
    whole step as one program; so do the first steps, whose exchanges would start before the run.
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
        def exchange_alone(step: Any, params: optax.Params, opt_state: optax.OptState) -> Any:
            return exchange(opt_state, step, params=params)

        def update_alone(step: int, params: Any, opt_state: Any) -> Any:
            # It is only traced, so the parameters can stand for the gradients.
            return update(step, params, opt_state, grads=params, aux=None)

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
        self._exchange = nodes.spmd(exchange_alone, **by_step)
        self._gradients = nodes.spmd(gradients)
        self._update = nodes.spmd(update, donate_argnums=donated, **by_step)
        self._update_alone = nodes.spmd(update_alone, **by_step)
        # If an exchange takes several steps, the first step decides whether it runs on the thread.
        self.is_on_thread = None if lead else True
        # Exchanges on their way, by the step that uses each.
        self._pending: dict[int, Future[Any]] = {}
        self._next_step: int | None = None

    def __call__(
        self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """Takes step `step`; the programs get `number`, its canonical step or an array, instead."""
        if self.is_on_thread is None:
            # Other collectives of the chain could overtake, on one process and not on another, an
            # exchange that takes several steps. The update of step 0 shows whether there are any,
            # because it uses no exchange itself.
            arguments = 0, params, opt_state
            self.is_on_thread = not self._update_alone.has_collective(self._axis_name, *arguments)
        if not self.is_on_thread:
            return self._fused(number, params, opt_state, *inputs)
        self._start_exchanges(step, number, params, opt_state)
        pending = self._pending.pop(step, None)
        if pending is None:
            params, opt_state, aux = self._fused(number, params, opt_state, *inputs)
        else:
            grads, aux = self._gradients(params, *inputs)
            # Wait here: collectives of the update must not overtake the exchange on some processes.
            received = pending.result()
            params, opt_state = self._update(number, params, opt_state, grads, aux, received)
        if self._lead:
            # The next call would start this exchange. Started here, it travels sooner.
            self._start_exchange(step + 1 + self._lead, params, opt_state)
        return params, opt_state, aux

    def _start_exchanges(self, step: int, number: Any, params: Any, opt_state: Any) -> None:
        """Starts the exchange that can travel during the gradients of `step`.

        If `step` does not follow the last step, another loop begins, which uses no exchange of the
        loop before.
        """
        if step != self._next_step:
            self.wait()
            self._pending.clear()
        self._next_step = step + 1
        if not self._is_static:  # then each step uses an exchange, whose round is data
            self._pending[step] = self._submit(number, params, opt_state)
        else:
            self._start_exchange(step + self._lead, params, opt_state)

    def _start_exchange(self, using_step: int, params: Any, opt_state: Any) -> None:
        """Starts the exchange whose result `using_step` uses, if there is one to start.

        Nothing happens if that step uses no exchange, or if its exchange is on the way already.
        """
        if using_step not in self._pending and self._plan.receives(using_step):
            canonical = self._plan.canonical_step(using_step)
            self._pending[using_step] = self._submit(canonical, params, opt_state)

    def _submit(self, *args: Any) -> Future[Any]:
        """Has the thread run the exchange; the future is done when its result is on the devices."""
        # `prepare` compiles on the calling thread, because JAX's context (x64, matrix precision,
        # mesh) matters then. The other thread, which has no such context, only runs the program.
        return self._executor.submit(self._exchange.prepare(*args))

    def wait(self) -> None:
        """Returns when all exchanges that are on their way have arrived."""
        for future in self._pending.values():
            future.result()
