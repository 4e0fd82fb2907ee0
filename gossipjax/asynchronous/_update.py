"""The compiled programs of a node: its update, and the halves of what it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.asynchronous.protocol import Mass
from gossipjax.collectives import Layout, cast_like

Gradients = Callable[..., tuple[Any, Any]]
MIN_COUNT = 0.5  # below it, updates are smaller: see `update_scale`


def unpack(layout: Layout, like: Any, x: Any, w: Any) -> Any:
    """Returns the model `x / w`."""
    return cast_like(layout.unpack([b / jnp.asarray(w, b.dtype) for b in x]), like)


def update_scale(mass: Mass) -> Any:
    """The factor of updates: weight over count, which is 1 unless nodes died or joined."""
    return mass.w / max(mass.count, MIN_COUNT)


def make_update(
    tx: optax.GradientTransformationExtraArgs, layout: Layout, like: Any, gradients: Gradients
) -> Any:
    """Returns `(x, opt_state, w, scale, *inputs) -> (change of x, opt_state, aux)`, compiled."""

    def update(x: Any, opt_state: Any, w: Any, scale: Any, *inputs: Any) -> Any:
        params = unpack(layout, like, x, w)
        grads, aux = gradients(params, *inputs)
        updates, opt_state = tx.update(grads, opt_state, params)
        change = tuple(jnp.asarray(scale, u.dtype) * u for u in layout.pack(updates))
        return change, opt_state, aux

    return jax.jit(update, donate_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def split(x: tuple[Any, ...], wires: tuple[np.dtype, ...]) -> tuple[Any, Any]:
    """Halves buffers: returns what is kept, and the other half as its type of the wire has it."""
    shared = tuple((a / 2).astype(wire).astype(a.dtype) for a, wire in zip(x, wires, strict=True))
    return tuple(a - b for a, b in zip(x, shared, strict=True)), shared
