"""DSGD-AC: the strength of consensus falls with the learning rate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms import frame
from gossipjax.topology.schedule import require_int


def adaptive_consensus(
    rate: optax.Schedule, start: int = 0, power: float = 3.0, minimum: float = 0.0
) -> optax.Schedule:
    """The strength of DSGD-AC: nodes agree the less, the lower the learning rate has fallen.

    With `k` the number of updates so far,

        c(k) = (1 - minimum) (rate(k) / rate(start))^power + minimum,    1 before `start`

    and never above 1. Models end apart where the rate ends at 0, around an average that is exact:
    evaluate `gx.average_model`, and not the model of a node. Statistics of normalisation layers are
    those of the nodes' models: estimate them anew at the average model.

        tx = optax.chain(
            optax.sgd(rate, momentum=0.9),
            gx.dpsgd(schedule, strength=gx.contrib.adaptive_consensus(rate, start=warm_up)),
        )

    Args:
      rate: the learning rate, a function of the update; at a constant one c is 1.
      start: the update at which the rate is at its highest, the end of its warm-up.
      power: p; the authors' code has 3, of 1 to 5 that were tried.
      minimum: c at rate 0.

    Raises:
      ValueError: if `rate` is not a function that is above 0 at `start`, or `start`, `power` or
        `minimum` is not an integer from 0, a number above 0, or one from 0 to 1.

    References:
      After "DSGD-AC", arXiv:2602.02899, and its authors' code, WangZesen/decent-sam-grc; the
      paper's text was not available. Equal to its commit 4ad794d to 6e-14 in 40 steps of recorded
      gradients, float64, but for weight decay: theirs is of the mixed model, that of a chain of x.

    >>> import optax, gossipjax as gx
    >>> strength = gx.contrib.adaptive_consensus(optax.linear_schedule(0.4, 0.0, 4), power=2)
    >>> [float(strength(k)) for k in range(5)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    start = require_int(start, "start of adaptive_consensus", 0)
    power = frame.require_number(
        power, "power of adaptive_consensus", "above 0", lambda p: 0 < p < float("inf")
    )
    minimum = frame.require_number(
        minimum, "minimum of adaptive_consensus", "from 0 to 1", lambda c: 0 <= c <= 1
    )
    if not callable(rate):
        raise ValueError(
            "rate of adaptive_consensus must be a function of the update, an optax.Schedule, got "
            f"{rate!r}: at a constant rate the strength is 1, plain dpsgd."
        )
    with jax.ensure_compile_time_eval():
        highest = float(jnp.asarray(rate(start)))
    if not 0 < highest < float("inf"):
        raise ValueError(
            f"rate of adaptive_consensus must be above 0 at its start, update {start}, got "
            f"{highest}: start is the end of the warm-up."
        )

    def strength(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        share = jnp.minimum(jnp.asarray(rate(count)) / highest, 1.0)
        return jnp.where(count < start, 1.0, (1 - minimum) * share**power + minimum)

    return strength
