"""DES-LOC: the parameters and each of Adam's moments are averaged at different intervals."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import StepLike, default_step, mix, require_doubly_stochastic
from gossipjax.topology.schedule import Schedule


class DeslocState(NamedTuple):
    """State of `desloc` for one node."""

    count: Any  # int32 scalar, the number of updates so far
    inner: Any  # the state of the optimizer


def desloc(
    inner: optax.GradientTransformation,
    schedule: Schedule,
    every: int,
    mu_every: int,
    nu_every: int,
    *,
    axis_name: str = "nodes",
) -> optax.GradientTransformationExtraArgs:
    """DES-LOC: Local Adam whose moments are averaged more rarely than its models. Put it *last*.

    `desloc` wraps the optimizer. If `x` are the parameters, `m` and `v` the two moments of Adam,
    and `g` the gradient of this node, then at update `k`, counted from 0:

        if k mod mu_every = 0:  m <- P m
        if k mod nu_every = 0:  v <- P v
        u, m, v <- inner(g, x; m, v)
        if k mod every = 0:     x <- P x
        x <- x + u

    With periods of K, 3 K and 6 K nodes send half as much as if they averaged all three every K
    steps. `m` and `v` are the fields `mu` and `nu` of the states in `inner`, such as a state of
    `optax.adamw`. One program makes all updates, so `update` ignores `step=`.

    Args:
      inner: the optimizer, or a chain that contains one, without gossip.
      schedule: a doubly stochastic schedule; for exact averages use `gx.topology.complete(n)`.
        Parameters and moments go through the rounds of the schedule separately.
      every: updates from one average of the parameters to the next.
      mu_every, nu_every: updates from one average of `m`, and of `v`, to the next.
      axis_name: as in `gx.sgp`.

    References:
      After Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
      Foundation Models", 2025, arXiv:2505.22549; the paper's text was not available. To clip
      each coordinate of the gradient, as the paper does, put `optax.clip(rho)` before `desloc`.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> pair = gx.topology.complete(2)
    >>> tx = gx.contrib.desloc(optax.adam(0.5), pair, every=2, mu_every=1, nu_every=4)
    >>> def two_steps(x, g):
    ...     state = tx.init(x)
    ...     for _ in range(2):
    ...         updates, state = tx.update(g, state, x)
    ...         x = x + updates
    ...     return x, state.inner[0].mu
    >>> with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to the power of its count
    ...     x, mu = jax.vmap(two_steps, axis_name="nodes")(jnp.zeros(2), jnp.array([1.0, 3.0]))
    >>> [round(float(m), 2) for m in mu]  # 0.1 g, their mean, and a tenth of the way to g again
    [0.28, 0.48]
    """
    require_doubly_stochastic(schedule, "desloc")
    inner = optax.with_extra_args_support(inner)

    def mix_every(period: int, tree: Any, count: StepLike) -> Any:
        """Mixes `tree` if the number of the update is a multiple of `period`, or returns it."""
        return mix(tree, None, schedule.every(period), count, axis_name=axis_name)[0]

    def init(params: optax.Params) -> DeslocState:
        return DeslocState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, DeslocState]:
        """Mixes both moments of Adam and the parameters, each if it is due, and takes a step."""
        extra_args.pop("step", None)  # the count decides what is due
        count = default_step(None, state.count, axis_name)
        mixed = _change_field(state.inner, "mu", partial(mix_every, mu_every, count=count))
        mixed = _change_field(mixed, "nu", partial(mix_every, nu_every, count=count))
        change, new_inner = inner.update(updates, mixed, params, **extra_args)
        moved = optax.tree.sub(mix_every(every, params, count), params)
        return optax.tree.add(moved, change), DeslocState(state.count + 1, new_inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _change_field(state: Any, field: str, change: Callable[[Any], Any]) -> Any:
    """Returns `state` with `change` applied to this field, in each of its parts that has one."""

    def has_field(part: Any) -> bool:
        return hasattr(part, field)

    def change_part(part: Any) -> Any:
        return part._replace(**{field: change(getattr(part, field))}) if has_field(part) else part

    return jax.tree.map(change_part, state, is_leaf=has_field)
