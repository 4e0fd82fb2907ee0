"""The step of a training loop: one compiled program per round, and the exchange beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from gossipjax.algorithms.osgp import exchange, receive
from gossipjax.schedule import Schedule
from gossipjax.spmd import donated_argnums, spmd
from gossipjax.state import GossipState, InFlight, find_state

MOST_PROGRAMS = 32


class TrainStep:
    """One update of all nodes: gradients, optimizer, exchange. Call it with the number of the step.

    It passes `tx.update` the static canonical step, so that one program is compiled per distinct
    round and the exchange can be scheduled beside the computation; where that would be more than
    32 programs, a traced step.

    JAX on CPU does not overlap the two inside a program. There, over several processes, a step of
    `osgp` is four programs: the exchange of what was sent before, dispatched from a thread of its
    own; beside it the gradients, and the update as if nothing had arrived; and then the sum with
    what has. The results are the same up to rounding.

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

        def messages(number: Any, flying: InFlight) -> InFlight:
            return exchange(GossipState((), in_flight=flying), number, axis_name)

        def without(number: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            start = find_state(jax.eval_shape(tx.init, params))
            assert start is not None
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start.in_flight)
            state = _with_gossip(state, in_flight=nothing)
            updates, state = tx.update(grads, state, params, step=number, received=nothing)
            return optax.apply_updates(params, updates), state

        keywords = {**where, how: 0}
        donated = donated_argnums(1, 2)
        self._whole = spmd(whole, **keywords, donate_argnums=donated)
        self._exchange = spmd(messages, **keywords)
        self._gradients = spmd(gradients, **where)
        self._without = spmd(without, **keywords, donate_argnums=donated)
        self._receive = spmd(receive, **where, donate_argnums=donated_argnums(0, 1))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def __call__(
        self, step: int, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[Any, Any, Any]:
        """The new parameters and state, and `aux`, node-stacked; accelerators donate the old."""
        number: Any = jnp.int32(step)
        if self.steps is not None:
            number = self._schedule.canonical_step(step, self._lookback)
        if not self.overlaps(opt_state):
            return self._whole(number, params, opt_state, *inputs)
        flying = _gossip(opt_state).in_flight
        # Sent off first: it needs nothing of this step, and the step nothing of it until its end.
        arriving = self._thread.submit(
            lambda: jax.block_until_ready(self._exchange(number, flying))
        )
        grads, aux = self._gradients(params, *inputs)
        opt_state = _with_gossip(opt_state, in_flight=())
        params, opt_state = self._without(number, params, opt_state, grads)
        arrived = arriving.result()
        if step % flying.overlap:
            return params, _with_gossip(opt_state, in_flight=arrived), aux
        gossip = _gossip(opt_state)
        params, after = self._receive(params, gossip._replace(in_flight=(), count=()), arrived)
        kept = {"weight": after.weight, "numerator": after.numerator}
        return params, _with_gossip(opt_state, **kept), aux

    def overlaps(self, opt_state: Any) -> bool:
        """Whether the exchange runs in a thread of its own."""
        state = find_state(opt_state)
        if state is None or not isinstance(state.in_flight, InFlight):
            return False
        if self._threads is not None:
            return self._threads
        return jax.default_backend() == "cpu" and jax.process_count() > 1


def _gossip(opt_state: Any) -> GossipState:
    state = find_state(opt_state)
    assert state is not None
    return state


def _with_gossip(opt_state: Any, **fields: Any) -> Any:
    """The state of a chain, with these fields of its gossip state replaced."""

    def replaced(part: Any) -> Any:
        return part._replace(**fields) if isinstance(part, GossipState) else part

    return jax.tree.map(replaced, opt_state, is_leaf=lambda part: isinstance(part, GossipState))
