"""Simulated asynchronous D-PSGD: gradients at stale models (AD-PSGD and D1D-PSGD)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from gossipjax.collectives import StepLike, cast_like, require_doubly_stochastic, select_for_node
from gossipjax.exchanges.model import add
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform, mix_updated
from gossipjax.renamed import renamed
from gossipjax.topology import complete
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike


def adpsgd(
    schedule: Schedule,
    delays: int | ArrayLike = 1,
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Simulates AD-PSGD: nodes take their gradients at stale models. Put it *last* in a chain.

    The nodes run in lockstep with given delays, so a run can be replayed. If `W_k` are the models
    after `k` steps, `d_k` is this node's delay at step `k`, and `u` is the update from the chain,
    then

        W_{k+1} = P W_k + u,    u made from the gradient at W_{k - d_k}

    In the first steps, the gradient is taken at the first model. Your parameters are the stale
    model at which the *next* gradient is evaluated; `gx.latest_model` returns the newest model. The
    ring buffer `extra["history"]` keeps `[D - 1, ...]` older models for delays of up to `D`. Weight
    decay and clipping before `adpsgd` see the stale model, too. With delay 0 you get `dpsgd`.

    Args:
      schedule: a doubly stochastic schedule; the paper uses `bipartite_exponential`.
      delays: one number of steps for all, or a table `[T, N]`: at step `k` (counted by the state)
        node `i` has `delays[k mod T, i]`. `random_delays` draws a table.
      axis_name, local_axis_name, wire: as in `gx.sgp`; `update` takes the same `step=`.

    Raises:
      ValueError: if the delays are neither one integer from 0 to 2^20 nor a table `[T, N]` of such
        integers, or if `gx.dpsgd` would raise it.

    References:
      Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
      arXiv:1710.06952, in the form of eq. 2 of Zhang et al., arXiv:2002.01119.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.adpsgd(gx.topology.ring(2), delays=1)
    >>> def three_steps(x):
    ...     state, models = tx.init(x), [x]
    ...     for step in range(3):
    ...         updates, state = tx.update(jnp.ones(()), state, models[-1], step=step)
    ...         models.append(models[-1] + updates)
    ...     return models
    >>> x = jnp.array([0.0, 2.0])  # latest: [0, 2], [2, 2], [3, 3], [4, 4]
    >>> [model.tolist() for model in jax.vmap(three_steps, axis_name="nodes")(x)]
    [[0.0, 2.0], [0.0, 2.0], [2.0, 2.0], [3.0, 3.0]]
    """
    require_doubly_stochastic(schedule, "adpsgd")
    nodes = schedule.size
    table = np.full((1, nodes), delays) if np.ndim(delays) == 0 else np.asarray(delays)
    is_table = table.ndim == 2 and table.shape[1] == nodes and table.size > 0
    has_integers = table.dtype.kind in "iu"
    # Each step of delay costs a copy of the model.
    if not (is_table and has_integers and 0 <= table.min() <= table.max() < 2**20):
        raise ValueError(
            f"delays must be one number of steps, an integer from 0, or a table of them, [T, N] "
            f"with the N = {nodes} nodes of the schedule, got {delays!r}: gx.random_delays draws "
            "one."
        )
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(schedule, wire=route, order="combine-while-adapting")
    max_delay = int(table.max())
    if max_delay == 0:
        return mix_updated("adpsgd", plan, push_sum=False)
    capacity = max_delay - 1

    def init(params: optax.Params) -> GossipState:
        # The parameters are a stale model, and the residual leads from it to the newest one.
        state = init_state(params, plan, keep_residual=True)
        if capacity == 0:  # no delay above 1 ever needs an older model
            return state
        history = jax.tree.map(lambda x: _repeat(x, capacity), params)
        return state._replace(extra={"history": Extra(history, "restart")})

    def combine(
        x: Any, updates: optax.Updates, state: GossipState, step: StepLike, received: Any
    ) -> Combined:
        """Moves the newest model `x`, and chooses the model for the gradient of the next step."""
        del step
        latest = add(received.x, updates)  # `received.x` is `P x`
        upcoming = state.count + 1
        delays_of_node = jnp.asarray(select_for_node(table.T, jnp.int32, axis_name))  # `[T]`
        delay = delays_of_node[upcoming % len(table)]
        # Delay 0 chooses the model after this step, delay 1 the model before it.
        params = jax.tree.map(partial(jnp.where, delay == 0), latest, x)
        if state.extra is not None:
            history = state.kept("history")
            # The buffer holds models k - 1, ..., k - capacity; model k replaces the oldest.
            stale = jax.tree.map(lambda models: models[(upcoming - delay) % capacity], history)
            stale = cast_like(stale, params)
            params = jax.tree.map(partial(jnp.where, delay < 2), params, stale)
            history = jax.tree.map(
                lambda models, model: models.at[state.count % capacity].set(model),
                history,
                cast_like(x, history),
            )
            state = state.keep(history=history)
        return Combined(latest, state, params)

    return gossip_transform("adpsgd", plan, init, combine)


def _repeat(leaf: Any, count: int) -> jax.Array:
    """Repeats a leaf `[...]` to `[count, ...]`; of a `jax.ShapeDtypeStruct` it makes zeros."""
    array = jnp.zeros_like(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)
    return jnp.broadcast_to(array, (count, *array.shape))


@renamed(n="nodes")
def random_delays(
    nodes: int, rounds: int, seed: int, *, mean_delay: float = 1.0, max_delay: int = 4
) -> np.ndarray:
    """Draws a table of delays in steps, `[T, N]`, for `adpsgd`: Poisson, cut at `max_delay`.

    Args:
      nodes: N, the number of nodes.
      rounds: T, the number of rows.
      seed: the seed of the random numbers.
      mean_delay: the mean of the Poisson distribution.
      max_delay: the largest delay; larger random numbers become `max_delay`.

    >>> random_delays(4, 2, seed=0).tolist()
    [[1, 0, 0, 3], [3, 1, 1, 2]]
    """
    rng = np.random.default_rng(seed)
    return np.minimum(rng.poisson(mean_delay, (rounds, nodes)), max_delay)


@renamed(n="nodes")
def d1d_psgd(
    nodes: int,
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D1D-PSGD: `adpsgd` on the complete graph with a delay of 1. Put it *last* in a chain.

        W_{k+1} = mean(W_k) + u,    u made from the gradient at W_{k - 1}

    The all-reduce of the models and the computation of the gradient can run at the same time. Your
    parameters are the model of the previous round; the state keeps the latest model. `nodes` is the
    number of nodes; the other arguments are as in `adpsgd`.

    References:
      Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training",
      ICASSP 2020, arXiv:2002.01119, eqs. 2, 13 and 14.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.d1d_psgd(2)
    >>> def update(x, u):
    ...     return gx.latest_model(x, tx.update(u, tx.init(x), x, step=0)[1])
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    return adpsgd(complete(nodes), axis_name=axis_name, local_axis_name=local_axis_name, wire=wire)
