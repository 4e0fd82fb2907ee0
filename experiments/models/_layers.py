"""The layers that the convolutional networks have in common."""

from functools import partial
from typing import Any

import flax.linen as nn
from jax.typing import DTypeLike


def make_layers(train: bool, dtype: DTypeLike, param_dtype: DTypeLike) -> dict[str, Any]:
    """Returns the constructors of a block: `conv`, convolution without bias, and `norm`, BatchNorm.

    Kernels start with He et al.'s normal initialization, variance 2 / fan-out. BatchNorm has
    momentum 0.9 and epsilon 1e-5 (Goyal et al.); it computes its statistics, and keeps the running
    ones, in float32 for any `dtype`.

    Args:
        train: whether BatchNorm uses and updates the statistics of the batch.
        dtype: the type that layers compute in.
        param_dtype: the type of their parameters.

    References:
        He et al., "Delving Deep into Rectifiers", ICCV 2015, arXiv:1502.01852.
        Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677.
    """
    conv = partial(
        nn.Conv,
        use_bias=False,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        dtype=dtype,
        param_dtype=param_dtype,
    )
    norm = partial(
        nn.BatchNorm,
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        param_dtype=param_dtype,
    )
    return {"conv": conv, "norm": norm}
