"""The step of a training loop: one compiled program per round, overlapped with the exchange."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from gossipjax._program import Argnums, Program
from gossipjax.algorithms.osgp import add_received, exchange
from gossipjax.algorithms.state import (
    GossipState,
    InFlight,
    apply_updates,
    exchange_plan,
    gossip_state,
    replace_gossip_state,
)
from gossipjax.spmd import Nodes, as_nodes, donate_on_accelerators

MAX_PROGRAMS = 32  # of one train step; beyond it, the step is traced

Gradients = Callable[..., tuple[optax.Updates, Any]]
Update = Callable[..., tuple[optax.Params, optax.OptState, Any]]


class TrainStep:
    """One update of all nodes: gradients, optimizer, exchange. Call it with the step number.

    Schedule, overlap and wire are in the optimizer state. The step passes `tx.update` the static
    canonical step, so that one program is compiled per distinct round and the exchange can be
    scheduled beside the computation. Beyond 32 programs it passes a traced step instead.

    JAX on CPU does not overlap the two inside a program. There, with several processes, a step of
    `osgp` runs four programs: the exchange (on a separate thread), the gradients, the local update
    without messages, and the addition of the received ones. The results are the same up to
    rounding.

    Args:
      gradients: `gradients(params, *inputs) -> (grads, aux)` of one node. `jax.grad(loss,
        has_aux=True)` is one. With `osgp` it must not contain collectives: on different processes
        they could interleave with the exchange in different orders.
      tx: the optax chain.
      mesh, nodes: where the nodes run, as in `spmd`; `nodes` may be a `Nodes`.
      local_argnums: arguments of `gradients` that are split over the devices of a node, as in
        `spmd`: 1 is the first of `inputs`.
      overlap_in_thread: whether the exchange of `osgp` is a separate program, dispatched by a
        thread; None chooses by the backend.

    Raises:
      ValueError: if `mesh` and `nodes` contradict each other, or `overlap_in_thread` is True where
        a node has several devices.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> nodes = gx.Nodes(4)
    >>> tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(4)))
    >>> def gradients(z, target):
    ...     return z - target, jnp.square(z - target)
    >>> train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    >>> z, opt_state = nodes.init(tx, jnp.zeros(()))
    >>> target = jnp.array([0.0, 1.0, 2.0, 5.0])
    >>> for step in range(300):
    ...     z, opt_state, losses = train_step(step, z, opt_state, target)
    >>> bool(abs(z.mean() - 2.0) < 1e-2)
    True
    """

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformation,
        mesh: Mesh | None = None,
        nodes: int | Nodes | None = None,
        *,
        axis_name: str = "nodes",
        local_argnums: Argnums = (),
        overlap_in_thread: bool | None = None,
    ):
        self.nodes = as_nodes(mesh, nodes, axis_name)
        if overlap_in_thread and self.nodes.local_devices is not None:
            raise ValueError(
                "overlap_in_thread must be None or False where a node has several devices, whose "
                "gradients are averaged in one program with the update, got True."
            )
        self._gradients = gradients
        self._tx = optax.with_extra_args_support(tx)
        self._local_argnums = local_argnums
        self._overlap_in_thread = overlap_in_thread
        self._updates: dict[tuple[bool, bool], Update] = {}  # by (is static, overlaps)

    def __call__(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the new parameters and state, and `aux`, node-stacked.

        Accelerators donate `params` and `opt_state`.
        """
        is_static = self.canonical_steps(opt_state) is not None
        kind = is_static, self.overlaps(opt_state)
        if kind not in self._updates:
            self._updates[kind] = self._make_update(*kind)
        canonical_step = exchange_plan(opt_state).canonical_step(step)
        number = canonical_step if is_static else np.int32(step)
        return self._updates[kind](number, params, opt_state, *inputs)

    def canonical_steps(self, opt_state: optax.OptState) -> list[int] | None:
        """The static steps, one per compiled program; None if the step is traced."""
        steps = exchange_plan(opt_state).canonical_steps
        return list(steps) if len(steps) <= MAX_PROGRAMS else None

    def overlaps(self, opt_state: optax.OptState) -> bool:
        """Whether the exchange runs as a separate program, on a thread."""
        state = gossip_state(opt_state)
        if state is None or state.in_flight is None:
            return False
        if self._overlap_in_thread is not None:
            return self._overlap_in_thread
        on_cpu = jax.default_backend() == "cpu" and jax.process_count() > 1
        return on_cpu and self.nodes.local_devices is None

    def _make_update(self, is_static: bool, overlaps: bool) -> Update:
        if overlaps:
            return _OverlappedUpdate(self._gradients, self._tx, self.nodes, is_static)
        return _make_fused_update(
            self._gradients, self._tx, self.nodes, is_static, self._local_argnums
        )


def _spmd_by_step(fn: Callable[..., Any], nodes: Nodes, is_static: bool, **argnums: Any) -> Program:
    """`nodes.spmd(fn)` of a function whose first argument is the step."""
    kind = "static_argnums" if is_static else "shared_argnums"
    return nodes.spmd(fn, **{kind: 0}, **argnums)


def _make_fused_update(
    gradients: Gradients,
    tx: optax.GradientTransformationExtraArgs,
    nodes: Nodes,
    is_static: bool,
    local_argnums: Argnums,
) -> Program:
    """`(step, params, opt_state, *inputs) -> (params, opt_state, aux)` as one program."""

    def update(
        step: Any, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        grads, aux = gradients(params, *inputs)
        updates, opt_state = tx.update(grads, opt_state, params, step=step)
        return apply_updates(params, updates), opt_state, aux

    numbers = [local_argnums] if isinstance(local_argnums, int) else local_argnums
    return _spmd_by_step(
        update,
        nodes,
        is_static,
        donate_argnums=donate_on_accelerators(1, 2),
        # The arguments of `gradients` stand two places later here, but for the parameters.
        local_argnums=[number + 2 if number else 1 for number in numbers],
    )


class _OverlappedUpdate:
    """The same as four programs, of which the exchange is dispatched by a thread (JAX on CPU)."""

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        is_static: bool,
    ):
        def update_without_messages(
            step: Any, params: optax.Params, opt_state: optax.OptState, grads: optax.Updates
        ) -> tuple[optax.Params, optax.OptState]:
            nothing = _nothing_in_flight(tx, params)
            opt_state = replace_gossip_state(opt_state, in_flight=nothing)
            updates, opt_state = tx.update(grads, opt_state, params, step=step, received=nothing)
            return apply_updates(params, updates), opt_state

        donated = donate_on_accelerators(1, 2)
        self._exchange = _spmd_by_step(_exchange_messages, nodes, is_static)
        self._gradients = nodes.spmd(gradients)
        self._update = _spmd_by_step(
            update_without_messages, nodes, is_static, donate_argnums=donated
        )
        self._add_received = nodes.spmd(add_received, donate_argnums=donate_on_accelerators(0, 1))
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def __call__(
        self, step: Any, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        messages = _messages(opt_state)
        # Dispatched first: it needs nothing of this step, and the step needs it only at its end.
        pending = self._executor.submit(self._exchange_and_wait, step, messages)
        grads, aux = self._gradients(params, *inputs)
        opt_state = replace_gossip_state(opt_state, in_flight=None)
        params, opt_state = self._update(step, params, opt_state, grads)
        received = pending.result()
        if step % messages.overlap:
            return params, replace_gossip_state(opt_state, in_flight=received), aux
        state = _require_gossip(opt_state)._replace(in_flight=None, count=None)
        params, state = self._add_received(params, state, received)
        opt_state = replace_gossip_state(opt_state, weight=state.weight, numerator=state.numerator)
        return params, opt_state, aux

    def _exchange_and_wait(self, step: Any, messages: GossipState) -> InFlight:
        return jax.block_until_ready(self._exchange(step, messages))


def _exchange_messages(step: Any, messages: GossipState) -> InFlight:
    return exchange(messages, step)


def _messages(opt_state: optax.OptState) -> GossipState:
    """A gossip state that holds nothing but the messages in flight."""
    state = _require_gossip(opt_state)
    return GossipState(count=None, in_flight=state.in_flight, plan=state.plan)


def _require_gossip(opt_state: optax.OptState) -> GossipState:
    state = gossip_state(opt_state)
    assert state is not None
    return state


def _nothing_in_flight(tx: optax.GradientTransformation, params: optax.Params) -> InFlight:
    """Messages of zeros, in the shapes of those of `tx`."""
    state = _require_gossip(jax.eval_shape(tx.init, params))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.in_flight)
