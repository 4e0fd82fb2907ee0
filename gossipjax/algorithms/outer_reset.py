"""What `gx.outer(reset_inner=True)` sets to 0 in the chain inside."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms import frame

SUMS = {optax.MultiStepsState: "acc_grads", optax.ApplyEvery: "grad_acc"}
"""What is no moment: gradients that wait for their update, and belong to a count that stays."""


def zero_moments(tx: optax.GradientTransformation, opt_state: Any) -> Any:
    """The state of a chain with zeros for its momentum and moments.

    Counts and gossip stay, as do gradients that were summed for an update to come.
    """

    def init(params: Any) -> Any:
        return _without_gossip(tx.init(params))

    zeros = optax.tree_map_params(init, jnp.zeros_like, _without_gossip(opt_state))
    return _keep_sums(opt_state, zeros)


def _keep_sums(opt_state: Any, zeros: Any) -> Any:
    def keep(part: Any, new: Any) -> Any:
        if _is_gossip(part):
            return part
        if type(part) not in SUMS:
            return new
        fields = {
            name: _keep_sums(getattr(part, name), getattr(new, name))
            for name in part._fields
            if name != SUMS[type(part)]
        }
        return part._replace(**fields)

    return jax.tree.map(keep, opt_state, zeros, is_leaf=_is_kept)


def _without_gossip(opt_state: Any) -> Any:
    return jax.tree.map(
        lambda part: optax.EmptyState() if _is_gossip(part) else part,
        opt_state,
        is_leaf=_is_gossip,
    )


def _is_gossip(part: Any) -> bool:
    return isinstance(part, frame.GossipState)


def _is_kept(part: Any) -> bool:
    return _is_gossip(part) or type(part) in SUMS
