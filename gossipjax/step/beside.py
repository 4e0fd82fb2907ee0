"""An update whose exchange is a separate program that a thread runs (JAX on CPU)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.exchanges.chain import exchange
from gossipjax.exchanges.model import apply_updates
from gossipjax.exchanges.plan import Plan
from gossipjax.nodes import Nodes
from gossipjax.nodes.cutting import Part, Traced, cut, trace, variables
from gossipjax.nodes.equations import all_equations, is_collective_over
from gossipjax.nodes.program import Program
from gossipjax.step.gradients import Gradients


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
    its gradients, and then waits for the exchange. What follows the last collective of an exchange
    is a part of the update, as else messages would be copied once more. Steps that use none run
    `fused`, the update as one program, and so do the first steps of a run, whose exchanges should
    have started before it.
    """

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        extra_args: Callable[[Any], dict[str, Any]],
        plan: Plan,
        is_static: bool,
        fused: Program,
    ):
        def update(
            step: Any, params: Any, opt_state: Any, grads: Any, arrived: Any, aux: Any
        ) -> tuple[optax.Params, optax.OptState]:
            received = exchanges.finish(step, params, opt_state, arrived)
            updates, opt_state = tx.update(
                grads, opt_state, params, step=step, received=received, **extra_args(aux)
            )
            return apply_updates(params, updates), opt_state

        def update_alone(step: int, params: Any, opt_state: Any, grads: Any) -> Any:
            return tx.update(grads, opt_state, params, step=step)

        super().__init__()
        lead = plan.lead(is_static)
        assert lead is not None
        by_step: dict[str, Any] = {"static_argnums" if is_static else "shared_argnums": 0}
        self._plan = plan
        self._axis_name = nodes.axis_name
        self._lead = lead
        self._is_static = is_static
        self._fused = fused
        self._exchanges = exchanges = _Exchanges(nodes, is_static)
        self._gradients = nodes.spmd(gradients)
        # It donates nothing, because a thread may still read its arrays.
        self._update = nodes.spmd(update, **by_step)
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
            arguments = 0, params, opt_state, params
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
            arrived = pending.result()
            params, opt_state = self._update(number, params, opt_state, grads, arrived, aux)
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

    def _dispatch(self, number: Any, params: Any, opt_state: Any) -> Future[Any]:
        """Starts an exchange; when the future is done, what has arrived is on the devices."""
        return self._executor.submit(self._exchanges.prepare(number, params, opt_state))

    def wait(self) -> None:
        """Returns when all exchanges that are on their way have arrived."""
        for future in self._pending.values():
            future.result()


class _Half(NamedTuple):
    """An exchange of a node, cut behind its last collective."""

    first: Part
    last: Part
    arguments: list[Any]  # variables: the number if it is traced, the parameters, the state
    number: Any  # the first of these, if the number is traced
    structure: Any  # of the result
    program: Program  # of the first part: `(number, values) -> (results, writes)`

    def inputs(self, part: Part) -> list[Any]:
        """The variables that a part reads, except the number."""
        return [var for var in part.reads if var is not self.number]

    def run(self, part: Part, number: Any, values: list[Any]) -> tuple[list[Any], list[Any]]:
        """Runs a part, inside the program of a node, on the values of its inputs."""
        known = dict(zip(self.inputs(part), values, strict=True)) | {self.number: number}
        return part.run([known[var] for var in part.reads])


class _Exchanges:
    """The exchanges of all steps: a program of each up to its last collective, and the rest."""

    def __init__(self, nodes: Nodes, is_static: bool):
        self._nodes = nodes
        self._is_static = is_static
        self._halves: dict[Any, _Half] = {}

    def prepare(self, number: Any, params: Any, opt_state: Any) -> Callable[[], list[Any]]:
        """Compiles an exchange here, if needed; returns a call that runs it, on any thread.

        The call returns what `finish` takes, when that is on the devices.
        """
        key = self._key(number, (params, opt_state), 1)
        if key not in self._halves:
            self._halves[key] = self._cut(number, params, opt_state)
        half = self._halves[key]
        leaves = jax.tree.leaves((params, opt_state))
        known = dict(zip(half.arguments[-len(leaves) :], leaves, strict=True))
        run = half.program.prepare(number, [known[var] for var in half.inputs(half.first)])

        def exchange() -> list[Any]:
            half.first.note(known, *run())
            return [known[var] for var in half.inputs(half.last)]

        return exchange

    def finish(self, number: Any, params: Any, opt_state: Any, arrived: list[Any]) -> Any:
        """The result of an exchange, inside the program of a node that uses it."""
        half = self._halves[self._key(number, (params, opt_state), 0)]
        results, _ = half.run(half.last, number, arrived)
        return jax.tree.unflatten(half.structure, results)

    def _key(self, number: Any, arguments: Any, node_axes: int) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((jnp.shape(leaf)[node_axes:], jnp.result_type(leaf)) for leaf in leaves)
        return number if self._is_static else None, structure, shapes

    def _cut(self, number: Any, params: Any, opt_state: Any) -> _Half:
        found: list[Traced] = []

        def start(step: Any, params: Any, opt_state: Any) -> Any:
            return exchange(opt_state, step, params=params)

        def run(number: Any, params: Any, opt_state: Any) -> Any:
            numbered = partial(start, number) if self._is_static else start
            arguments = (params, opt_state) if self._is_static else (number, params, opt_state)
            found[:] = [trace(numbered, *arguments)]
            return start(number, params, opt_state)

        axis_name = self._nodes.axis_name
        by_step: dict[str, Any] = {"static_argnums" if self._is_static else "shared_argnums": 0}
        self._nodes.spmd(run, **by_step).has_collective(axis_name, number, params, opt_state)
        (traced,) = found
        used = {var for eqn in traced.eqns for var in variables(eqn.invars)}
        used.update(variables(traced.results))
        arrives = [
            var
            for eqn in traced.eqns
            if any(is_collective_over(axis_name, inner) for inner in all_equations([eqn]))
            for var in eqn.outvars
            if var in used
        ]
        first, last = cut(traced, [arrives, traced.results])
        number_of = None if self._is_static else traced.arguments[0]

        def exchange_first(number: Any, values: list[Any]) -> Any:
            return half.run(first, number, values)

        program = self._nodes.spmd(exchange_first, **by_step)
        half = _Half(first, last, traced.arguments, number_of, traced.structure, program)
        return half
