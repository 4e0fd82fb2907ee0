"""How fast a schedule averages, from the spectra of its mixing matrices. NumPy only.

Public as `gossipjax.topology`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from gossipjax.topology.schedule import TOLERANCE, Round, Schedule, require_int

__all__ = ["rounds_to_exact_average", "second_singular_value", "spectral_gap"]

MAX_DENSE_NODES = 2**12  # dense products and their spectra take about a minute
MAX_SPARSE_DEGREE = 8  # with more nonzero weights per row, a dense product is faster
MAX_ROUNDS = 2**12  # of a power iteration
MAX_WORK = 2**28  # numbers that a power iteration computes: a second or two
AGREEMENT = -30.0  # if the logarithm of the differences is below, nodes surely come to agree
DIVERGENCE = math.log(1e12)  # if it is above, nodes surely do not

Mix = Callable[[np.ndarray], np.ndarray]
Move = Callable[[Mix, Any, int], Any]  # one round: mix, values, step -> values


def spectral_gap(schedule: Schedule, *, per_round: bool = False) -> float:
    """Returns the gap `1 - |lambda_2|` of one cycle of rounds or, with `per_round`, per round.

    `lambda_2` is the second largest eigenvalue in modulus of `P_(T-1) ... P_0`. In the long run,
    each cycle of `T` rounds multiplies the distance to the average by about `|lambda_2|`. The gap
    is 1 if one cycle averages exactly, and for one node.

    With `per_round` the gap is `1 - |lambda_2|^(1/T)`. Only this gap compares schedules of
    different periods. A round in which no node sends counts, too.

    Raises:
      AttributeError: for a piecewise schedule, which has no period.
      ValueError: for more than 4096 nodes, unless in all rounds the weight `P[i, j]` depends on the
        hop `(i - j) mod N` only.

    >>> import gossipjax as gx
    >>> round(spectral_gap(gx.topology.ring(6)), 6)
    0.333333
    >>> ring, random_ring = gx.topology.ring(6), gx.topology.random_ring(6, 9, seed=0)
    >>> [round(spectral_gap(s), 3) for s in (ring, random_ring)]
    [0.333, 0.999]
    >>> [round(spectral_gap(s, per_round=True), 3) for s in (ring, random_ring)]
    [0.333, 0.543]
    """
    if schedule.size == 1:
        return 1.0
    log = _get_log_of_second_eigenvalue(schedule)
    return 1 - math.exp(log / schedule.period if per_round else log)


def second_singular_value(schedule: Schedule, steps: int) -> float:
    """Returns `sigma_2`, the second largest singular value of the product of `steps` rounds.

    The product is `P_(steps-1) ... P_0`. If the rounds are doubly stochastic,
    `||x(steps) - mean|| <= sigma_2 ||x(0) - mean||`, and no smaller factor holds for every start.
    The paper's `lambda_2`, which bounds the squared error, is `sigma_2^2`. For one node, `sigma_2`
    is 0.

    Raises:
      ValueError: if `steps` is not an integer >= 1; for more than 4096 nodes, as `spectral_gap`.

    References:
      Assran et al., "Stochastic Gradient Push", arXiv:1811.10792v1, appendix A.

    >>> import gossipjax as gx
    >>> round(second_singular_value(gx.topology.complete_cycle(32), 5) ** 2, 4)
    0.5792
    """
    steps = require_int(steps, "steps of second_singular_value(schedule, steps)", 1)
    if schedule.size == 1:
        return 0.0
    cycles = _list_cycles(schedule, steps)
    if all(map(_is_circulant, schedule.rounds)):
        # Circulant matrices commute and are normal: singular values are moduli of eigenvalues.
        uses = np.zeros(len(schedule.rounds), dtype=int)  # how often each round is applied
        for cycle, repeats, last_rounds in cycles:
            uses += repeats * np.bincount(cycle, minlength=len(uses))
            uses += np.bincount(last_rounds, minlength=len(uses))
        moduli = [_find_moduli(r) ** n for r, n in zip(schedule.rounds, uses, strict=True)]
        return float(np.sort(np.prod(moduli, axis=0))[-2])  # the largest is 1, of the average
    _require_few_nodes(schedule)
    product = np.eye(schedule.size)
    for cycle, repeats, last_rounds in cycles:
        if repeats:  # a power, because a large ring needs a million rounds to mix
            whole_cycle = np.eye(schedule.size)
            for index in cycle:
                whole_cycle = multiply_round(schedule.rounds[index], whole_cycle)
            product = np.linalg.matrix_power(whole_cycle, repeats) @ product
        for index in last_rounds:
            product = multiply_round(schedule.rounds[index], product)
    return float(np.linalg.svd(product, compute_uv=False)[1])


def rounds_to_exact_average(schedule: Schedule) -> int | None:
    """Counts the rounds from step 0 until every node has the exact average, for every start.

    The number is the smallest `k` for which `P_(k-1) ... P_0 = v 1^T`, so that `x / w` of push-sum
    is the average. One node needs 0 rounds. The result is None if nodes only approach the average,
    as on a ring. The rounds are computed in float64. A vector that one round shrinks to 1e-6 of its
    length or less counts as zero.

    Raises:
      ValueError: for more than 4096 nodes, as `spectral_gap`.

    >>> import gossipjax as gx
    >>> rounds_to_exact_average(gx.topology.one_peer_exponential(8))
    3
    >>> rounds_to_exact_average(gx.topology.ring(8)) is None
    True
    """
    if schedule.size == 1:
        return 0
    # The average is exact once the rounds have mapped every vector whose sum is 0 to 0. Follow the
    # image of these vectors, a subspace that gets smaller.
    if all(map(_is_circulant, schedule.rounds)):
        # The Fourier modes are eigenvectors of every round. Keep the frequencies not mapped to 0.
        frequencies = np.arange(1, schedule.size)
        return _count_steps_until_empty(schedule, frequencies, _map_frequencies, np.array_equal)
    _require_few_nodes(schedule)
    # Keep an orthonormal basis of the subspace, because the vectors themselves shrink.
    zero_sum = np.linalg.svd(np.ones((1, schedule.size)))[2][1:].T  # [N, N - 1]
    return _count_steps_until_empty(schedule, zero_sum, _map_subspace, _span_same_space)


def growth_of_differences(schedule: Schedule, move: Move, start: np.ndarray) -> float:
    """Returns the factor by which a round multiplies nodes' differences, in the long run.

    `move(mix, values, step)` is one round of a linear algorithm without gradients, as in
    `follow_differences`; nodes come to agree if the factor is below 1. `start` are random values
    `[N, D]`. A power iteration finds a factor near 1 to about 1e-4, and others less exactly, as
    it stops when nodes agree or diverge. For a piecewise schedule the factor is the largest of its
    segments.

    >>> import gossipjax as gx
    >>> start = np.random.default_rng(0).normal(size=(6, 1))
    >>> ring = gx.topology.ring(6)
    >>> round(growth_of_differences(ring, lambda mix, x, step: mix(x), start), 4)  # 1 - gap
    0.6667
    >>> round(growth_of_differences(ring, lambda mix, x, step: 2 * mix(x) - x, start), 4)
    1.6667
    """
    rounds = min(MAX_ROUNDS, MAX_WORK // start.size)
    factors = []
    for logs in follow_differences(schedule, move, start, rounds):
        half = logs[len(logs) // 2 :]  # the first half contains differences that vanish sooner
        # If nodes agree or diverge at once, there is one logarithm, or the last is not finite.
        has_slope = len(half) > 1 and np.isfinite(half).all()
        slope = np.polyfit(np.arange(len(half)), half, 1)[0] if has_slope else half[-1]
        factors.append(math.exp(slope))
    return max(factors)


def follow_differences(
    schedule: Schedule,
    move: Move,
    start: Any,
    rounds: int,
    measure: Callable[[Any], Any] | None = None,
) -> list[np.ndarray]:
    """Runs an algorithm for some rounds; returns the logarithms of how far nodes differ after each.

    In every round `values = move(mix, values, step)`, where `mix(x)` is `P x` of the round at
    `step`, for `x` of shape `[N, D]`. Each segment of a piecewise schedule begins at `start` and
    repeats its cycle, so its result does not depend on the other segments. If a segment ends before
    its first cycle does, only its rounds are run, or without `measure` the whole cycle again and
    again, as if the segment did not end.

    Without `measure`, `values` are an array `[N, D]`, and `move` must be linear. After each round
    the mean over the nodes is removed, and the norm of the rest is measured and set to 1. With
    `measure`, `values` may be anything, `move` need not be linear, and `measure(values)` returns
    the size of the differences, or sizes `[S]` of S runs at the same time.

    The runs stop early if the differences are above 1e12 or not finite, so that nodes surely
    diverge. Without `measure`, they also stop if the differences are below e^-30.

    Returns:
      For each segment `[R]`, or `[R, S]`, the logarithms after each of its R rounds.
    """
    logs_by_segment = []
    ends = [*(segment.start for segment in schedule.segments[1:]), math.inf]
    for (first, cycle), end in zip(schedule.segments, ends, strict=True):
        period = len(cycle)
        is_cut = measure is not None and end - first < period  # the segment ends in its first cycle
        values = start
        log_scale = 0.0  # the logarithm of what `values` were divided by so far
        logs = []
        for k in range(min(rounds, int(end - first)) if is_cut else rounds):
            step = first + k % period
            round_ = schedule.rounds[cycle[k % period]]
            values = move(partial(multiply_round, round_), values, step)
            if measure is None:
                values = values - values.mean(axis=0)
                size = np.linalg.norm(values)
            else:
                size = measure(values)
            with np.errstate(divide="ignore"):
                logs.append(log_scale + np.log(size))
            if measure is None:
                if not logs[-1] > AGREEMENT:  # or NaN
                    break
                values = values / size
                log_scale = logs[-1]
            if not np.max(logs[-1]) < DIVERGENCE:  # or NaN
                break
        logs_by_segment.append(np.array(logs))
    return logs_by_segment


def _require_few_nodes(schedule: Schedule) -> None:
    """Raises `ValueError` if products of dense matrices `[N, N]` would take too long."""
    if schedule.size > MAX_DENSE_NODES:
        raise ValueError(
            f"the schedule must have at most {MAX_DENSE_NODES} nodes, got {schedule.size}. More "
            "are possible if the weights depend on the hop only, as in one_peer_exponential."
        )


def _count_steps_until_empty(
    schedule: Schedule,
    space: np.ndarray,
    map_space: Callable[[Round, np.ndarray], np.ndarray],
    is_same_space: Callable[[np.ndarray, np.ndarray], bool],
) -> int | None:
    """Counts the steps until `map_space` of their rounds leaves nothing of a space; else None."""
    ends = [*(segment.start for segment in schedule.segments[1:]), None]
    for (start, cycle), end in zip(schedule.segments, ends, strict=True):
        # What the product of a cycle ever maps to 0, it maps to 0 within N - 1 cycles.
        stop = start + (schedule.size - 1) * len(cycle) if end is None else end
        space_a_cycle_ago = None
        step = start
        while step < stop:
            if (step - start) % len(cycle) == 0:
                if space_a_cycle_ago is not None and is_same_space(space_a_cycle_ago, space):
                    # Further cycles change nothing: skip them.
                    if end is None:
                        return None
                    step += (stop - step) // len(cycle) * len(cycle)
                    if step == stop:
                        break
                space_a_cycle_ago = space
            space = map_space(schedule.round_at(step), space)
            step += 1
            if not space.size:
                return step
    return None


def _map_subspace(round_: Round, basis: np.ndarray) -> np.ndarray:
    """Maps the space with the orthonormal basis `[N, d]` by a round; returns a basis `[N, d']`."""
    if round_.is_identity:
        return basis
    image = multiply_round(round_, basis)
    image -= image.mean(axis=0)  # rounding errors, which would not shrink as the vectors do
    vectors, scales, _ = np.linalg.svd(image, full_matrices=False)
    return vectors[:, scales > TOLERANCE]


def _span_same_space(basis: np.ndarray, other: np.ndarray) -> bool:
    """Says whether two orthonormal bases `[N, d]` of vectors whose sum is 0 span the same space."""
    if basis.shape != other.shape:
        return False
    if basis.shape[1] == len(basis) - 1:  # both span all vectors whose sum is 0
        return True
    return np.allclose(basis @ (basis.T @ other), other, atol=TOLERANCE)


def _map_frequencies(round_: Round, frequencies: np.ndarray) -> np.ndarray:
    """Returns those of the frequencies whose Fourier modes a circulant round does not map to 0."""
    return frequencies[_find_moduli(round_)[frequencies] > TOLERANCE]


def _is_circulant(round_: Round) -> bool:
    """Says whether `P[i, j]` depends on the hop `(i - j) mod N` only, so that nodes are alike."""
    weights = _get_hop_weights(round_)
    hops = (round_.receivers - round_.senders) % round_.size
    has_all_edges = len(hops) == round_.size * np.count_nonzero(weights)
    return has_all_edges and bool((weights[hops] == round_.weights).all())


def _get_hop_weights(circulant: Round) -> np.ndarray:
    """Returns the weights of a circulant round by hop, `[N]`: the first column of its matrix."""
    is_first = circulant.senders == 0
    weights = np.zeros(circulant.size)
    weights[circulant.receivers[is_first]] = circulant.weights[is_first]
    return weights


def _find_moduli(circulant: Round) -> np.ndarray:
    """Returns the moduli of a circulant round's eigenvalues, `[N]`, by frequency of the mode."""
    return abs(np.fft.fft(_get_hop_weights(circulant)))


def _get_log_of_second_eigenvalue(schedule: Schedule) -> float:
    """Returns `log |lambda_2|` of one cycle; `|lambda_2|` itself could underflow in float64."""
    rounds = [schedule.round_at(step) for step in range(schedule.period)]
    if all(map(_is_circulant, schedule.rounds)):
        moduli = np.stack([_find_moduli(round_)[1:] for round_ in rounds])
        with np.errstate(divide="ignore"):
            return float(np.log(np.where(moduli > TOLERANCE, moduli, 0)).sum(axis=0).max())
    _require_few_nodes(schedule)
    # The product of the rounds, on differences between nodes, is kept divided by its norm.
    product = np.eye(schedule.size) - 1 / schedule.size
    log = 0.0  # of the norms that the product was divided by
    for round_ in rounds:
        norm = np.linalg.norm(product)
        log += math.log(norm)
        product = multiply_round(round_, product / norm)
        product -= product.mean(axis=0)
        if np.linalg.norm(product) <= TOLERANCE:
            return -math.inf
    with np.errstate(divide="ignore"):
        return float(log + np.log(max(abs(np.linalg.eigvals(product)))))


def _list_cycles(
    schedule: Schedule, steps: int
) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    """Yields `(cycle, repeats, last_rounds)` of the first `steps` steps, for each segment."""
    ends = [*(segment.start for segment in schedule.segments[1:]), steps]
    for (start, cycle), end in zip(schedule.segments, ends, strict=True):
        repeats, left_over = divmod(max(0, min(end, steps) - start), len(cycle))
        yield cycle, repeats, cycle[:left_over]  # the last cycle may be incomplete


def multiply_round(round_: Round, x: np.ndarray) -> np.ndarray:
    """Returns `P x` for the matrix `P` of a round and `x` `[N, D]`."""
    if len(round_.weights) > MAX_SPARSE_DEGREE * round_.size:
        return round_.matrix @ x
    row_starts = np.flatnonzero(np.diff(round_.receivers, prepend=-1))  # entries are sorted by row
    return np.add.reduceat(x[round_.senders] * round_.weights[:, None], row_starts)
