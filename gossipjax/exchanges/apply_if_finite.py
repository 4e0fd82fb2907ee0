"""A guard against gradients that are not finite, on whose verdict all nodes agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import axis_size, cond, node_sum, varies, vary
from gossipjax.exchanges.chain import gossip_state
from gossipjax.exchanges.transform import require_state, require_transform
from gossipjax.topology.schedule import require_int
from gossipjax.wire import Wire


class ApplyIfFiniteState(optax.ApplyIfFiniteState):
    """The state of `gx.apply_if_finite`: optax's fields, equal on all nodes."""


def apply_if_finite(
    inner: optax.GradientTransformation,
    *,
    axis_name: str = "nodes",
    max_consecutive_errors: int = 5,
    local_axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Applies `optax.apply_if_finite` to several nodes: if one's updates are not finite, all skip.

    With optax's own version each node decides by itself. Around a gossip transform, nodes would
    then take different branches of a conditional with an exchange in it: on a mesh of devices they
    would wait for each other forever, and simulated nodes would lose mass. (Simulated nodes also
    lose mass with `jnp.where(is_finite, new, old)` after a step, as in flax's `DynamicScale`.)
    `gx.apply_if_finite` counts the nodes whose updates are not finite, by a small all-reduce, so
    all nodes take the same branch. You can put it in two places:

    - around a whole chain: at a bad step no parameter and no state changes on any node. If the
      chain contains `osgp`, do not pass `step=`: a skipped step delivers no message, so messages
      follow the count in the state and not the step that you pass.
    - inside the chain, before the gossip: all nodes skip the optimizer and still exchange. If only
      the bad node should skip the optimizer, use `optax.apply_if_finite` in this place; right
      before the gossip it is safe.

    Args:
      inner: the transform or chain that is skipped.
      max_consecutive_errors: after this number of skipped steps in a row, the next step is applied,
        finite or not.
      axis_name, local_axis_name: as in `gx.sgp`.

    Raises:
      ValueError: if an argument is of the wrong type; when traced, if the axis is missing, or
        `inner` contains a transform with overlap and a step is given.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = gx.apply_if_finite(optax.chain(optax.sgd(1.0), gx.sgp(gx.topology.ring(2))))
    >>> def update(z, g):
    ...     updates, state = tx.update(g, tx.init(z), z, step=0)
    ...     return z + updates, state.total_notfinite
    >>> z = jnp.array([1.0, 3.0])
    >>> [a.tolist() for a in jax.vmap(update, axis_name="nodes")(z, jnp.array([jnp.nan, 0.0]))]
    [[1.0, 3.0], [1, 1]]
    """
    inner = require_transform(inner, "inner of apply_if_finite")
    max_errors = require_int(max_consecutive_errors, "max_consecutive_errors", 0)

    def init(params: optax.Params) -> ApplyIfFiniteState:
        return ApplyIfFiniteState(
            notfinite_count=jnp.zeros((), jnp.int32),
            last_finite=jnp.array(True),
            total_notfinite=jnp.zeros((), jnp.int32),
            inner_state=inner.init(params),
        )

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ApplyIfFiniteState]:
        """Updates by `inner` on all nodes, or, if one node's updates are not finite, on none."""
        state = require_state(state, ApplyIfFiniteState, "gx.apply_if_finite")
        gossip = gossip_state(state.inner_state)
        step = extra_args.get("step")
        if gossip is not None and gossip.overlap and step is not None:
            raise ValueError(
                "step must be left out where apply_if_finite stands around a transform with "
                f"overlap, as a skipped step delivers no message, got {step!r}: put "
                "apply_if_finite inside the chain, optax.chain(gx.apply_if_finite(optimizer), "
                "gx.osgp(...)), or leave step out."
            )
        is_finite = _all_finite(updates, axis_name, local_axis_name)
        # Skipped steps in a row: after too many, updates are applied, finite or not.
        in_a_row = jnp.where(is_finite, 0, optax.safe_increment(state.notfinite_count))
        inner_updates, inner_state = _update_if(
            is_finite | (in_a_row > max_errors),
            lambda: inner.update(updates, state.inner_state, params, **extra_args),
            state.inner_state,
            axis_name,
        )
        total = optax.safe_increment(state.total_notfinite)
        return inner_updates, ApplyIfFiniteState(
            notfinite_count=in_a_row,
            last_finite=is_finite,
            total_notfinite=jnp.where(is_finite, state.total_notfinite, total),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _update_if(
    accept: jax.Array, update: Callable[[], Any], inner_state: Any, axis_name: str
) -> Any:
    """Returns the updates and state of `update()` if `accept`, else zeros and `inner_state`."""

    def reject() -> Any:
        # Both branches return the same types; `eval_shape` finds them, and runs nothing.
        expected = jax.eval_shape(update)
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), expected[0])
        return vary((zeros, inner_state), axis_name)

    return cond(accept, lambda: vary(update(), axis_name), reject)


def _all_finite(updates: Any, axis_name: str, local_axis_name: str | None) -> jax.Array:
    """Says whether the updates of all nodes are finite; every device gets the same answer."""
    axis_size(axis_name)  # raises if there is no such axis
    are_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(updates)]
    failures = jnp.logical_not(jnp.all(jnp.array(are_finite))).astype(jnp.float32)
    names = [axis_name] if local_axis_name is None else [axis_name, local_axis_name]
    # With check_vma=False, types say of everything, even of a constant, that it may vary.
    types_tell_nothing = all(varies(jnp.zeros(()), name) for name in names)
    if types_tell_nothing:
        # Each device of a node may have another part of the model, so all of them are asked.
        manual = jax.sharding.get_abstract_mesh().manual_axes
        names += [name for name in manual if name not in names]
    for name in names:
        failures = node_sum(failures, Wire(name))
    return failures == 0
