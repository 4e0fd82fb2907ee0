"""What a chain keeps per parameter, set to 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.frame.state import GossipState


def zero_moments(tx: optax.GradientTransformation, opt_state: Any) -> Any:
    """The state of a chain with zeros for its momentum and moments; counts and gossip stay."""

    def init(params: Any) -> Any:
        return _without_gossip(tx.init(params))

    zeros = optax.tree_map_params(init, jnp.zeros_like, _without_gossip(opt_state))
    return jax.tree.map(
        lambda part, new: part if _is_gossip(part) else new, opt_state, zeros, is_leaf=_is_gossip
    )


def _without_gossip(opt_state: Any) -> Any:
    return jax.tree.map(
        lambda part: optax.EmptyState() if _is_gossip(part) else part,
        opt_state,
        is_leaf=_is_gossip,
    )


def _is_gossip(part: Any) -> bool:
    return isinstance(part, GossipState)
