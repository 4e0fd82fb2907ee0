"""How fast a schedule averages: spectra of products of its mixing matrices. NumPy only.

Public as `gossipjax.topology` and `gossipjax.diagnostics`.
"""

from __future__ import annotations

import numpy as np

from gossipjax.topology.schedule import TOLERANCE, Schedule, require_int


def spectral_gap(schedule: Schedule) -> float:
    """`1 - |lambda_2|` of the product `P_(T-1) ... P_0` over one cycle.

    `lambda_2` is its second largest eigenvalue in modulus: in the long run the distance to the
    average shrinks by about this factor per cycle of `T` rounds. The gap is 1 if one cycle averages
    exactly, and for one node.

    Raises:
      ValueError: for a piecewise schedule, which has no period.

    >>> import gossipjax as gx
    >>> round(spectral_gap(gx.topology.ring(6)), 6)
    0.333333
    """
    if len(schedule.segments) > 1:
        raise ValueError(
            "the schedule of spectral_gap must have one cycle, got a piecewise schedule with "
            f"{len(schedule.segments)} segments. Compute the gap of each of its parts."
        )
    if schedule.size == 1:
        return 1.0
    eigenvalues = np.linalg.eigvals(_multiply_rounds(schedule, schedule.period))
    return float(1 - np.sort(np.abs(eigenvalues))[-2])


def second_singular_value(schedule: Schedule, steps: int) -> float:
    """`sigma_2` of `P_(steps-1) ... P_0`, the product of the first `steps` rounds.

    If the rounds are doubly stochastic, `||x(steps) - mean|| <= sigma_2 ||x(0) - mean||`, and no
    smaller factor holds for every start. The `lambda_2` of the paper, which bounds the squared
    error, is `sigma_2^2`. 0 for one node.

    Raises:
      ValueError: if `steps` is not an integer >= 1.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICLR 2019 submission,
      arXiv:1811.10792v1, appendix A.

    >>> import gossipjax as gx
    >>> round(second_singular_value(gx.topology.complete_cycle(32), 5) ** 2, 4)
    0.5792
    """
    steps = require_int(steps, "steps of second_singular_value(schedule, steps)", 1)
    if schedule.size == 1:
        return 0.0
    return float(np.linalg.svd(_multiply_rounds(schedule, steps), compute_uv=False)[1])


def rounds_to_exact_average(schedule: Schedule) -> int | None:
    """Number of rounds from step 0 until every node has the exact average, for every start.

    The smallest `k` with `P_(k-1) ... P_0 = v 1^T`: then `x / w` of push-sum is the average. None
    if the average is only approached, as on a ring; 0 for one node.

    Computed in float64: a vector that one round shrinks to 1e-6 of its length or less counts as
    zero. Where the error falls to rounding level before it vanishes, as for `complete_cycle(128)`,
    the result may be too large.

    >>> import gossipjax as gx
    >>> rounds_to_exact_average(gx.topology.one_peer_exponential(8))
    3
    >>> rounds_to_exact_average(gx.topology.ring(8)) is None
    True
    """
    if schedule.size == 1:
        return 0
    # The average is exact once the matrices map every vector whose sum is 0 to 0. Their image of
    # that space is a subspace. It is kept as an orthonormal basis, since its vectors shrink.
    zero_sum = np.linalg.svd(np.ones((1, schedule.size)))[2][1:].T  # [N, N - 1]
    maps = [zero_sum.T @ round_.matrix @ zero_sum for round_ in schedule.rounds]
    start, cycle = schedule.segments[-1]
    basis = np.eye(schedule.size - 1)
    basis_a_cycle_ago = basis
    # What the product of a cycle ever maps to 0, it maps to 0 within N - 1 cycles.
    for step in range(start + (schedule.size - 1) * len(cycle)):
        if step >= start and (step - start) % len(cycle) == 0:
            if step > start and _span_same_space(basis_a_cycle_ago, basis):
                return None
            basis_a_cycle_ago = basis
        image = maps[schedule.index_at(step)] @ basis
        vectors, scales, _ = np.linalg.svd(image, full_matrices=False)
        basis = vectors[:, : np.count_nonzero(scales > TOLERANCE)]
        if not basis.size:
            return step + 1
    return None


def _span_same_space(basis: np.ndarray, other: np.ndarray) -> bool:
    """Whether two orthonormal bases `[N - 1, d]` span the same space."""
    if basis.shape != other.shape:
        return False
    return np.allclose(basis @ (basis.T @ other), other, atol=TOLERANCE)


def _multiply_rounds(schedule: Schedule, steps: int) -> np.ndarray:
    """`P_(steps-1) ... P_0`."""
    product = np.eye(schedule.size)
    for matrix in schedule.matrices(steps):
        product = matrix @ product
    return product
