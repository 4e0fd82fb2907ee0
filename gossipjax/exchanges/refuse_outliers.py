"""A guard against updates that are finite but absurdly large."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class OutlierState(NamedTuple):
    """Keeps the largest entry of all updates that were not refused; 0 before the first."""

    largest: jax.Array


def refuse_outliers(factor: float = 1e4) -> optax.GradientTransformation:
    """Makes updates NaN that are far too large, so that what follows skips them.

    If an entry of an update is larger than `factor` times the largest entry of all updates before,
    the update becomes NaN. In asynchronous training put `refuse_outliers` *last* in the chain that
    you give `gx.asynchronous.join`: a node applies no update that is not finite. In lockstep put it
    in front of `gx.apply_if_finite`, which skips. Without it, one update of 1e30, from a faulty
    memory or a division by almost 0, is soon in all models.

    Nothing uses this transform by default, because learning rates may jump: the largest entry grew
    at most 2.5-fold with constant, warmed up, cosine and restarted rates, but 6e5-fold when a rate
    of 1e-7 was followed by 0.1.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.1), gx.refuse_outliers())
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.ones(2), state)
    >>> tx.update(jnp.array([1.0, 1e30]), state)[0].tolist()
    [nan, nan]
    """

    def init(params: Any) -> OutlierState:
        del params
        return OutlierState(jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OutlierState]:
        """Makes outliers NaN, and remembers the largest entry of all updates that are none."""
        del params
        largest = optax.tree.norm(updates, ord="inf").astype(jnp.float32)
        # The first update is never an outlier: before it the largest entry is 0.
        is_outlier = (state.largest > 0) & (largest > factor * state.largest)
        refused = jax.tree.map(lambda u: jnp.where(is_outlier, jnp.nan, u), updates)
        is_refused = is_outlier | ~jnp.isfinite(largest)
        new_largest = jnp.maximum(state.largest, largest)
        return refused, OutlierState(jnp.where(is_refused, state.largest, new_largest))

    return optax.GradientTransformation(init, update)
