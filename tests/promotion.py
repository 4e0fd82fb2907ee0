"""Parts of optax that promote types implicitly, which the tests forbid: allowed here only."""

import jax
import optax


def apply_updates(params, updates):
    """`optax.apply_updates`: float32 updates of low-precision parameters."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def promoting(tx) -> optax.GradientTransformation:
    """The same transform: Adam and MultiSteps compute with their integer counts."""
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)
