"""VGG-11 for CIFAR.

References:
    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
        ICLR 2015, arXiv:1409.1556.
    Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS 2021,
        arXiv:2110.04175.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.layers import Normalization, make_layers

STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))
"""Channels of the convolutions in units of `width`; a pooling follows each stage."""


class Stage(nn.Module):
    """Convolutions 3x3 with ReLU, then maximum 2x2: `[B, H, W, C]` -> `[B, H', W', features[-1]]`.

    `H' = ceil(H / 2)`: a last row or column that has no partner is pooled alone.
    """

    features: tuple[int, ...]
    conv: Callable[..., Any]
    norm: Callable[..., Any] | None = None  # before each ReLU

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for index, features in enumerate(self.features, start=1):
            x = self.conv(features, (3, 3), use_bias=True, name=f"conv{index}")(x)
            if self.norm is not None:
                x = self.norm(name=f"norm{index}")(x)
            x = nn.relu(x)
        return nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")


class VGG11(nn.Module):
    """RelaySGD's VGG-11 for CIFAR: configuration A with a small classifier, no BatchNorm.

    9,750,922 parameters with 3 channels and 10 classes; 9,756,426 with BatchNorm after each
    convolution. Images of more than 32x32 are averaged over the pixels that are left. Vogels et al.
    report 90.2 % on CIFAR-10's test set with momentum and AllReduce over 16 workers.

    As in their program, convolutions start with He et al.'s normal initialization by fan-out and
    dense kernels with PyTorch's default, uniform in +- 1/sqrt(fan-in); dense biases start at 0.
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "none"
    width: int = 64  # channels of the first convolution
    dropout: float = 0.5
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` of any size -> float32 logits `[B, classes]`."""
        if train and self.dropout > 0 and not self.has_rng("dropout"):
            raise ValueError(
                "rngs must have a key for dropout in training, got none. Apply the model with "
                "rngs={'dropout': key}, or build it with dropout=0."
            )
        layers = make_layers(train, self.dtype, self.param_dtype)
        norm = layers["norm"] if self.normalization == "batch" else None
        stage = nn.remat(Stage) if self.remat else Stage
        dense = partial(
            nn.Dense,
            kernel_init=nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        x = images
        for number, multiples in enumerate(STAGES, start=1):
            features = tuple(self.width * multiple for multiple in multiples)
            x = stage(features, layers["conv"], norm, name=f"stage{number}")(x)
        x = x.mean(axis=(1, 2))
        for name in ("dense1", "dense2"):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.relu(dense(8 * self.width, name=name)(x))
        return dense(self.classes, name="classifier")(x).astype(jnp.float32)
