"""The step of a training loop: one compiled program per round, and the exchange beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from gossipjax.algorithms.osgp import exchange
from gossipjax.schedule import Schedule
from gossipjax.spmd import spmd
from gossipjax.state import InFlight, find_state

MOST_PROGRAMS = 32


class TrainStep:
    """One update of all nodes: gradients, optimizer, exchange. Call it with the number of the step.

    It passes `tx.update` the static canonical step, so that one program is compiled per distinct
    round and the exchange can be scheduled beside the computation; where that would be more than
    32 programs, a traced step.

    JAX on CPU does not overlap the two inside a program. There, over several processes, the update
    of `osgp` is three programs: the exchange of what was sent before, dispatched from a thread of
    its own, beside the gradients, and then the update, which holds no collective. The results are
    the same up to rounding.

    Args:
      gradients: `gradients(params, *inputs) -> (grads, aux)` of one node. With `osgp` it holds no
        collective: the exchange may run beside it, and all processes must keep one order of them.
      tx: the optax chain.
      schedule: the rounds by step; for `osgp`, `schedule.every(overlap)`.
      lookback: rounds before it that a step depends on, too: the overlap of `osgp`.
      mesh, nodes: where the nodes run, as in `spmd`.
      threads: whether the exchange is a program of its own; None chooses by the backend.

    Attributes:
      steps: the static steps, one per program; None where the step is traced.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(4)
    >>> tx = optax.chain(optax.sgd(0.1), gx.osgp(schedule))
    >>> def gradients(z, target):
    ...     return z - target, jnp.square(z - target)
    >>> step = gx.TrainStep(gradients, tx, schedule, lookback=1, nodes=4)
    >>> z, target = jnp.zeros(4), jnp.array([0.0, 1.0, 2.0, 5.0])
    >>> state = gx.spmd(tx.init, nodes=4)(z)
    >>> for k in range(300):
    ...     z, state, losses = step(k, z, state, target)
    >>> bool(abs(z.mean() - 2.0) < 1e-2)
    True
    """

    def __init__(
        self,
        gradients: Callable[..., tuple[Any, Any]],
        tx: optax.GradientTransformationExtraArgs,
        schedule: Schedule,
        lookback: int = 0,
        *,
        mesh: Mesh | None = None,
        nodes: int | None = None,
        axis_name: str = "nodes",
        threads: bool | None = None,
    ):
        canonical = schedule.canonical_steps(lookback)
        self.steps: Sequence[int] | None = canonical if len(canonical) <= MOST_PROGRAMS else None
        self._schedule, self._lookback, self._threads = schedule, lookback, threads
        where: dict[str, Any] = {"mesh": mesh, "nodes": nodes, "axis_name": axis_name}
        how = "shared_argnums" if self.steps is None else "static_argnums"

        def whole(number: Any, params: Any, state: Any, *inputs: Any) -> tuple[Any, Any, Any]:
            grads, aux = gradients(params, *inputs)
            updates, state = tx.update(grads, state, params, step=number)
            return optax.apply_updates(params, updates), state, aux

        def first(number: Any, state: Any) -> InFlight:
            return exchange(state, number, axis_name)

        def second(
            number: Any, params: Any, state: Any, grads: Any, received: InFlight
        ) -> tuple[Any, Any]:
            updates, state = tx.update(grads, state, params, step=number, received=received)
            return optax.apply_updates(params, updates), state

        keywords = {**where, how: 0}
        self._whole = spmd(whole, **keywords, donate_argnums=(1, 2))
        self._exchange = spmd(first, **keywords)
        self._gradients = spmd(gradients, **where)
        self._update = spmd(second, **keywords, donate_argnums=(1, 2, 4))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def __call__(
        self, step: int, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[Any, Any, Any]:
        """The new parameters and state, and `aux`, node-stacked; the old ones are donated."""
        number: Any = jax.numpy.int32(step)
        if self.steps is not None:
            number = self._schedule.canonical_step(step, self._lookback)
        if not self.overlaps(opt_state):
            return self._whole(number, params, opt_state, *inputs)
        # Sent off first: it needs nothing of this step, and the gradients nothing of it.
        received = self._thread.submit(
            lambda: jax.block_until_ready(self._exchange(number, opt_state))
        )
        grads, aux = jax.block_until_ready(self._gradients(params, *inputs))
        params, opt_state = self._update(number, params, opt_state, grads, received.result())
        return params, opt_state, aux

    def overlaps(self, opt_state: Any) -> bool:
        """Whether the exchange runs in a thread of its own."""
        state = find_state(opt_state)
        if state is None or not isinstance(state.in_flight, InFlight):
            return False
        if self._threads is not None:
            return self._threads
        return jax.default_backend() == "cpu" and jax.process_count() > 1
