"""Which parameters weight decay applies to."""

from typing import Any

from jax.tree_util import KeyPath, keystr, tree_map_with_path

NOT_DECAYED = frozenset({"bias", "scale"})
"""flax's names of biases and of the scales of normalization layers."""


def decay_mask(params: Any) -> Any:
    """Returns the tree of `params` with True where weight decay applies: not to biases and scales.

    Goyal et al. (section 5.1) do not decay BatchNorm's scales and biases; decay of the other biases
    is left out too, as is usual. Names decide, not the number of dimensions, so that the mask is
    the same for one node, `[...]`, and for all, `[N, ...]`.

    Args:
        params: pytree of parameters; the last key of a leaf's path is its name.

    Example:
        A function of the parameters is what optax takes as a mask.

        >>> import jax.numpy as jnp
        >>> import optax
        >>> decay_mask({"Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}})
        {'Dense_0': {'bias': False, 'kernel': True}}
        >>> tx = optax.chain(optax.add_decayed_weights(1e-4, mask=decay_mask), optax.sgd(0.1))

    References:
        Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677.
    """

    def is_decayed(path: KeyPath, _: Any) -> bool:
        return not path or keystr(path[-1:], simple=True) not in NOT_DECAYED

    return tree_map_with_path(is_decayed, params)
