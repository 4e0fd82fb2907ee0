"""QG-DAdam: the moments of Adam follow the model after it was mixed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.gossip import Node, Rule, gossip
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.exchanges.model import add_scaled, interpolate
from gossipjax.topology.schedule import Schedule

MIN_NORM = 1e-8  # is added to a norm that divides, as in the authors' code


def quasi_global_adam(
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    axis_name: str = "nodes",
    gradient_weight: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """QG-DAdam: the moments of Adam follow the mixed models. Put it *last*, in Adam's place.

    The algorithm is `gx.quasi_global` with two moments `m` and `v`, both 0 at the start. At update
    `t`, counted from 1:

        mh = b1 m + (1 - b1) g;    vh = b2 v + (1 - b2) g^2
        x' = P (x - rate (mh / (1 - b1^t)) / (sqrt(vh / (1 - b2^t)) + eps))
        d = (x - x') / (|x - x'| + 1e-8);    m <- b1 m + (1 - b1) d;    v <- b2 v + (1 - b2) d^2

    `|x - x'|` is the norm over all leaves of this node. The bias correction by `1 - b^t` and the
    1e-8 are as in the code that the authors released.

    Args:
      schedule: a doubly stochastic schedule.
      rate: the learning rate, as in `gx.quasi_global`.
      b1, b2: the decays of `m` and `v`.
      eps: a number that is added to the root of `v`.
      axis_name: as in `gx.sgp`.
      gradient_weight: the weight of `g` in `mh`; None means `1 - b1`. The authors' code uses 1.

    References:
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep
      Learning on Heterogeneous Data", ICML 2021, arXiv:2102.04761, appendix (QG-DAdam).

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.contrib.quasi_global_adam(gx.topology.ring(2), rate=0.5)
    >>> def update(x, g):
    ...     updates, state = tx.update(g, tx.init(x), x, step=0)
    ...     return x + updates, state.extra["mean"].value
    >>> x, m = jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([4.0, 1.0]))
    >>> [round(float(v), 3) for v in (*x, *m)]  # steps of 0.5; m = 0.1 (x - x') / |x - x'|
    [0.5, 0.5, -0.1, 0.1]
    """
    require_doubly_stochastic(schedule, "quasi_global_adam")
    weight = 1 - b1 if gradient_weight is None else gradient_weight

    def combine(x: Any, g: Any, node: Node) -> tuple[Any, dict[str, Any]]:
        """Takes a step of Adam and mixes; the moments that are kept follow the mixed models."""
        mean = node.kept["mean"]
        square = node.kept["square"]
        t = (node.count + 1).astype(jnp.float32)

        def divide(m: jax.Array, v: jax.Array) -> jax.Array:
            """Returns Adam's direction from both moments, with the bias correction of update t."""
            return m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + eps)

        local_mean = add_scaled(optax.tree.scale(weight, g), b1, mean)
        local_square = interpolate(square, jax.tree.map(jnp.square, g), b2)
        direction = jax.tree.map(divide, local_mean, local_square)
        new = node.mix(add_scaled(x, -node.rate, direction))
        moved = optax.tree.sub(x, new)
        # In the place of a gradient, the way that the model went, with norm 1.
        unit = optax.tree.scale(1 / (optax.tree.norm(moved) + MIN_NORM), moved)
        mean = interpolate(mean, unit, b1)
        square = interpolate(square, jax.tree.map(jnp.square, unit), b2)
        return new, {"mean": mean, "square": square}

    kept: dict[str, Rule] = {"mean": "average", "square": "average"}
    return gossip(
        schedule,
        combine,
        keeps=kept,
        axis_name=axis_name,
        takes_gradients=True,
        models=1,
        rate=rate,
    )
