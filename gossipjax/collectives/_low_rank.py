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
    """Makes the first factor `Q` of every leaf, `[columns, rank]`; 0 for a leaf without factors.

    `mean_of_low_rank` averages leaves without factors, such as vectors, in full.

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
    """Returns the node average of every leaf by factors `P Q^T`, as `gx.wire.low_rank` says.

    `basis` has the factor `Q` of every leaf, as `init_basis` makes it. For a matrix `M`, `P` is an
    orthogonal basis of the mean of `M Q`, and the next `Q` the mean of `M^T P`. The function
    returns the averages, what they leave out of this node's leaves, and the next `Q`. Leaves
    without a `Q` are averaged exactly, and nothing is left out.
    """
    leaves, structure = jax.tree.flatten(upcast(tree))
    factors = jax.tree.leaves(basis)
    sent = list(leaves)
    factored = [i for i, q in enumerate(factors) if q.ndim]
    matrices = {i: leaves[i].reshape(matrix_shape(leaves[i].shape)) for i in factored}
    for i, matrix in matrices.items():
        sent[i] = _multiply(matrix, factors[i])
    means = exact_average(sent, wire, key=None)  # of `M Q`, and of the other leaves as they are
    p = {i: jnp.linalg.qr(means[i])[0] for i in factored}
    new_q = {i: _multiply(matrix.T, p[i]) for i, matrix in matrices.items()}
    new_q = exact_average(new_q, wire, key=None)
    errors = [jnp.zeros_like(leaf) for leaf in leaves]
    for i in factored:
        means[i] = _multiply(p[i], new_q[i].T).reshape(leaves[i].shape)
        errors[i] = leaves[i] - means[i]
        factors[i] = _replace_columns(factors[i], new_q[i])
    means, errors, factors = map(structure.unflatten, (means, errors, factors))
    return means, errors, vary(factors, wire.axis_name)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _replace_columns(old: jax.Array, new: jax.Array) -> jax.Array:
    """Replaces the columns of a factor `Q`, but keeps the old one if the new is 0 or not finite.

    A gradient may be 0 at the start, and then its new `Q` is 0. With it, the next `P` would have
    the first unit vectors as columns, such as rows of pixels that stay 0 forever.
    """
    is_usable = jnp.isfinite(new).all(axis=0) & (new != 0).any(axis=0)
    return jnp.where(is_usable, new, old)
