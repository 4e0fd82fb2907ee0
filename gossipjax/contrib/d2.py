"""D2, also known as exact diffusion: D-PSGD that corrects for uneven data."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import StepLike, require_doubly_stochastic
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike

MIN_EIGENVALUE = -1 / 3
TOLERANCE = 1e-6  # of an eigenvalue, and of the two halves of a symmetric matrix


def d2(
    schedule: Schedule,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D2: D-PSGD without the error that uneven data leave. Goes *last* in a chain.

    With `x` the parameters, `[...]` per node, `u` the update from the chain before it, `W` the
    mixing matrix of a static schedule and `c` a correction, 0 at the start:

        x' = W (x + u + c);    c <- x' - x - u;    x <- x'

    which is `x_{k+1} = W (2 x_k - x_{k-1} + u_k - u_{k-1})`, at the traffic of `dpsgd`. It reaches
    the optimum of the mean loss at a constant rate, up to float32 rounding, some 1e-5 of the model
    (`gradient_tracking`: 1e-6).

    It diverges unless the smallest eigenvalue of `W` is above -1/3, which rules out `ring(n)` of an
    even n above 2. Of any `W`, `(W + I) / 2` will do: exact diffusion,

        lazy = gx.topology.from_matrices((schedule.matrices()[0] + np.eye(n)) / 2)

    The state is a `GossipState` with `extra["correction"]`, like the parameters and float32 at
    least; it restarts from 0 on a change of nodes.

    Args:
      schedule: one round, at every step, symmetric, doubly stochastic, with eigenvalues above -1/3.
      axis_name, local_axis_name, wire: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: if the schedule is not as above; else as `gx.sgp`.

    References:
      Tang et al., "D2: Decentralized Training over Decentralized Data", ICML 2018,
      arXiv:1803.07068, algorithm 1 and assumption 1.
      Yuan et al., "Exact Diffusion for Distributed Optimization and Learning", IEEE Transactions on
      Signal Processing 2019, arXiv:1702.05122.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(optax.sgd(0.2), gx.contrib.d2(gx.topology.ring(3)))
    >>> nodes = gx.Nodes(3)
    >>> train_step = gx.TrainStep(lambda x, target, a: (a * (x - target), ()), tx, nodes=nodes)
    >>> x, state = nodes.init(tx, jnp.zeros(()))
    >>> target, a = jnp.array([0.0, 1.0, 3.0]), jnp.array([1.0, 1.0, 2.0])
    >>> for step in range(200):
    ...     x, state, _ = train_step(step, x, state, target, a)
    >>> bool(abs(x - 7 / 4).max() < 1e-5)  # sum(a * target) / sum(a), on every node
    True
    """
    require_doubly_stochastic(schedule, "d2")
    _require_static_and_positive(schedule)
    route = frame.make_route("d2", axis_name, local_axis_name, wire)
    plan = frame.ExchangePlan(schedule, wire=route, moves_by_zeros=True)
    init = partial(frame.init_state, plan=plan, zeros={"correction": "restart"})
    # The exact average takes nothing of `c`, but for the rounding of its mean, which would add up.
    is_exact = schedule.round_at(0).is_uniform

    def combine(x: Any, updates: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        y = frame.add(x, updates)
        corrected = y if is_exact else frame.add(y, state.kept("correction"))
        x, _ = frame.mix_once(corrected, None, state, step)
        return frame.Combined(x, state.keep(correction=frame.subtract(x, y)))

    return frame.gossip_transform("d2", plan, init, combine)


def _require_static_and_positive(schedule: Schedule) -> None:
    """Raises `ValueError` unless the mixing matrix is one, symmetric, with eigenvalues > -1/3."""
    if len(schedule.rounds) > 1:
        raise ValueError(
            f"the schedule of d2 must be static, one round at every step, got "
            f"{len(schedule.rounds)} different rounds. Use gradient_tracking, which takes any."
        )
    W = schedule.round_at(0).matrix
    asymmetry = abs(W - W.T)
    if asymmetry.max() > TOLERANCE:
        i, j = divmod(int(asymmetry.argmax()), len(W))
        raise ValueError(
            f"the mixing matrix of d2 must be symmetric, got P[{i}, {j}] = {W[i, j]:.6g} and "
            f"P[{j}, {i}] = {W[j, i]:.6g}. Use gradient_tracking, which takes any, or "
            "from_graph(..., weights='metropolis')."
        )
    smallest = np.linalg.eigvalsh(W).min()
    if smallest <= MIN_EIGENVALUE + TOLERANCE:
        raise ValueError(
            f"the smallest eigenvalue of the mixing matrix W of d2 must be above -1/3, or it "
            f"diverges, got {smallest:.6g}. Use (W + I) / 2: "
            "gx.topology.from_matrices((schedule.matrices()[0] + np.eye(n)) / 2)."
        )
