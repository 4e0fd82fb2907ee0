"""Softmax regression."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.small_cnn import Normalization


class Linear(nn.Module):
    """Softmax regression on the pixels; 7,850 parameters for 28x28 images and 10 classes.

    It compiles at once and trains fast, so it serves trials and tests of programs.

    Attributes:
        classes: number of classes.
        dtype: the type that the product is computed in.
        param_dtype: the type of the parameters.
        normalization: with "batch", BatchNorm (momentum 0.9) of the pixels, without scale and bias;
            its running statistics are in the collection `batch_stats`, which training must update.
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "none"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` -> float32 logits `[B, classes]`."""
        if self.normalization == "batch":
            images = nn.BatchNorm(not train, momentum=0.9, use_scale=False, use_bias=False)(images)
        dense = nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.param_dtype)
        return dense(images.reshape(images.shape[0], -1)).astype(jnp.float32)
