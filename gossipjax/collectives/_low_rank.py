"""The node average of matrices by factors of a low rank: PowerSGD."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gossipjax.collectives._averages import exact_average
from gossipjax.collectives._buffers import accumulation_dtype, upcast
from gossipjax.collectives._exchange import vary, vary_where_mapped
from gossipjax.sharding import specs_here
from gossipjax.wire import LowRank, Wire, matrix_shape


def init_basis(tree: Any, form: LowRank, axis_name: str) -> Any:
    """The first `Q` of every leaf, `[columns, rank]`; a 0 for a leaf that is averaged in full.

    Raises:
      ValueError: inside `gx.sharded`, where each device has parts of matrices.
    """
    if specs_here() is not None:
        raise ValueError(
            f"wire must be a codec inside gx.sharded, got {form}, whose factors are of whole "
            "matrices: use gx.wire.int8(), or a model that each device has as a whole."
        )
    leaves, structure = jax.tree.flatten(tree)
    dtypes = [accumulation_dtype(jnp.result_type(leaf)) for leaf in leaves]
    shapes = enumerate(map(jnp.shape, leaves))
    basis = [form.init(i, shape, dtype) for (i, shape), dtype in zip(shapes, dtypes, strict=True)]
    return vary_where_mapped(structure.unflatten(basis), axis_name)


def mean_of_low_rank(tree: Any, basis: Any, wire: Wire) -> tuple[Any, Any, Any]:
    """Returns `M^` of every leaf, what it leaves out of this node's leaf, and the next `Q`.

    See `gx.wire.low_rank`. Leaves without a `Q` are averaged exactly, and nothing is left out.
    """
    leaves, structure = jax.tree.flatten(upcast(tree))
    kept = jax.tree.leaves(basis)
    means = list(leaves)
    factored = [i for i, q in enumerate(kept) if q.ndim]
    matrices = {i: leaves[i].reshape(matrix_shape(leaves[i].shape)) for i in factored}
    for i, matrix in matrices.items():
        means[i] = _multiply(matrix, kept[i])
    means = exact_average(means, wire, None)  # of the vectors, too: one message
    first = {i: jnp.linalg.qr(means[i])[0] for i in factored}
    second = {i: _multiply(matrix.T, first[i]) for i, matrix in matrices.items()}
    second = exact_average(second, wire, None)
    errors = [jnp.zeros_like(leaf) for leaf in leaves]
    for i in factored:
        means[i] = _multiply(first[i], second[i].T).reshape(leaves[i].shape)
        errors[i] = leaves[i] - means[i]
        kept[i] = _keep_columns(second[i], kept[i])
    means, errors, kept = map(structure.unflatten, (means, errors, kept))
    return means, errors, vary(kept, wire.axis_name)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _keep_columns(new: jax.Array, old: jax.Array) -> jax.Array:
    """The new columns, but the old one for each that is 0 or not finite.

    The gradients of a layer are 0 as long as those of the layers above are. From `Q = 0`, `P` would
    have the first unit vectors as its columns: rows of pixels that are 0 forever, say.
    """
    is_usable = jnp.isfinite(new).all(axis=0) & (new != 0).any(axis=0)
    return jnp.where(is_usable, new, old)
