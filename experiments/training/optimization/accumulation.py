"""Large batches in parts: gradients are accumulated over several steps for one update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def accumulate_gradients(
    inner: optax.GradientTransformation, steps: int
) -> optax.GradientTransformation:
    """Returns `inner`, which is given the mean of `steps` gradients at every `steps`-th step.

    At the other steps the update is 0, and the state of `inner` stays as it is: its counts are of
    updates. `inner` may exchange (`gx.allreduce`): over a mesh it runs at the last of `steps` only,
    which comes at the same time on all nodes. (`optax.MultiSteps` around `inner` would run it at
    every step, and throw most results away.) Under `vmap` both branches are computed.

    Args:
        inner: from gradients to updates.
        steps: 1 gives `inner` back.

    >>> tx = accumulate_gradients(optax.sgd(1.0), 2)
    >>> accumulate_gradients(tx, 1) is tx
    True
    """
    if steps == 1:
        return inner

    def is_last(step: jax.typing.ArrayLike, **_: Any) -> jax.Array:
        return jnp.asarray(step) % steps == steps - 1

    mean = optax.MultiSteps(optax.identity(), steps).gradient_transformation()
    return optax.chain(mean, optax.conditionally_mask(inner, is_last))
