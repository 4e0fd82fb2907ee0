"""Keeps a node from making updates that are finite but absurdly large."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.exchanges.transform import require_number


class OutlierState(NamedTuple):
    """The largest entry of all updates that were not refused, 0 before the first."""

    largest: jax.Array


def refuse_outliers(factor: float = 1e4) -> optax.GradientTransformation:
    """Refuses updates that are far too large. Put it *last* in the chain that you give `join`.

    If an entry of an update is larger than `factor` times the largest entry of all updates before,
    the update becomes NaN. The node does not apply an update that is not finite, nothing of it
    reaches other nodes, and `join(nonfinite=)` says whether the step is an error. Without it, one
    update of 1e30, from a faulty memory or a division by almost 0, is soon in all models.

    `join` does not use this transform by default, because learning rates may jump: the largest
    entry grew at most 2.5-fold with constant, warmed up, cosine and restarted rates, but 6e5-fold
    when a rate of 1e-7 was followed by 0.1.

    Raises:
      ValueError: unless `factor` is above 1 and finite.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.1), gx.asynchronous.refuse_outliers())
    >>> state = tx.init(jnp.zeros(2))
    >>> _, state = tx.update(jnp.ones(2), state)
    >>> tx.update(jnp.array([1.0, 1e30]), state)[0].tolist()
    [nan, nan]
    """
    require_number(factor, "factor of refuse_outliers", "above 1", lambda f: 1 < f < np.inf)

    def init(params: Any) -> OutlierState:
        del params
        return OutlierState(jnp.zeros(()))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OutlierState]:
        del params
        parts = [jnp.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(updates)]
        largest = jnp.stack([part.astype(jnp.float32) for part in parts]).max()
        is_outlier = (state.largest > 0) & (largest > factor * state.largest)

        def refuse(leaf: jax.Array) -> jax.Array:
            return jnp.where(is_outlier, jnp.full_like(leaf, jnp.nan), leaf)

        # A node takes the state back as well, where it does not apply an update.
        return jax.tree.map(refuse, updates), OutlierState(jnp.maximum(state.largest, largest))

    return optax.GradientTransformation(init, update)
