"""One update of the gradients of several steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import StepLike, cast_like, default_step, vary, vary_where_mapped
from gossipjax.serialization import register_with_flax
from gossipjax.topology.schedule import require_int


def accumulate(
    tx: optax.GradientTransformation, every: int, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """One update of the mean gradient of `every` steps. Goes *around* the whole chain.

    With `k = every`, `g_s` the gradient of step `s` and `tx` the whole chain, gossip and outer
    steps included, step `s = k m + k - 1` makes update `m`:

        u = tx(1/k sum_{j < k} g_{k m + j})

    All other steps add their gradient to a sum, `[...]` per node like the parameters and float32 at
    least, and return zeros: nothing is exchanged, and nothing in the state of `tx` moves. `tx` gets
    the number of the update, `m`, as its step: rounds, overlaps, delays, learning rates and the
    `every` of `gx.outer` count updates.

    For loaders that deliver small batches, one per step. Where one large batch is there, compute it
    in parts by `gx.accumulate_gradients`, which needs no state.

    Updates follow the number of the step: a run may start or go on at any step, and its first
    update is then that of the gradients that came. To skip gradients that are not finite, put
    `gx.apply_if_finite` inside: one of them spoils the mean, and all nodes skip that update.

    Args:
      tx: the whole chain.
      every: k, steps for one update.
      axis_name: the mapped axis of the nodes, that of `tx`.

    `update` takes `step=` as in `gx.sgp`, the number of the step, not that of the update; without
    it it counts. `gx.canonical_step` is 0 for all steps that make no update.

    Raises:
      ValueError: if `tx` is no transform, `every` is not an integer >= 1; in `init`, if `tx`
        accumulates itself or exchanges over another axis; in `update`, if the state was made with
        another `every`.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = gx.accumulate(optax.chain(optax.sgd(1.0), gx.sgp(gx.topology.ring(2))), every=2)
    >>> def two_steps(z, g):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update((step + 1) * g, state, z, step=step)
    ...         z = z + updates
    ...     return z
    >>> z, g = jnp.array([0.0, 4.0]), jnp.array([2.0, 0.0])
    >>> jax.vmap(two_steps, axis_name="nodes")(z, g).tolist()
    [0.5, 0.5]
    """
    inner = frame.require_transform(tx, "tx of accumulate")
    frame.require_axis_names("accumulate", axis_name)
    plan = frame.AccumulationPlan(require_int(every, "every of accumulate", 1))

    def init(params: optax.Params) -> frame.AccumulationState:
        register_with_flax()
        state = inner.init(params)
        _require_inner(state, axis_name)
        zero = jnp.zeros((), jnp.int32)
        # Typed as `update` returns it, so that it can be scanned over.
        return vary_where_mapped(
            frame.AccumulationState(zero, frame.zeros_like_model(params), state, plan), axis_name
        )

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, frame.AccumulationState]:
        old = frame.require_state(state, frame.AccumulationState, "accumulate")
        frame.require_plan(plan, old.plan, "accumulate")
        # Without a step the gradients in the sum are counted.
        makes_update = plan.makes_update(default_step(step, old.pending, axis_name))
        arguments = extra_args if step is None else {**extra_args, "step": plan.update_number(step)}
        total, pending = frame.add(old.total, updates), old.pending + 1

        def emit() -> tuple[optax.Updates, optax.OptState]:
            mean = jax.tree.map(lambda t: t / pending.astype(t.dtype), total)
            return inner.update(cast_like(mean, updates), old.inner, params, **arguments)

        new, inner_state = frame.update_if(makes_update, emit, old.inner, axis_name)
        total, pending = jax.tree.map(
            lambda x: jnp.where(makes_update, jnp.zeros_like(x), x), (total, pending)
        )
        return new, vary(frame.AccumulationState(pending, total, inner_state, plan), axis_name)

    return optax.GradientTransformationExtraArgs(init, update)


def _require_inner(state: Any, axis_name: str) -> None:
    """Raises `ValueError` where the chain inside counts steps itself, or over another axis."""
    if frame.find_parts(state, frame.AccumulationState, optax.MultiStepsState):
        raise ValueError(
            "tx of accumulate must not accumulate itself, got gx.accumulate or optax.MultiSteps "
            "inside: leave that out, and multiply every."
        )
    gossip = frame.gossip_state(state)
    if gossip is not None and gossip.wire.axis_name != axis_name:
        raise ValueError(
            f"axis_name of accumulate must be that of tx, {gossip.wire.axis_name!r}, got "
            f"{axis_name!r}: give both the axis of the nodes."
        )
