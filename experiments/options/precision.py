"""The types that a model computes in and is kept in, as one option of every program."""

from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from jax.typing import DTypeLike

PRECISION_HELP = (
    "mixed_bfloat16: computation in bfloat16, parameters in float32. bfloat16: parameters too."
)
Precision = Annotated[
    Literal["float32", "mixed_bfloat16", "bfloat16"], tyro.conf.arg(help=PRECISION_HELP)
]

DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "float32": (jnp.float32, jnp.float32),
    "mixed_bfloat16": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
"""Precision -> the types of computation and of parameters."""
