"""Asynchronous D-PSGD, simulated: gradients at older models (AD-PSGD, and D1D-PSGD of RAND-20)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.dpsgd import dpsgd
from gossipjax.buffers import cast_like, require_wire_dtype
from gossipjax.collectives import Step, Wire, per_node
from gossipjax.mixing import mix, require_doubly_stochastic
from gossipjax.schedule import Schedule, require_whole
from gossipjax.state import GossipState, add, gossip_transform, init_state
from gossipjax.topology import complete


def adpsgd(
    schedule: Schedule,
    delays: int | np.typing.ArrayLike = 1,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Simulates AD-PSGD: nodes in lockstep, gradients at models some steps old. Goes *last*.

    Nothing here is asynchronous. What asynchrony does to the mathematics, gradients of older
    models, happens at integer delays that are given, so that a run can be replayed. With `W_k` the
    models after `k` steps, `d_k` this node's delay at step `k` and `u` the update from the chain:

        W_{k+1} = P W_k + u,    u made from the gradient at W_{k - d_k}

    (Lian et al. 2018, as in RAND-20, eq. 2; models before the start are the starting one). The
    parameters that the user holds are the model at which the *next* gradient is to be taken; the
    latest is the state's `numerator`, float32 at least (`gx.latest_model` reads it). Older ones are
    in the state's ring buffer, `[D - 1, ...]` for delays of up to `D`. Weight decay and clipping
    before it see the older model too. Delay 0 is `dpsgd`.

    Args:
      schedule: a doubly stochastic schedule; the paper's is `bipartite_exponential`.
      delays: one number for all, or a table `[T, N]`: at step `k` (counted by the state) node `i`
        has `delays[k mod T, i]`. `random_delays` draws one.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of a node's own devices, as in `sgp`.
      wire_dtype: a narrower type for messages, as in `sgp`.

    The transform's `update` takes `step=`, as that of `sgp`.

    Raises:
      ValueError: for delays that are negative or no whole numbers, or a table that is not `[T, N]`;
        for a schedule that is not doubly stochastic; when traced, as `sgp`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.adpsgd(gx.topology.ring(2), delays=1)
    >>> def three_steps(x):
    ...     state, held = tx.init(x), [x]
    ...     for step in range(3):
    ...         updates, state = tx.update(jnp.ones(()), state, held[-1], step=step)
    ...         held.append(held[-1] + updates)
    ...     return held
    >>> x = jnp.array([0.0, 2.0])  # latest: [0, 2], [2, 2], [3, 3], [4, 4]
    >>> [held.tolist() for held in jax.vmap(three_steps, axis_name="nodes")(x)]
    [[0.0, 2.0], [0.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
    """
    require_doubly_stochastic(schedule, "adpsgd")
    table = _delay_table(delays, schedule.size)
    wire = Wire(axis_name, local_axis_name, require_wire_dtype(wire_dtype))
    largest = int(table.max())
    if largest == 0:
        return dpsgd(schedule, "combine-while-adapting", *wire)
    ring = largest - 1

    def init(params: Any) -> GossipState:
        state = init_state(params, push_sum=False, keep_numerator=True)
        if ring == 0:
            return state
        return state._replace(older=jax.tree.map(lambda x: jnp.stack([x] * ring), params))

    def combine(x: Any, updates: Any, state: GossipState, step: Step) -> tuple[Any, GossipState]:
        mixed, _ = mix(x, None, schedule, step, *wire)
        latest = add(mixed, updates)
        upcoming = state.count + 1
        delay = jnp.asarray(per_node(table.T, jnp.int32, axis_name))[upcoming % len(table)]
        held = _choose(delay == 0, latest, x)
        if ring:
            # Models k - 1, ..., k - ring are in it, and this step's own, k, replaces the oldest.
            slot = (upcoming - delay) % ring
            old = jax.tree.map(lambda models: models[slot], state.older)
            held = _choose(delay < 2, held, jax.tree.map(lambda o, h: o.astype(h.dtype), old, held))
            rounded = cast_like(x, state.older)
            older = jax.tree.map(
                lambda models, model: models.at[state.count % ring].set(model), state.older, rounded
            )
            state = state._replace(older=older)
        return held, state._replace(numerator=latest)

    return gossip_transform("adpsgd", axis_name, init, combine)


def _choose(condition: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _delay_table(delays: Any, nodes: int) -> np.ndarray:
    """`[T, N]`, checked."""
    table = np.asarray(delays)
    if not np.issubdtype(table.dtype, np.integer):
        raise ValueError(f"delays are whole numbers of steps; given {delays!r}.")
    if table.ndim == 0:
        table = np.full((1, nodes), table)
    if table.ndim != 2 or table.shape[1] != nodes or not table.size:
        raise ValueError(
            f"a table of delays is [T, N] with N = {nodes}, the schedule's nodes; given shape "
            f"{list(table.shape)}."
        )
    if table.min() < 0:
        k, i = np.argwhere(table < 0)[0]
        raise ValueError(f"delays are not negative; delays[{k}, {i}] = {table[k, i]}.")
    return table


def random_delays(
    nodes: int, rounds: int, seed: int, mean: float = 1.0, largest: int = 4
) -> np.ndarray:
    """A table of delays `[T, N]` for `adpsgd`: Poisson of this mean (steps), cut at `largest`.

    Raises:
      ValueError: for a mean below 0 or not finite, or counts that are no whole numbers.

    >>> random_delays(4, 2, seed=0).tolist()
    [[1, 0, 0, 3], [3, 1, 1, 2]]
    """
    nodes = require_whole(nodes, "nodes of random_delays", 1)
    rounds = require_whole(rounds, "rounds of random_delays", 1)
    largest = require_whole(largest, "the largest delay", 0)
    if not 0 <= mean < np.inf:
        raise ValueError(f"the mean delay is at least 0 and finite; given {mean!r}.")
    rng = np.random.default_rng(require_whole(seed, "seed of random_delays", 0))
    return np.minimum(rng.poisson(mean, (rounds, nodes)), largest)


def d1d_psgd(
    n: int,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """D1D-PSGD, delay by one (RAND-20, eqs. 2, 13, 14): `adpsgd` on the complete graph, delay 1.

        W_{k+1} = mean(W_k) + u,    u made from the gradient at W_{k - 1}

    The all-reduce of the models and the computation of the gradient need nothing of each other.
    The user holds the model of the round before; the state holds the latest.

    Args:
      n: the number of nodes. The others are those of `adpsgd`.

    Raises:
      ValueError: as `adpsgd`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.d1d_psgd(2)
    >>> def update(x, u):
    ...     return gx.latest_model(x, tx.update(u, tx.init(x), x, step=0)[1])
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    return adpsgd(complete(n), 1, axis_name, local_axis_name, wire_dtype)
