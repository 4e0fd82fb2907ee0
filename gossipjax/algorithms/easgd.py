"""Elastic averaging SGD, the baseline with a center variable (Zhang et al. 2015; DPSGD-17)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import Step, axis_size, bounded_mean, total
from gossipjax.mixing import require_step
from gossipjax.schedule import require_whole
from gossipjax.state import GossipState, add, gossip_transform, init_state, wide_copies


def easgd(
    alpha: float, period: int = 1, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """Elastic averaging SGD: models are drawn to a center, and it to them. Goes *last* in a chain.

    With `c` the center, `u` the update from the chain before it, at every `period`-th step `k`
    (`k mod period = 0`):

        d_i = alpha (x_i - c);    x_i <- x_i + u_i - d_i;    c <- c + sum_i d_i

    and at the others `x_i <- x_i + u_i` (Zhang et al. 2015, eqs. 5 and 6). The gap between the mean
    model and the center changes by `1 - alpha (N + 1)` each time.

    The parameters that the user holds are `x_i`; every node's state holds the same center, float32
    at least: at the start the mean of the models. Where `init` is called outside of the mapped
    axis, it is the parameters themselves: all nodes must then start from the same. The sum of all
    `x_i` and `c` changes only by the updates.

    Args:
      alpha: the elasticity, above 0 and below `2 / (N + 1)`; the paper has `0.9 / N`.
      period: steps from one exchange to the next.
      axis_name: the mapped axis of the nodes.

    The transform's `update` takes `step=`, as that of `sgp`.

    Raises:
      ValueError: for an alpha that is not above 0 or a period below 1; when traced, for an alpha
        that is unstable with so many nodes, or as `sgp`.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.easgd(alpha=0.25)
    >>> def update(x):
    ...     updates, state = tx.update(jnp.zeros(()), tx.init(x), x, step=0)
    ...     return x + updates, state.center
    >>> [v.tolist() for v in jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 4.0]))]
    [[0.5, 3.5], [2.0, 2.0]]
    """
    if not (isinstance(alpha, int | float | np.number) and 0 < alpha < math.inf):
        raise ValueError(f"alpha of easgd is a number above 0; given {alpha!r}.")
    alpha, period = float(alpha), require_whole(period, "period of easgd", 1)

    def init(params: Any) -> GossipState:
        state, center = init_state(params, push_sum=False), wide_copies(params)
        try:
            return state._replace(center=bounded_mean(center, axis_name))
        except ValueError:  # no such axis here: these are the parameters of all nodes
            return state._replace(center=center)

    def combine(x: Any, updates: Any, state: GossipState, step: Step) -> tuple[Any, GossipState]:
        nodes = axis_size(axis_name)
        if alpha * (nodes + 1) >= 2:
            raise ValueError(
                f"easgd with alpha = {alpha} is unstable over {nodes} nodes: the gap to the center "
                f"changes by 1 - alpha (N + 1) = {1 - alpha * (nodes + 1):.4g} at each exchange. "
                f"Give an alpha below 2 / (N + 1) = {2 / (nodes + 1):.4g}, such as 0.9 / N."
            )
        require_step(step, axis_name)

        def exchange(x: Any, center: Any) -> tuple[Any, Any]:
            pull = jax.tree.map(lambda a, c: alpha * (a - c), x, center)
            drawn = jax.tree.map(jnp.subtract, x, pull)
            return drawn, jax.tree.map(jnp.add, center, total(pull, axis_name))

        def stay(x: Any, center: Any) -> tuple[Any, Any]:
            return x, center

        if isinstance(step, int | np.integer):
            x, center = (stay if step % period else exchange)(x, state.center)
        else:
            x, center = jax.lax.cond(step % period, stay, exchange, x, state.center)
        x = add(x, updates)
        return x, state._replace(numerator=x, center=center)

    return gossip_transform("easgd", axis_name, init, combine)
