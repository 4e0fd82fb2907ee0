"""Simulates a computation by a sleep, as if a device did it without this machine's cores."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


def compute_one(seconds: ArrayLike) -> jax.Array:
    """Returns 1 after this many seconds, inside a compiled program.

    A product with this 1 is computed after the sleep. Parts of the program that do not need this 1,
    for example an exchange, run during the sleep.
    """
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(_sleep, shape, jnp.asarray(seconds, jnp.float32))


def _sleep(seconds: ArrayLike) -> np.ndarray:
    time.sleep(float(np.asarray(seconds)))
    return np.float32(1)  # pyright: ignore[reportReturnType]
