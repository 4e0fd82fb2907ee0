"""DSGD-AC: the strength of consensus falls with the learning rate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax


def adaptive_consensus(
    rate: optax.Schedule, *, start: int = 0, power: float = 3.0, minimum: float = 0.0
) -> optax.Schedule:
    """Returns the strength of DSGD-AC: the lower the learning rate, the less nodes agree.

    Before update `start` the strength is 1. Later, after `k` updates, the strength is `c(k)`, but
    at most 1:

        c(k) = (1 - minimum) (rate(k) / rate(start))^power + minimum

    Pass the result as the `strength` of `gx.dpsgd`. If the rate ends at 0, models stay apart from
    each other, but their average is exact. Evaluate the average model (`gx.average_model`).

    Args:
      rate: the learning rate, a function of the number of updates so far.
      start: the update at which the rate is highest: the end of the warm-up.
      power: the exponent; the authors' code uses 3.
      minimum: c at rate 0.

    Raises:
      ValueError: if the rate is not above 0 at `start`.

    References:
      After "DSGD-AC", arXiv:2602.02899, and its authors' code, WangZesen/decent-sam-grc.

    >>> import optax, gossipjax as gx
    >>> rate = optax.linear_schedule(0.4, 0.0, 4)
    >>> strength = gx.contrib.adaptive_consensus(rate, power=2)
    >>> [float(strength(k)) for k in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    highest = float(jnp.asarray(rate(start)))
    if not highest > 0:
        raise ValueError(
            f"rate of adaptive_consensus must be above 0 at its start, update {start}, got "
            f"{highest}: start is the end of the warm-up."
        )

    def strength(count: jax.typing.ArrayLike) -> jax.Array:
        """Returns `(1 - minimum) (rate / highest)^power + minimum`; 1 in a warm-up."""
        count = jnp.asarray(count)
        relative_rate = jnp.minimum(jnp.asarray(rate(count)) / highest, 1.0)
        return jnp.where(count < start, 1.0, (1 - minimum) * relative_rate**power + minimum)

    return strength
