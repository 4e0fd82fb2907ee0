"""How fast a schedule averages: spectra of the products of its matrices. NumPy only.

Reached as `gossipjax.diagnostics`.
"""

from __future__ import annotations

import numpy as np

from gossipjax.schedule import TOLERANCE, Schedule, require_whole


def spectral_gap(schedule: Schedule) -> float:
    """`1 - |lambda_2|` of one cycle's product `P_(T-1) ... P_0`.

    `lambda_2` is its second largest eigenvalue in modulus: per cycle of `T` rounds the distance to
    the average shrinks by about this factor in the long run. 1 where a cycle averages exactly.

    Raises:
      ValueError: for a piecewise schedule, which has no cycle.

    >>> import gossipjax as gx
    >>> round(spectral_gap(gx.topology.ring(6)), 6)
    0.333333
    """
    if len(schedule.pieces) > 1:
        raise ValueError(
            "a piecewise schedule has no cycle, and so no spectral gap: ask for that of its parts."
        )
    if schedule.size == 1:
        return 1.0
    moduli = np.sort(np.abs(np.linalg.eigvals(_product(schedule, schedule.period))))
    return float(1 - moduli[-2])


def second_singular_value(schedule: Schedule, steps: int) -> float:
    """`sigma_2` of `P_(steps-1) ... P_0`, the first `steps` rounds.

    For doubly stochastic rounds `||x(steps) - mean|| <= sigma_2 ||x(0) - mean||`, and no smaller
    factor will do. SGP-18, appendix A, bounds the squared error: its `lambda_2` is `sigma_2^2`.
    0 for one node.

    >>> import gossipjax as gx
    >>> round(second_singular_value(gx.topology.complete_cycle(32), 5) ** 2, 4)
    0.5792
    """
    steps = require_whole(steps, "steps of second_singular_value(schedule, steps)", 1)
    if schedule.size == 1:
        return 0.0
    return float(np.linalg.svd(_product(schedule, steps), compute_uv=False)[1])


def rounds_to_exact_average(schedule: Schedule) -> int | None:
    """After how many rounds from step 0 every node holds the exact average, whatever the start.

    The smallest `k` with `P_(k-1) ... P_0 = v 1^T`: then push-sum's `x / w` is the average. None if
    the average is only approached, as on a ring. 0 for one node. Found in float64: what a round
    shrinks by 1e-6 or more is taken to vanish; and where the error is down to rounding before it
    vanishes, as for `complete_cycle(128)`, it may be found too late.

    >>> import gossipjax as gx
    >>> rounds_to_exact_average(gx.topology.one_peer_exponential(8))
    3
    >>> rounds_to_exact_average(gx.topology.ring(8)) is None
    True
    """
    if schedule.size == 1:
        return 0
    # The average is exact when the matrices have mapped every vector whose sum is 0 to 0. What they
    # map them to is a subspace; it is kept as an orthonormal basis, since its vectors shrink.
    zero_sum = np.linalg.svd(np.ones((1, schedule.size)))[2][1:].T  # [N, N - 1]
    maps = [zero_sum.T @ r.matrix @ zero_sum for r in schedule.rounds]
    last = schedule.pieces[-1]
    basis = before = np.eye(schedule.size - 1)
    # Beyond N - 1 cycles no more is lost: then what a cycle's product would ever take is gone.
    for step in range(last.start + (schedule.size - 1) * len(last.cycle)):
        if step >= last.start and (step - last.start) % len(last.cycle) == 0:
            if step > last.start and _is_same(before, basis):
                return None
            before = basis
        vectors, scales, _ = np.linalg.svd(
            maps[schedule.index_at(step)] @ basis, full_matrices=False
        )
        basis = vectors[:, : np.count_nonzero(scales > TOLERANCE)]
        if not basis.size:
            return step + 1
    return None


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two orthonormal bases span the same space."""
    return one.shape == other.shape and np.allclose(one @ (one.T @ other), other, atol=TOLERANCE)


def _product(schedule: Schedule, steps: int) -> np.ndarray:
    product = np.eye(schedule.size)
    for matrix in schedule.matrices(steps):
        product = matrix @ product
    return product
