"""Steps whose exchange is a separate program that a thread runs (JAX on CPU)."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import optax

from gossipjax.algorithms.outer.average import average_sent
from gossipjax.exchanges.chain import outer_state, step_plan
from gossipjax.exchanges.early import exchange
from gossipjax.exchanges.state import apply_updates
from gossipjax.nodes import Nodes, donate_on_accelerators
from gossipjax.nodes.program import Program

Gradients = Callable[..., tuple[optax.Updates, Any]]

COLLECTIVE = re.compile(r"stablehlo\.(all_|reduce_scatter|collective_)")


def has_collectives(program: Program, *args: Any) -> bool:
    """Whether a program exchanges anything between devices; only shapes of arrays matter."""

    def describe(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return COLLECTIVE.search(program.lower(*jax.tree.map(describe, args)).as_text()) is not None


class Background:
    """A program that the calling thread compiles and another thread runs, call after call.

    JAX's context of the caller (x64, matrix precision, mesh) matters while a program is traced and
    compiled. A thread does not have this context, and needs none to run the program.
    """

    def __init__(self, program: Program):
        self._program = program
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        # The thread ends with the step that owns it, also if nobody closes it.
        self.close = weakref.finalize(self, self._executor.shutdown, wait=False)

    def start(self, *args: Any) -> Future[Any]:
        """Dispatches the program; when the future is done, its result is on the devices."""
        return self._executor.submit(self._program.prepare(*args))


class OverlappedUpdate:
    """An update whose exchange is a separate program and runs while gradients are computed."""

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        extra_args: Callable[[Any], dict[str, Any]],
        is_static: bool,
    ):
        def exchange_early(step: Any, params: optax.Params, opt_state: optax.OptState) -> Any:
            return exchange(opt_state, step, params=params)

        def update(
            step: Any, params: Any, opt_state: Any, grads: Any, received: Any, aux: Any
        ) -> tuple[optax.Params, optax.OptState]:
            told = extra_args(aux)
            updates, opt_state = tx.update(
                grads, opt_state, params, step=step, received=received, **told
            )
            return apply_updates(params, updates), opt_state

        by_step: dict[str, Any] = {"static_argnums" if is_static else "shared_argnums": 0}
        donated = donate_on_accelerators(1, 2)
        self._is_static = is_static
        self._exchange = Background(nodes.spmd(exchange_early, **by_step))
        self._gradients = nodes.spmd(gradients)
        self._update = nodes.spmd(update, donate_argnums=donated, **by_step)
        self.close = self._exchange.close

    def __call__(
        self, step: Any, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        outer = step_plan(opt_state).outer
        if self._is_static and outer is not None and outer.skips_exchange(step):
            grads, aux = self._gradients(params, *inputs)
            return *self._update(step, params, opt_state, grads, None, aux), aux
        # Dispatched first: it needs nothing of this step, and the step needs it only at its end.
        pending = self._exchange.start(step, params, opt_state)
        grads, aux = self._gradients(params, *inputs)
        # The update may have collectives, which must not overtake the exchange on some processes.
        received = pending.result()
        return *self._update(step, params, opt_state, grads, received, aux), aux


class DelayedUpdate:
    """An update that runs while a thread takes the averages of `gx.outer`, over several steps.

    The average of a fragment starts when the fragment is sent. The step that uses the average first
    dispatches its gradients and then waits for the average. If a run has just begun and the average
    has not been started, it is computed anew from the state, with the same result. `fused` is the
    update as one program, for the steps that use no average.
    """

    def __init__(
        self,
        gradients: Callable[..., Any],
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        fused: Callable[..., Any],
    ):
        def update(
            step: int, params: Any, opt_state: Any, grads: Any, average: Any
        ) -> tuple[optax.Params, optax.OptState]:
            updates, opt_state = tx.update(
                grads, opt_state, params, step=step, outer_average=average
            )
            return apply_updates(params, updates), opt_state

        def update_alone(step: int, params: Any, opt_state: Any, grads: Any) -> Any:
            return tx.update(grads, opt_state, params, step=step)

        def average(step: int, opt_state: optax.OptState) -> Any:
            state = outer_state(opt_state)
            assert state is not None
            return average_sent(state, step)

        self._fused = fused
        self._update_alone = nodes.spmd(update_alone, static_argnums=0)
        self.is_beside: bool | None = None  # unknown before the first step
        self._gradients = nodes.spmd(gradients)
        self._update = nodes.spmd(update, static_argnums=0)
        self._average = Background(nodes.spmd(average, static_argnums=0))
        self._pending: dict[int, Future[Any]] = {}  # by the step that uses it
        self._next_step: int | None = None
        self.close = self._average.close

    def __call__(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """Like `TrainStep`, with the true number of the step instead of a canonical one."""
        plan = step_plan(opt_state)
        assert plan.outer is not None
        delay = plan.outer.delay
        number = plan.canonical_step(step)
        if self.is_beside is None:  # at the first update no average is used
            # Others could overtake an average on one process and not on another.
            arguments = params, opt_state, params
            self.is_beside = not has_collectives(self._update_alone, 0, *arguments)
        if not self.is_beside:
            return self._fused(number, params, opt_state, *inputs)
        if step != self._next_step:
            self.wait()
            self._pending.clear()
            # What was sent at the steps before is used at these.
            self._start(range(max(step, delay), step + delay), opt_state)
        self._next_step = step + 1
        if step in self._pending:
            grads, aux = self._gradients(params, *inputs)
            average = self._pending.pop(step).result()
            params, opt_state = self._update(number, params, opt_state, grads, average)
        else:
            params, opt_state, aux = self._fused(number, params, opt_state, *inputs)
        self._start(range(step + delay, step + delay + 1), opt_state)
        return params, opt_state, aux

    def _start(self, steps: range, opt_state: optax.OptState) -> None:
        """Starts the averages that these steps use, from fragments in the state."""
        plan = step_plan(opt_state)
        assert plan.outer is not None
        for step in steps:
            if plan.outer.used_at(step) is not None:
                number = plan.canonical_step(step)
                self._pending[step] = self._average.start(number, opt_state)

    def wait(self) -> None:
        """Returns when all averages that are on their way have arrived."""
        for future in self._pending.values():
            future.result()
