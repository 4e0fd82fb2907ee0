"""PRNG keys in a state: which arrays they are, and keys of new nodes made from one."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.checkpoint._leaves import is_key

# In attributes and keys of a path, such as `rng_key`, `dropout_key`, `rngs`.
KEY_NAME = re.compile(r"(^|_)(p?rngs?|keys?)(_|\d*$)", re.IGNORECASE)
IMPLEMENTATIONS = {2: "threefry2x32", 4: "rbg"}  # by the length of a raw key


def holds_keys(path: Any, leaf: Any, leading: int) -> bool:
    """Whether a leaf holds PRNG keys: typed ones, or raw ones as their name and form say.

    Raw keys are uint32 arrays whose last axis has the length of a key, 2 or 4, below an attribute
    or dict key that is called `key` or `rng`.

    Args:
      path: of the leaf, as JAX has it.
      leaf: an array.
      leading: the number of leading axes that are not of the key.
    """
    if is_key(leaf):
        return True
    has_form = leaf.ndim > leading and leaf.shape[-1] in IMPLEMENTATIONS
    return has_form and leaf.dtype == np.uint32 and any(map(_is_key_name, path))


def _is_key_name(entry: Any) -> bool:
    name = getattr(entry, "name", getattr(entry, "key", None))
    return isinstance(name, str) and KEY_NAME.search(name) is not None


def fold_in_nodes(keys: Any, nodes: int) -> Any:
    """Returns `jax.random.fold_in(key, node)` of each key `[...]` for each node, `[M, ...]`."""
    if not is_key(keys):
        typed = jax.random.wrap_key_data(keys, impl=IMPLEMENTATIONS[keys.shape[-1]])
        return np.asarray(jax.random.key_data(fold_in_nodes(typed, nodes)))
    flat = keys.reshape(-1)

    def fold_in(node: jax.Array) -> jax.Array:
        return jax.lax.map(lambda key: jax.random.fold_in(key, node), flat)

    return jax.lax.map(fold_in, jnp.arange(nodes)).reshape(nodes, *keys.shape)
