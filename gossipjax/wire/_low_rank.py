"""Matrices of a low rank, which nodes average factor by factor: PowerSGD."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.topology.schedule import require_int
from gossipjax.wire._codec import fold_in, make_seed_key, require_seed


@dataclasses.dataclass(frozen=True, repr=False)
class LowRank:
    """What `low_rank` returns: the rank of the factors, and the seed of the first `Q`.

    It is not a `Codec`. A codec encodes the message of one node by itself, but here a node can
    compute its second factor only when the first one has been averaged over all nodes.

    >>> low_rank(4).rank
    4
    """

    rank: int
    seed: int

    def __repr__(self) -> str:
        return f"low_rank({self.rank}{f', seed={self.seed}' if self.seed else ''})"

    def applies_to(self, shape: Sequence[int]) -> bool:
        """Says whether the factors of a leaf of this shape have fewer values than the leaf."""
        rows, columns = matrix_shape(shape)
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def init(self, number: int, shape: Sequence[int], dtype: np.dtype) -> jax.Array:
        """Draws the first `Q`, `[columns, rank]`, of leaf `number`, the same on all nodes.

        For a leaf that is averaged in full it returns the scalar 0, so that states keep their form.
        """
        if not self.applies_to(shape):
            return jnp.zeros((), dtype)
        key = fold_in(make_seed_key(self.seed), number)
        assert key is not None
        return jax.random.normal(key, (shape[-1], self.rank), dtype)

    def find_sizes(self, part: Any, model: Any) -> tuple[float, float]:
        """Returns the sizes of the two messages for a part, as fractions of the model's size."""
        size = max(1, sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(model)))
        first = second = 0
        for shape in map(jnp.shape, jax.tree.leaves(part)):
            rows, columns = matrix_shape(shape)
            is_factored = self.applies_to(shape)
            first += self.rank * rows if is_factored else math.prod(shape)
            second += self.rank * columns if is_factored else 0
        return first / size, second / size


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape of a leaf as a matrix: all axes but the last one, and the last one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def low_rank(rank: int, *, seed: int = 0) -> LowRank:
    """PowerSGD: nodes average the factors of matrices, and never the matrices.

    Each leaf with two axes or more is a matrix `M_i` on node i, `[rows, columns]`: the columns are
    its last axis, and the rows are all other axes. With `Q` `[columns, rank]` of the last exchange,
    which is the same on all nodes:

        P = orthogonalize((1/N) sum_i M_i Q);    Q <- (1/N) sum_i M_i^T P;    M^ = P Q^T

    All nodes use `M^` as the average of the matrices. Node i keeps `M_i - M^` and adds it to its
    next matrix. The first `Q` is drawn from `seed`. As the old `Q` is used again, the exchanges are
    the steps of a power iteration, and `M^` follows the largest singular vectors of the average. A
    column of `Q` that becomes 0, or not finite, is not kept: the next exchange uses the old column.

    A leaf of fewer axes, or with `rank (rows + columns) >= rows columns`, is averaged in full. All
    leaves travel as two messages, one after another: all `M_i Q` with the leaves in full, and all
    `M_i^T P`. Layers that are stacked on a first axis are one matrix, so they share the rank.

    Use it with `gx.allreduce` and `gx.outer(error_feedback=)`, which average over all nodes at
    once. Gossip cannot: its nodes would have different `P`, and could not add up their `Q`.

    Args:
      rank: the largest rank of `M^`, from 1.
      seed: the seed of the first `Q`, from 0 to 2^32 - 1.

    Raises:
      ValueError: if `rank` or `seed` is not an integer in its range.

    References:
      Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization", NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> params = {"kernel": jnp.zeros((784, 512)), "bias": jnp.zeros(512)}
    >>> first, second = gx.wire.low_rank(4).find_sizes(params, params)
    >>> round(1 / (first + second))
    71
    """
    return LowRank(require_int(rank, "rank of low_rank", 1), require_seed(seed, "low_rank"))
