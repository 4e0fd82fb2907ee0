"""Small classifiers: softmax regression, a multilayer perceptron, a small convolutional network.

With `normalization="batch"` they have BatchNorm (momentum 0.9), whose running statistics are in the
collection `batch_stats`, which training must update; without, a model is only its parameters.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.layers import Normalization

HIDDEN = (128, 128)  # of the perceptron


class Linear(nn.Module):
    """Softmax regression on the pixels; 7,850 parameters for 28x28 images and 10 classes.

    It compiles at once and trains fast, so it serves trials and tests of programs. BatchNorm is of
    the pixels, without scale and bias.
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


class MLP(nn.Module):
    """Two hidden layers of 128 with ReLU; 118,282 parameters for 28x28 grey images, 10 classes.

    As large as `SmallCNN`, at a twentieth of its computation: for grids of many runs.
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "none"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` -> float32 logits `[B, classes]`."""
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = images.reshape(images.shape[0], -1)
        for width in HIDDEN:
            hidden = nn.Dense(width, **types)(hidden)
            if self.normalization == "batch":
                hidden = nn.BatchNorm(not train, momentum=0.9, **types)(hidden)
            hidden = nn.relu(hidden)
        return nn.Dense(self.classes, **types)(hidden).astype(jnp.float32)


class SmallCNN(nn.Module):
    """A convolutional classifier of 28x28 grey images with 105,866 parameters (10 classes).

    Convolution 3x3x16 with stride 2, ReLU, convolution 3x3x32, ReLU, 2x2 mean pooling, dense 64,
    ReLU, dense `classes`. BatchNorm follows the convolutions.

    Trained on 4,000 MNIST digits it reaches 98.0 % on 1,000 test digits (10 epochs, batch size 32,
    Nesterov momentum 0.9, learning rate 0.05 with cosine decay).
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "none"

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, 28, 28, 1]` -> float32 logits `[B, classes]`."""
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}

        def norm(x: jax.Array) -> jax.Array:
            if self.normalization == "none":
                return x
            return nn.BatchNorm(not train, momentum=0.9, **types)(x)

        conv = partial(nn.Conv, **types)
        # Measured on CPU: a stride here instead of pooling saves a third of a step and costs no
        # accuracy; a stride in the second convolution too halves the rest but costs 0.8 points.
        hidden = nn.relu(norm(conv(16, (3, 3), strides=2)(images)))
        hidden = nn.relu(norm(conv(32, (3, 3))(hidden)))
        hidden = nn.avg_pool(hidden, (2, 2), strides=(2, 2))
        hidden = hidden.reshape(hidden.shape[0], -1)
        hidden = nn.relu(nn.Dense(64, **types)(hidden))
        return nn.Dense(self.classes, **types)(hidden).astype(jnp.float32)
