"""The sharpness of a model: the largest eigenvalue of the Hessian of its training loss."""

import functools
from typing import Any

import jax
from jax.experimental.sparse.linalg import lobpcg_standard
from jax.flatten_util import ravel_pytree

from experiments.training.task import Task, Variables

ITERATIONS = 20


@functools.partial(jax.jit, static_argnums=0)
def measure_sharpness(task: Task, variables: Variables, batches: Any) -> jax.Array:
    """Returns the eigenvalue by 20 products with the Hessian, combined by LOBPCG.

    The loss is the mean over the batches `[N, B, ...]` of all nodes, of one model `variables`.
    """
    flat, unravel = ravel_pytree(variables["params"])

    def loss(flat: jax.Array) -> jax.Array:
        model = variables | {"params": unravel(flat)}
        return jax.lax.map(lambda batch: task.loss(model, batch)[0], batches).mean()

    def multiply(vectors: jax.Array) -> jax.Array:  # the Hessian by `[D, K]`
        return jax.vmap(lambda v: jax.jvp(jax.grad(loss), (flat,), (v,))[1], 1, 1)(vectors)

    start = jax.random.normal(jax.random.key(0), (flat.size, 1), flat.dtype)
    return lobpcg_standard(multiply, start, ITERATIONS)[0][0]
