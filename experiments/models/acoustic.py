"""The acoustic model of RAND-PSGD's experiments: bidirectional LSTM layers."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

NUM_FRAMES = 21
"""Frames of a window in the paper."""
NUM_FEATURES = 260
"""Features of a frame in the paper: 40 FMLLR, 100 i-vector, 40 log-mel with delta and double
delta."""


def init_orthogonal(key: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """As flax starts recurrent kernels, from float32: JAX decomposes no narrower matrices."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


class AcousticSize(NamedTuple):
    """Size of an acoustic model without its states."""

    layers: int  # bidirectional LSTM layers
    cells: int  # in each of the two directions of a layer
    projection: int  # width of the linear layer before the softmax


ACOUSTIC_SIZES = {
    "mini": AcousticSize(layers=2, cells=64, projection=64),
    "paper": AcousticSize(layers=6, cells=512, projection=256),
}
"""Sizes by name. Parameters with 260 features: mini 273,472 and 65 for each state; paper
34,906,368 and 257 for each state."""


class AcousticLSTM(nn.Module):
    """Bidirectional LSTM layers, a linear projection, and a softmax over states for each frame.

    The paper's size has 43,130,368 parameters with 32,000 states: 172.5 MB in float32, or 164.5
    MiB, where the paper says 165 MB. (An LSTM with two bias vectors in each gate, as in cuDNN, has
    24,576 more.)

    >>> model = AcousticLSTM()
    >>> frames = jnp.zeros((1, NUM_FRAMES, NUM_FEATURES))
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), frames)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))
    43130368
    >>> jax.eval_shape(model.apply, variables, frames).shape
    (1, 21, 32000)

    References:
        Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training",
        ICASSP 2020, arXiv:2002.01119, section 5.2.
    """

    states: int = 32_000  # of a hidden Markov model, context-dependent
    size: AcousticSize = ACOUSTIC_SIZES["paper"]
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Features `[B, frames, features]` -> float32 logits `[B, frames, states]`."""
        types: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        cell = partial(nn.OptimizedLSTMCell, recurrent_kernel_init=init_orthogonal, **types)
        bidirectional = nn.remat(nn.Bidirectional) if self.remat else nn.Bidirectional
        x: Any = frames
        for layer in range(self.size.layers):
            forward = cell(self.size.cells, name=f"forward_{layer}")
            backward = cell(self.size.cells, name=f"backward_{layer}")
            # The names are the same with remat, so a checkpoint can be resumed with or without it.
            x = bidirectional(nn.RNN(forward), nn.RNN(backward))(x)
        projected = nn.Dense(self.size.projection, name="projection", **types)(x)
        return nn.Dense(self.states, name="output", **types)(projected).astype(jnp.float32)
