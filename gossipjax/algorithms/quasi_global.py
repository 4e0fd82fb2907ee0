"""Quasi-global momentum: the momentum of SGD, or of Adam, follows the model after mixing."""

from __future__ import annotations

import contextlib
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import StepLike, require_doubly_stochastic
from gossipjax.exchanges.model import add_scaled, interpolate, scale, subtract
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import GossipState, init_state, mix_once
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import growth_of_differences
from gossipjax.wire import Wire, WireLike

COLUMNS = 4  # random starts that are followed at once
GROWTH_TOLERANCE = 1e-4  # of the growth: a factor of 1.2 in 1,500 steps


def quasi_global(
    schedule: Schedule,
    rate: optax.ScalarOrSchedule,
    *,
    momentum: float | jax.Array = 0.9,
    mu: float | jax.Array = 0.9,
    nesterov: bool = False,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """QG-DSGDm: the momentum follows the mixed models. Put it *last*, instead of SGD.

    The chain hands on gradients `g`, for example after clipping or weight decay. If `x` are the
    parameters, `[...]` per node, and `m` is their quasi-global momentum, 0 at the start:

        h = momentum m + g;    d = h, or g + momentum h (nesterov)
        x' = P (x - rate d);   m <- mu m + (1 - mu) (x - x') / rate;    x <- x'

    On uneven data the momentum of local gradients drives the nodes apart; the momentum of the mixed
    models does not. If the models stand still, `m` is 0, so the models end at the same point as
    with D-PSGD without momentum. A step at rate 0, with which a warm-up may begin, leaves `m` as it
    is. The state keeps `m` as `extra["momentum"]`. A new number of nodes starts with the mean `m`.

    Args:
      schedule: a doubly stochastic schedule.
      rate: the learning rate: a number, a function of the number of updates so far, or a traced
        scalar, which `optax.inject_hyperparams` makes from either.
      momentum: the factor of `m` in a step.
      mu: the share of `m` that is kept; the paper uses the value of `momentum`.
      nesterov: whether to use Nesterov's momentum (QG-DSGDm-N).
      axis_name, local_axis_name, wire: as in `gx.sgp`; `update` takes the same `step=`. With
        `wire`, nodes keep a consensus distance, and `m` contains it, divided by the rate.

    Raises:
      ValueError: if nodes that differ would drift apart without any gradient, as on a directed
        ring, or if `gx.dpsgd` would raise it.

    References:
      Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep
      Learning on Heterogeneous Data", ICML 2021, arXiv:2102.04761, algorithm 1.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.quasi_global(gx.topology.ring(2), rate=0.5)
    >>> def update(x, g):
    ...     updates, state = tx.update(g, tx.init(x), x, step=0)
    ...     return x + updates, state.extra["momentum"].value
    >>> x, m = jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([1.0, 1.0]))
    >>> x.tolist(), [round(float(v), 3) for v in m]  # m = 0.1 (x - x') / 0.5
    ([0.5, 0.5], [-0.1, 0.3])
    """
    require_doubly_stochastic(schedule, "quasi_global")
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(schedule, wire=route, takes_gradients=True, moves_by_zeros=True)
    with contextlib.suppress(jax.errors.ConcretizationTypeError):  # numbers may be traced
        # Without a gradient, `d = momentum m`, or `momentum^2 m` with Nesterov's momentum.
        factor = float(momentum) ** (2 if nesterov else 1)
        growth = _find_growth(schedule, factor, float(mu))
        if growth > 1 + GROWTH_TOLERANCE:
            raise ValueError(
                "quasi_global must be stable, so that nodes come to agree where no gradient drives "
                f"them apart, got a spectral radius of {growth:.4f} per round for their "
                "differences: take gx.topology.random_pairs or ring, or a smaller rate or momentum."
            )

    init = partial(init_state, plan=plan, zeros={"momentum": "average"})

    def combine(x: Any, gradients: Any, state: GossipState, step: StepLike) -> Combined:
        """Computes `x' = P (x - eta d)`; then `m <- mu m + (1 - mu) (x - x') / eta`.

        `m` is the momentum that the state keeps, and `momentum` its factor in the direction `d`.
        """
        m = state.kept("momentum")
        eta = jnp.asarray(rate(state.count) if callable(rate) else rate)
        direction = add_scaled(gradients, momentum, m)
        if nesterov:
            direction = add_scaled(gradients, momentum, direction)
        local_x = subtract(x, scale(direction, eta))
        new_x, _ = mix_once(local_x, None, state, step)  # without a push-sum weight
        # At rate 0, with which a warm-up may begin, the speed is not known, and `m` stays.
        is_idle = eta == 0
        divisor = jnp.where(is_idle, jnp.ones_like(eta), eta)
        speed = scale(subtract(x, new_x), 1 / divisor)
        new_m = interpolate(m, speed, keep=mu)
        new_m = jax.tree.map(partial(jnp.where, is_idle), m, new_m)
        return Combined(new_x, state.keep(momentum=new_m))

    return gossip_transform("quasi_global", plan, init, combine)


@functools.lru_cache(256)
def _find_growth(schedule: Schedule, pull: float, mu: float) -> float:
    """Simulates how many times as large nodes' differences are after a round, without gradients.

    A step then goes along `pull m` of the momentum m. With `n = rate m`, the rate drops out:
    `x' = P (x - pull n)`, `n' = mu n + (1 - mu) (x - x')`.
    """

    def move(mix_nodes: Any, values: np.ndarray, step: int) -> np.ndarray:
        """Makes one step of all nodes, whose `x` and `n` are the halves of `values`, `[N, ...]`."""
        del step
        x, n = np.split(values, 2, axis=1)
        mixed = mix_nodes(x - pull * n)
        return np.hstack([mixed, mu * n + (1 - mu) * (x - mixed)])

    start = np.random.default_rng(0).normal(size=(schedule.size, 2 * COLUMNS))
    return growth_of_differences(schedule, move, start)
