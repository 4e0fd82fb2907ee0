"""Elastic averaging SGD, the baseline with a center variable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import StepLike, axis_size, cond, node_sum
from gossipjax.exchanges.model import add, common_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, init_state
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.renamed import renamed
from gossipjax.topology.schedule import require_int
from gossipjax.wire import Wire


@renamed(alpha="strength", period="every")
def easgd(
    strength: float, every: int = 1, *, axis_name: str = "nodes", local_axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Elastic averaging SGD: models and a center pull toward each other. Put it *last*.

    If `c` is the center, and `u` is the update from the chain, then at every H-th step `k`
    (`H = every`; `k mod H = 0`), with `alpha = strength`,

        d_i = alpha (x_i - c);    x_i <- x_i + u_i - d_i;    c <- c + sum_i d_i

    and at all other steps `x_i <- x_i + u_i` (eqs. 5 and 6). Each exchange multiplies the gap
    between the mean model and the center by `1 - alpha (N + 1)`.

    Every node keeps the same center in its state, as `extra["center"]`. The center starts as the
    mean of the models. If you call `init` outside of the mapped axis, the center starts as the
    parameters, and all nodes must start from the same parameters. Only updates change the sum of
    all `x_i` and `c`.

    Args:
      strength: alpha, the elasticity, above 0 and below `2 / (N + 1)`; the paper uses `0.9 / N`.
      every: H, steps from one exchange to the next.
      axis_name, local_axis_name: as in `gx.sgp`; `update` takes the same `step=`.

    Raises:
      ValueError: if `every` is not an integer >= 1, or if `gx.sgp` would raise it. When traced: if
        `strength` is too large for the number of nodes.

    References:
      Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NIPS 2015,
      arXiv:1412.6651.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.easgd(strength=0.25)
    >>> def update(x):
    ...     updates, state = tx.update(jnp.zeros(()), tx.init(x), x, step=0)
    ...     return x + updates, state.extra["center"].value
    >>> [v.tolist() for v in jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 4.0]))]
    [[0.5, 3.5], [2.0, 2.0]]
    """
    every = require_int(every, "every of easgd", 1)
    route = Wire(axis_name, local_axis_name)
    plan = ExchangePlan(wire=route, period=every)

    def init(params: optax.Params) -> GossipState:
        state = init_state(params, plan)
        center = common_model(params, axis_name)
        # Updates alone change the sum of all models and the center, so the center is mass.
        return state._replace(extra={"center": Extra(center, "average", is_mass=True)})

    def exchange(x: Any, center: Any) -> tuple[Any, Any]:
        """Pulls the model toward the center, and the center toward the models of all nodes."""
        pull = jax.tree.map(lambda a, c: strength * (a - c), x, center)
        x = jax.tree.map(jnp.subtract, x, pull)
        return x, jax.tree.map(jnp.add, center, node_sum(pull, plan.wire))

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Adds the updates; in every `every`-th step, models and center first pull each other."""
        nodes = axis_size(axis_name)
        if not strength * (nodes + 1) < 2:
            raise ValueError(
                f"strength of easgd must be below 2 / (N + 1) = {2 / (nodes + 1):.4g} over N = "
                f"{nodes} nodes, got {strength}: the gap to the center would change by "
                f"1 - alpha (N + 1) = {1 - strength * (nodes + 1):.4g} at each exchange. The paper "
                "has 0.9 / N."
            )
        center = state.kept("center")
        x, center = cond(step % every == 0, exchange, lambda *unchanged: unchanged, x, center)
        return Combined(add(x, updates), state.keep(center=center))

    return gossip_transform("easgd", plan, init, combine)
