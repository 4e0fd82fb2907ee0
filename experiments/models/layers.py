"""What models have in common: convolutional layers, the mask of weight decay, dropout's seeds."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np
from jax.tree_util import KeyPath, keystr, tree_map_with_path
from jax.typing import DTypeLike

Normalization = Literal["none", "batch", "group"]

NOT_DECAYED = frozenset({"bias", "scale"})
"""flax's names of biases and of the scales of normalization layers."""


def make_layers(train: bool, dtype: DTypeLike, param_dtype: DTypeLike) -> dict[str, Any]:
    """Returns the constructors of a block: `conv`, convolution without bias, and `norm`, BatchNorm.

    Kernels start with He et al.'s normal initialization (2015, arXiv:1502.01852), variance
    2 / fan-out. BatchNorm has momentum 0.9 and epsilon 1e-5 (Goyal et al., arXiv:1706.02677); with
    `train` it uses and updates the statistics of the batch, in float32 for any `dtype`.
    """
    types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    conv = partial(nn.Conv, use_bias=False, kernel_init=init, **types)
    norm = partial(nn.BatchNorm, not train, momentum=0.9, epsilon=1e-5, **types)
    return {"conv": conv, "norm": norm}


def decay_mask(params: Any) -> Any:
    """Returns the tree of `params` with True where weight decay applies: not to biases and scales.

    Goyal et al. (section 5.1) do not decay BatchNorm's; the other biases are left out, too.
    Names decide, so that the mask is the same for one node, `[...]`, and for all, `[N, ...]`.

    >>> import jax.numpy as jnp
    >>> decay_mask({"Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}})
    {'Dense_0': {'bias': False, 'kernel': True}}
    """

    def is_decayed(path: KeyPath, _: Any) -> bool:
        return not path or keystr(path[-1:], simple=True) not in NOT_DECAYED

    return tree_map_with_path(is_decayed, params)


def make_dropout_rngs(seeds: jax.Array) -> dict[str, jax.Array]:
    """The `rngs` of `apply` for a training batch that has a seed for each example, `[B]` integers.

    A loss is given a batch and no random key, so its randomness is part of the data. The first
    example makes the key, so the parts of a batch that is divided over devices differ, too.
    """
    return {"dropout": jax.random.key(seeds[0])}


def draw_dropout_seeds(seed: int, step: int, nodes: Sequence[int], size: int) -> np.ndarray:
    """Draws a seed for each of B examples of some nodes, uint32 `[len(nodes), B]`.

    They depend on the step and the node, so a run that is resumed drops the same units.
    """
    rngs = (np.random.default_rng((seed, step, node)) for node in nodes)
    return np.stack([rng.integers(2**32, size=size, dtype=np.uint32) for rng in rngs])
