"""Steps of which an exchange is a program of its own, run by a thread (JAX on CPU)."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.exchange import add_received, exchange
from gossipjax.algorithms.outer_average import OuterState, average_sent
from gossipjax.algorithms.state import GossipState, PushSum, apply_updates
from gossipjax.algorithms.steps import gossip_state, outer_state, replace_gossip_state, step_plan
from gossipjax.spmd import Nodes, donate_on_accelerators
from gossipjax.spmd.program import Program

Gradients = Callable[..., tuple[optax.Updates, Any]]

COLLECTIVE = re.compile(r"stablehlo\.(all_|reduce_scatter|collective_)")


def spmd_by_step(fn: Callable[..., Any], nodes: Nodes, is_static: bool, **argnums: Any) -> Program:
    """`nodes.spmd(fn)` of a function whose first argument is the step."""
    kind = "static_argnums" if is_static else "shared_argnums"
    return nodes.spmd(fn, **{kind: 0}, **argnums)


def has_collectives(program: Program, *args: Any) -> bool:
    """Whether a program exchanges anything between devices; arrays matter by their shapes only."""

    def describe(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return COLLECTIVE.search(program.lower(*jax.tree.map(describe, args)).as_text()) is not None


class Background:
    """A program that is compiled in the calling thread and run by another, call after call.

    A thread has none of the caller's JAX context (x64, matrix precision, mesh), which matters
    while a program is traced and compiled, and not while it runs.
    """

    def __init__(self, program: Program):
        self._program = program
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        # The thread ends with the step that owns it, also if nobody closes it.
        self.close = weakref.finalize(self, self._executor.shutdown, wait=False)

    def start(self, *args: Any) -> Future[Any]:
        """Dispatches the program; the result of the future is on the devices."""
        return self._executor.submit(self._program.prepare(*args))


def _exchange_early(step: Any, state: GossipState, params: Any) -> Any:
    return exchange(state, step, params=params)


class OverlappedUpdate:
    """An update whose exchange runs beside it, as a separate program (JAX on CPU)."""

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        is_static: bool,
    ):
        def update_with(
            step: Any,
            params: optax.Params,
            opt_state: optax.OptState,
            grads: optax.Updates,
            received: Any,
        ) -> tuple[optax.Params, optax.OptState]:
            updates, opt_state = tx.update(grads, opt_state, params, step=step, received=received)
            return apply_updates(params, updates), opt_state

        def update_without_messages(
            step: Any, params: optax.Params, opt_state: optax.OptState, grads: optax.Updates
        ) -> tuple[optax.Params, optax.OptState]:
            nothing = _nothing_in_flight(tx, params)
            opt_state = replace_gossip_state(opt_state, in_flight=nothing)
            return update_with(step, params, opt_state, grads, nothing)

        donated = donate_on_accelerators(1, 2)
        self._is_static = is_static
        self._exchange = Background(spmd_by_step(_exchange_early, nodes, is_static))
        self._gradients = nodes.spmd(gradients)
        self._update_with = spmd_by_step(update_with, nodes, is_static, donate_argnums=donated)
        self._update_without_messages = spmd_by_step(
            update_without_messages, nodes, is_static, donate_argnums=donated
        )
        self._add_received = nodes.spmd(add_received, donate_argnums=donate_on_accelerators(0, 1))
        self.close = self._exchange.close
        self._has_collectives: bool | None = None

    def __call__(
        self, step: Any, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        # Dispatched first: it needs nothing of this step, and the step needs it only at its end.
        state = _require_gossip(opt_state)
        outer = outer_state(opt_state)
        if self._is_static and outer is not None and outer.plan.skips_exchange(step):
            grads, aux = self._gradients(params, *inputs)
            return *self._update_with(step, params, opt_state, grads, None), aux
        # An outer step needs the messages that arrive, too.
        is_outer = outer is not None and outer.plan.is_outer_step(int(step))
        is_beside = state.overlap and not is_outer and self._updates_alone(step, params, opt_state)
        run = self._run_messages if is_beside else self._run_models
        return run(step, params, opt_state, state, inputs)

    def _updates_alone(self, step: Any, params: Any, opt_state: Any) -> bool:
        """Whether the update has no collectives of its own, which could overtake the exchange."""
        if self._has_collectives is None:
            opt_state = replace_gossip_state(opt_state, in_flight=None)
            update = self._update_without_messages
            self._has_collectives = has_collectives(update, step, params, opt_state, params)
        return not self._has_collectives

    def _run_models(
        self, step: Any, params: Any, opt_state: Any, state: GossipState, inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Combines while adapting: the exchange mixes the models, and the update moves them."""
        models = state._replace(extra=None)
        pending = self._exchange.start(step, models, params)
        grads, aux = self._gradients(params, *inputs)
        params, opt_state = self._update_with(step, params, opt_state, grads, pending.result())
        return params, opt_state, aux

    def _run_messages(
        self, step: Any, params: Any, opt_state: Any, state: GossipState, inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Overlap: the update runs beside the exchange too, and only the addition comes after."""
        messages = GossipState(state.count, in_flight=state.in_flight, plan=state.plan)
        pending = self._exchange.start(step, messages, None)
        grads, aux = self._gradients(params, *inputs)
        opt_state = replace_gossip_state(opt_state, in_flight=None)
        params, opt_state = self._update_without_messages(step, params, opt_state, grads)
        received = pending.result()
        if step % state.overlap:
            return params, replace_gossip_state(opt_state, in_flight=received), aux
        new_state = _require_gossip(opt_state)._replace(in_flight=None, count=None)
        params, new_state = self._add_received(params, new_state, received)
        opt_state = replace_gossip_state(
            opt_state, weight=new_state.weight, residual=new_state.residual
        )
        return params, opt_state, aux


def _require_gossip(opt_state: optax.OptState) -> GossipState:
    state = gossip_state(opt_state)
    assert state is not None
    return state


def _nothing_in_flight(tx: optax.GradientTransformation, params: optax.Params) -> PushSum:
    """Messages of zeros, in the shapes of those of `tx`."""
    state = _require_gossip(jax.eval_shape(tx.init, params))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.in_flight)


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
        self._pending: dict[int, Future[Any]] = {}  # by the step that uses it
        self._next_step: int | None = None
        self.close = self._average.close

    def __call__(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """As `TrainStep`, with the number of the step, not a canonical one."""
        delay = _require_outer(opt_state).plan.delay
        plan = step_plan(opt_state)
        number = plan.canonical_step(step)
        if self.is_beside is None:  # at the first update no average is used
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
        """Starts the averages that are used at these steps, of what the state holds."""
        state = _require_outer(opt_state)
        message = OuterState(
            None, None, None, state.anchor, None, state.sent, state.sent_counts, state.plan
        )
        plan = step_plan(opt_state)
        for step in steps:
            if state.plan.used_at(step) is not None:
                number = plan.canonical_step(step)
                self._pending[step] = self._average.start(number, message)

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
