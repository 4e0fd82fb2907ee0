"""Training on a handful of examples, for the tests of the models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def overfit(
    compute_loss: Callable[[Any, jax.Array], jax.Array],
    variables: Any,
    steps: int,
    learning_rate: float,
) -> tuple[Any, jax.Array]:
    """Trains with Adam; returns the model and the losses `[steps]`.

    `compute_loss(variables, step)` is given the step as a seed.
    """
    optimizer = optax.adam(learning_rate)

    def run_step(carry: Any, step: jax.Array) -> tuple[Any, jax.Array]:
        variables, state = carry
        loss, gradients = jax.value_and_grad(compute_loss)(variables, step)
        updates, state = optimizer.update(gradients, state)
        return (optax.apply_updates(variables, updates), state), loss

    @jax.jit
    def run(variables: Any) -> tuple[Any, jax.Array]:
        carry = (variables, optimizer.init(variables))
        (variables, _), losses = jax.lax.scan(run_step, carry, jnp.arange(steps))
        return variables, losses

    return run(variables)
