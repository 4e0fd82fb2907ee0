"""A multilayer perceptron."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.small_cnn import Normalization

HIDDEN = (128, 128)


class MLP(nn.Module):
    """Two hidden layers of 128 with ReLU; 118,282 parameters for 28x28 grey images, 10 classes.

    As large as `SmallCNN`, at a twentieth of its computation: for grids of many runs.

    Attributes:
        classes: number of classes.
        dtype: the type that products are computed in.
        param_dtype: the type of the parameters.
        normalization: with "batch", BatchNorm (momentum 0.9) before each ReLU; its running
            statistics are in the collection `batch_stats`, which training must update.
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "none"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` -> float32 logits `[B, classes]`."""
        dense = partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        normalize = partial(
            nn.BatchNorm, momentum=0.9, dtype=self.dtype, param_dtype=self.param_dtype
        )
        hidden = images.reshape(images.shape[0], -1)
        for width in HIDDEN:
            hidden = dense(width)(hidden)
            if self.normalization == "batch":
                hidden = normalize(not train)(hidden)
            hidden = nn.relu(hidden)
        return dense(self.classes)(hidden).astype(jnp.float32)
