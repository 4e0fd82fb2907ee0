"""Residual networks: He et al.'s small ones for CIFAR, and those for ImageNet.

References:
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, arXiv:1512.03385.
    Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.layers import Normalization, make_layers


def subsample_and_pad(x: jax.Array, features: int, strides: int) -> jax.Array:
    """Shortcut without parameters, He et al.'s option A: `[B, H, W, C]` -> `[B, H', W', features]`.

    Every `strides`-th pixel, `H' = ceil(H / strides)`; the channels that are missing are zero.

    >>> subsample_and_pad(jnp.ones((2, 7, 7, 16)), 32, 2).shape
    (2, 4, 4, 32)
    """
    x = x[:, ::strides, ::strides]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, features - x.shape[-1])))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut: `[B, H, W, C]` -> `[B, H', W', features]`."""

    features: int
    strides: int
    conv: Callable[..., Any]
    norm: Callable[..., Any]
    projection: bool = True  # where the shape changes: option B, not `subsample_and_pad`
    last_scale: float = 0.0  # of the last BatchNorm at the start; at 0 the block is its shortcut

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The padding is explicit: "SAME" pads even sizes under a stride on one side only.
        conv = partial(self.conv, self.features, (3, 3), padding=1)
        last_scale = nn.initializers.constant(self.last_scale)
        y = nn.relu(self.norm(name="norm1")(conv(strides=self.strides, name="conv1")(x)))
        y = self.norm(scale_init=last_scale, name="norm2")(conv(name="conv2")(y))
        if x.shape != y.shape and self.projection:
            x = project(self, x, self.features)
        elif x.shape != y.shape:
            x = subsample_and_pad(x, self.features, self.strides)
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 and the shortcut: `[B, H, W, C]` -> `[B, H', W', 4 features]`.

    The 3x3 convolution has the stride (version 1.5, as Goyal et al. have it).
    """

    features: int
    strides: int
    conv: Callable[..., Any]
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv3x3 = self.conv(self.features, (3, 3), strides=self.strides, padding=1, name="conv2")
        last_scale = nn.initializers.zeros
        y = nn.relu(self.norm(name="norm1")(self.conv(self.features, (1, 1), name="conv1")(x)))
        y = nn.relu(self.norm(name="norm2")(conv3x3(y)))
        y = self.conv(4 * self.features, (1, 1), name="conv3")(y)
        y = self.norm(scale_init=last_scale, name="norm3")(y)
        if x.shape != y.shape:
            x = project(self, x, 4 * self.features)
        return nn.relu(x + y)


def project(block: BasicBlock | BottleneckBlock, x: jax.Array, features: int) -> jax.Array:
    """Shortcut of a block with parameters, option B: a 1x1 convolution with BatchNorm."""
    x = block.conv(features, (1, 1), strides=block.strides, name="shortcut_conv")(x)
    return block.norm(name="shortcut_norm")(x)


def apply_stages(
    model: Any,
    x: jax.Array,
    block: Any,
    stages: Sequence[int],
    init: Callable[..., Any],
    **attributes: Any,
) -> jax.Array:
    """The stages of blocks, the mean over the pixels, and a dense layer: float32 logits."""
    block = nn.remat(block) if model.remat else block
    for stage, num_blocks in enumerate(stages):
        for index in range(num_blocks):
            x = block(
                features=model.width * 2**stage,
                strides=2 if stage > 0 and index == 0 else 1,
                name=f"stage{stage + 1}_block{index + 1}",
                **attributes,
            )(x)
    types = {"dtype": model.dtype, "param_dtype": model.param_dtype}
    dense = nn.Dense(model.classes, kernel_init=init, name="classifier", **types)
    return dense(x.mean(axis=(1, 2))).astype(jnp.float32)


class ResNetCifar(nn.Module):
    """He et al.'s residual network for CIFAR, of depth 6n + 2, with shortcuts of option A.

    He et al. report 91.25 % (depth 20) and 93.03 % (depth 56) on CIFAR-10's test set. Convolutions
    start with He et al.'s normal initialization by fan-out, the dense layer with that by fan-in,
    scales of BatchNorm at 1.

    >>> model = ResNetCifar(depth=56)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> sum(x.size for x in jax.tree.leaves(shapes["params"]))
    853018
    """

    classes: int = 10
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "batch"
    depth: int = 20
    width: int = 16
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` of any size -> float32 logits `[B, classes]`."""
        layers = make_layers(train, self.dtype, self.param_dtype)
        x = layers["conv"](self.width, (3, 3), padding=1, name="stem_conv")(images)
        x = nn.relu(layers["norm"](name="stem_norm")(x))
        stages = ((self.depth - 2) // 6,) * 3
        init = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
        options_a = {"projection": False, "last_scale": 1.0}
        return apply_stages(self, x, BasicBlock, stages, init, **options_a, **layers)


class ResNet(nn.Module):
    """The residual network for ImageNet: ResNet-50, and others of the family by `stages`.

    | model | stages | bottleneck | parameters (3 channels, 1000 classes) |
    |---|---|---|---|
    | ResNet-18 | (2, 2, 2, 2) | False | 11,689,512 |
    | ResNet-34 | (3, 4, 6, 3) | False | 21,797,672 |
    | ResNet-50 | (3, 4, 6, 3) | True | 25,557,032 |
    | ResNet-101 | (3, 4, 23, 3) | True | 44,549,160 |

    As Goyal et al. train it (section 5.1): the last BatchNorm scale of each block starts at 0, the
    dense layer with a normal distribution of standard deviation 0.01. They report 76.4 % top-1
    accuracy after 90 epochs of ImageNet.
    """

    classes: int = 1000
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    normalization: Normalization = "batch"
    stages: tuple[int, ...] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Float images `[B, H, W, C]` of any size -> float32 logits `[B, classes]`."""
        layers = make_layers(train, self.dtype, self.param_dtype)
        x = layers["conv"](self.width, (7, 7), strides=2, padding=3, name="stem_conv")(images)
        x = nn.relu(layers["norm"](name="stem_norm")(x))
        one_pixel: Any = ((1, 1), (1, 1))  # flax's hint lacks this form
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=one_pixel)
        block = BottleneckBlock if self.bottleneck else BasicBlock
        init = nn.initializers.normal(0.01)
        return apply_stages(self, x, block, self.stages, init, **layers)
