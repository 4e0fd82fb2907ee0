"""D2, also known as exact diffusion: D-PSGD that corrects for uneven data."""

from typing import Any

import numpy as np
import optax

from gossipjax.algorithms.gossip import Node, gossip
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.topology.schedule import Schedule

TOLERANCE = 1e-6  # of an eigenvalue, and of the two halves of a symmetric matrix


def d2(schedule: Schedule, *, axis_name: str = "nodes") -> optax.GradientTransformationExtraArgs:
    """D2: D-PSGD without the error that uneven data leave. Put it *last* in a chain.

    If `x` are the parameters, `u` is the update from the chain, `W` is the mixing matrix of a
    static schedule, and `c` is a correction, 0 at the start, then

        x' = W (x + u + c);    c <- x' - x - u;    x <- x'

    which is `x_{k+1} = W (2 x_k - x_{k-1} + u_k - u_{k-1})`. D2 diverges unless the smallest
    eigenvalue of `W` is above -1/3; so you cannot use `ring(n)` with an even n above 2. With
    `(W + I) / 2` instead of `W` you get exact diffusion, which works for any `W`.

    Args:
      schedule: one round, symmetric, doubly stochastic, with eigenvalues above -1/3.
      axis_name: as in `gx.sgp`.

    Raises:
      ValueError: if the schedule is not one such round.

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
    W = schedule.round_at(0).matrix
    is_symmetric = len(schedule.rounds) == 1 and abs(W - W.T).max() < TOLERANCE
    if not is_symmetric or np.linalg.eigvalsh(W).min() < -1 / 3 + TOLERANCE:
        raise ValueError(
            f"the schedule of d2 must be one round, symmetric, with eigenvalues above -1/3, got "
            f"{schedule}: if its matrix W is symmetric, use (W + I) / 2, "
            "gx.topology.from_matrices((schedule.matrices()[0] + np.eye(n)) / 2). "
            "gx.gradient_tracking takes any schedule."
        )
    averages_all = schedule.round_at(0).is_uniform

    def combine(x: Any, u: Any, node: Node) -> tuple[Any, dict[str, Any]]:
        """Computes `x' = W (y + c)` with `y = x + u`; the new correction is `x' - y`."""
        y = optax.tree.add(x, u)
        # In an average over all nodes the corrections cancel, but their rounding would add up.
        mixed = node.mix(y if averages_all else optax.tree.add(y, node.kept["correction"]))
        return mixed, {"correction": optax.tree.sub(mixed, y)}

    return gossip(schedule, combine, keeps={"correction": "restart"}, axis_name=axis_name, models=1)
