"""The sharpness of a model: the largest eigenvalue of the Hessian of its training loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from experiments.training.task import Task, Variables

ITERATIONS = 20
TINY = 1e-30  # of a norm


@functools.partial(jax.jit, static_argnums=0)
def measure_sharpness(task: Task, variables: Variables, batches: Any) -> jax.Array:
    """Returns the eigenvalue by 20 steps of Lanczos, with all vectors kept orthogonal.

    The loss is the mean over the batches `[N, B, ...]` of all nodes, of one model `variables`.
    """
    flat, unravel = ravel_pytree(variables["params"])

    def loss(flat: jax.Array) -> jax.Array:
        model = variables | {"params": unravel(flat)}
        return jax.lax.map(lambda batch: task.loss(model, batch)[0], batches).mean()

    def multiply(vector: jax.Array) -> jax.Array:  # by the Hessian
        return jax.jvp(jax.grad(loss), (flat,), (vector,))[1]

    def extend(carry: Any, row: jax.Array) -> tuple[Any, jax.Array]:
        basis, vector = carry
        basis = basis.at[row].set(vector / jnp.maximum(jnp.linalg.norm(vector), TINY))
        product = multiply(basis[row])
        rest = product
        for _ in range(2):  # once more, for what rounding has left
            rest = rest - (basis @ rest) @ basis
        return (basis, rest), product

    start = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
    basis = jnp.zeros((min(ITERATIONS, flat.size), flat.size), flat.dtype)
    (basis, _), products = jax.lax.scan(extend, (basis, start), jnp.arange(len(basis)))
    return jnp.linalg.eigvalsh(basis @ products.T)[-1]
