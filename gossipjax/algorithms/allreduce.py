"""AllReduce SGD, the exact baseline (AR-SGD, S-PSGD, C-PSGD in the papers)."""

from __future__ import annotations

from typing import Any

import jax
import optax

from gossipjax.collectives import mean, require_floats, varies


def allreduce(axis_name: str = "nodes") -> optax.GradientTransformationExtraArgs:
    """Averages the gradients over the axis: `g_i <- (1/N) sum_j g_j`. Goes *first* in a chain.

    With equal starts every node then takes the same step. Over the axis of a node's own devices,
    `allreduce("local")`, it is the inner half of the hierarchy of SGP-19: gradients are averaged
    inside a server, models gossip between servers. The learning rate is not scaled by N.

    Raises (when traced):
      ValueError: if the axis is missing; if a leaf is not floating-point; under a `shard_map` with
        `check_vma=True`, if no gradient varies over the axis: with parameters replicated over it,
        autodiff has summed their gradients over the axis already, and averaging would be wrong by
        the axis' size.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(gx.allreduce(), optax.sgd(1.0))
    >>> def update(g):
    ...     return tx.update(g, tx.init(g))[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [-2.0, -2.0]
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        require_floats(updates, "updates")
        averaged = mean(updates, axis_name)
        if not any(varies(leaf, axis_name) for leaf in jax.tree.leaves(updates)):
            raise ValueError(
                f"no gradient varies over {axis_name!r}: the parameters are replicated over it, so "
                "autodiff has summed the gradients already. Take the gradients at "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), or use check_vma=False."
            )
        return averaged, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
