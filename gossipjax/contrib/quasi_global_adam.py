"""QG-DAdam: Adam follows the model after it was mixed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms import frame
from gossipjax.algorithms.quasi_global import (
    add_scaled,
    interpolate,
    make_plan,
    rate_at,
    require_fraction,
    require_positive,
    require_rate,
    step_and_mix,
)
from gossipjax.collectives import StepLike, model_norm
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike

MIN_NORM = 1e-8  # is added to a norm that divides, as in the authors' code


def quasi_global_adam(
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    gradient_weight: float | jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    """QG-DAdam: Adam whose moments are those of the mixed models. Goes *last*, in Adam's place.

    As `quasi_global`, with the two moments `m` and `v`, both 0 at the start, at update `t` from 1:

        mh = b1 m + (1 - b1) g;    vh = b2 v + (1 - b2) g^2
        x' = P (x - rate (mh / (1 - b1^t)) / (sqrt(vh / (1 - b2^t)) + eps))
        d = (x - x') / (|x - x'| + 1e-8);    m <- b1 m + (1 - b1) d;    v <- b2 v + (1 - b2) d^2

    `|x - x'|` is the norm over all leaves of this node. The correction of the bias, by `1 - b^t`,
    and 1e-8 are those of the authors' released code. That code weighs the gradient by 1,
    `mh = b1 m + g`: `gradient_weight=1.0`. `mh` and `vh` are not kept. The state is a `GossipState`
    with `extra["mean"]` and `extra["square"]`, which are averaged on a change of nodes.

    Args:
      schedule: a doubly stochastic schedule.
      rate: the learning rate, as in `quasi_global`.
      b1: decay of `m`.
      b2: decay of `v`.
      eps: added to the root of `v`.
      axis_name, local_axis_name, wire: as in `gx.sgp`.
      gradient_weight: the weight of `g` in `mh`; None is `1 - b1`, the authors' code has 1.

    Raises:
      ValueError: as `gx.contrib.mixed_momentum`, or if `eps` or `gradient_weight` is not a positive number.

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
    name = "quasi_global_adam"
    require_rate(rate, name)
    require_fraction(b1, f"b1 of {name}")
    require_fraction(b2, f"b2 of {name}")
    require_positive(eps, f"eps of {name}")
    if gradient_weight is None:
        gradient_weight = 1 - b1
    require_positive(gradient_weight, f"gradient_weight of {name}")
    plan = make_plan(name, schedule, frame.make_route(name, axis_name, local_axis_name, wire))

    init = partial(frame.init_state, plan=plan, zeros={"mean": "average", "square": "average"})

    def combine(x: Any, gradients: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        mean = state.kept("mean")
        square = state.kept("square")
        local_mean = add_scaled(frame.scale(gradients, gradient_weight), b1, mean)
        local_square = _follow_squares(square, gradients, b2)
        updates_so_far = (state.count + 1).astype(jnp.float32)
        root = partial(_corrected_root, b2, updates_so_far, eps)
        corrected = frame.scale(local_mean, 1 / _bias(b1, updates_so_far))
        direction = jax.tree.map(lambda m, v: m / root(v), corrected, local_square)
        new_x = step_and_mix(x, rate_at(rate, state.count), direction, state, step)
        moved = _normalize(frame.subtract(x, new_x))
        mean = interpolate(mean, moved, b1)
        square = _follow_squares(square, moved, b2)
        return frame.Combined(new_x, state.keep(mean=mean, square=square))

    return frame.gossip_transform(name, plan, init, combine)


def _follow_squares(square: Any, tree: Any, keep: Any) -> Any:
    """Returns `keep v + (1 - keep) x^2`, leaf by leaf, in the type of `v`."""
    squares = jax.tree.map(lambda v, leaf: jnp.square(jnp.asarray(leaf, v.dtype)), square, tree)
    return interpolate(square, squares, keep)


def _bias(decay: Any, count: jax.Array) -> jax.Array:
    """Returns `1 - decay^t`, which the mean of `t` values with zeros before them lacks."""
    return 1 - jnp.asarray(decay, jnp.float32) ** count


def _corrected_root(decay: Any, count: jax.Array, eps: Any, square: jax.Array) -> jax.Array:
    bias = _bias(decay, count).astype(square.dtype)
    return jnp.sqrt(square / bias) + jnp.asarray(eps, square.dtype)


def _normalize(tree: Any) -> Any:
    """The leaves, divided by the norm of all of them together."""
    return frame.scale(tree, 1 / (model_norm(tree) + MIN_NORM))
