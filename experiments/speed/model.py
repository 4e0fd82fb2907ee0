"""The training step that the network measurement times: an MLP, and what one iteration runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import gossipjax as gx
from gossipjax.spmd import donated_argnums

LAYERS = 8

Step = Callable[[int, Any, Any, Any], tuple[Any, Any]]
"""`step(static number, params, state, batch) -> (params, state)`, node-stacked."""


def layer_width(megabytes: float) -> int:
    """The width of an MLP of 8 equal layers with so many 1e6 bytes of float32 parameters.

    >>> width = layer_width(20)
    >>> width, 4 * LAYERS * (width * width + width) / 1e6
    (790, 19.99648)
    """
    return max(1, int((1 + megabytes * 1e6 / LAYERS) ** 0.5 / 2 - 0.5))


def init_params(width: int) -> list[dict[str, jax.Array]]:
    """The same start on every node."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    scale = (2 / width) ** 0.5
    return [
        {"w": scale * jax.random.normal(key, (width, width)), "b": jnp.zeros(width)} for key in keys
    ]


def loss(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean squared error of the MLP."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def gradients(params: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[()]]:
    """Of the loss, as `gx.TrainStep` wants them."""
    return jax.grad(loss)(params, batch), ()


def make_step(tx: optax.GradientTransformationExtraArgs, mesh: Mesh) -> Step:
    """One iteration as one program: the computation by itself, with the optimizer alone."""

    def whole(number: int, params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params, step=number)
        return optax.apply_updates(params, updates), state

    donated = donated_argnums(1, 2)  # as gx.TrainStep does
    return gx.spmd(whole, mesh=mesh, static_argnums=0, donate_argnums=donated)
