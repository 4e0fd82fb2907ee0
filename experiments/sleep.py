"""Simulated computation: a sleep, as of a device that does not share this machine's cores."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def compute_one(seconds: ArrayLike) -> jax.Array:
    """Returns 1 after these seconds, as a part of a compiled program.

    What the program multiplies by it is not there before; the sum of other parts, such as an
    exchange, is computed meanwhile.
    """
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(_sleep, shape, jnp.asarray(seconds, jnp.float32))


def _sleep(seconds: ArrayLike) -> np.ndarray:
    time.sleep(float(np.asarray(seconds)))
    return np.float32(1)  # pyright: ignore[reportReturnType]
