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

Basis = tuple[jax.Array | None, ...]
"""`Q` of each leaf, `[columns, rank]`; None for a leaf that is averaged in full."""


def init_basis(tree: Any, form: LowRank, axis_name: str) -> Basis:
    """The first `Q` of every leaf.

    Raises:
      ValueError: inside `gx.sharded`, where each device has parts of matrices.
    """
    if specs_here() is not None:
        raise ValueError(
            f"wire must be a codec inside gx.sharded, got {form}, whose factors are of whole "
            "matrices: use gx.wire.int8(), or a model that each device has as a whole."
        )
    basis = tuple(
        form.init(i, jnp.shape(leaf), accumulation_dtype(jnp.result_type(leaf)))
        if form.applies_to(jnp.shape(leaf))
        else None
        for i, leaf in enumerate(jax.tree.leaves(tree))
    )
    return vary_where_mapped(basis, axis_name)


def mean_of_low_rank(tree: Any, basis: Basis, wire: Wire) -> tuple[Any, Any, Basis]:
    """Returns `M^` of every leaf, what it leaves out of this node's leaf, and the next `Q`.

    See `gx.wire.low_rank`. Leaves without a `Q` are averaged exactly, and nothing is left out.
    """
    leaves, structure = jax.tree.flatten(upcast(tree))
    matrices = [
        None if q is None else leaf.reshape(matrix_shape(leaf.shape))
        for leaf, q in zip(leaves, basis, strict=True)
    ]

    def for_matrices(apply: Any, *trees: Any) -> list[Any]:
        rows = zip(matrices, *trees, strict=True)
        return [None if m is None else apply(m, *others) for m, *others in rows]

    others = [x if m is None else None for x, m in zip(leaves, matrices, strict=True)]
    products = for_matrices(_multiply, basis)
    # Vectors travel in the first message.
    products, others = exact_average((products, others), wire, None)
    first = for_matrices(lambda m, p: jnp.linalg.qr(p)[0], products)
    second = for_matrices(lambda m, p: _multiply(m.T, p), first)
    second = exact_average(second, wire, None)
    approximations = for_matrices(lambda m, p, q: _multiply(p, q.T), first, second)
    means = [
        other if mean is None else mean.reshape(leaf.shape)
        for leaf, other, mean in zip(leaves, others, approximations, strict=True)
    ]
    errors = [
        jnp.zeros_like(leaf) if m is None else leaf - mean
        for leaf, m, mean in zip(leaves, matrices, means, strict=True)
    ]
    kept = for_matrices(lambda m, new, old: _keep_columns(new, old), second, basis)
    unflatten = structure.unflatten
    return unflatten(means), unflatten(errors), vary(tuple(kept), wire.axis_name)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _keep_columns(new: jax.Array, old: jax.Array) -> jax.Array:
    """The new columns, but the old one for each that is 0 or not finite.

    The gradients of a layer are 0 as long as those of the layers above are. From `Q = 0`, `P` would
    have the first unit vectors as its columns: rows of pixels that are 0 forever, say.
    """
    is_usable = jnp.isfinite(new).all(axis=0) & (new != 0).any(axis=0)
    return jnp.where(is_usable, new, old)
