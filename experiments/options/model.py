"""The options of every program's model: its types, and memory against time."""

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

REMAT_HELP = (
    "Compute activations again in the backward pass instead of keeping them: a deep model needs "
    "less memory and more time."
)
Remat = Annotated[bool, tyro.conf.arg(help=REMAT_HELP)]

DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "float32": (jnp.float32, jnp.float32),
    "mixed_bfloat16": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
"""Precision -> the types of computation and of parameters."""
