"""Cycles of rounds, one after another, and the steps at which they repeat. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_STEP = 2**31 - 1  # traced steps are int32


class Segment(NamedTuple):
    """The cycle of rounds that a schedule repeats from step `start` on.

    `cycle` holds indices into `Schedule.rounds`.
    """

    start: int
    cycle: tuple[int, ...]


def find_canonical_steps(segments: Sequence[Segment], lookback: int) -> list[np.ndarray]:
    """The smallest step with the same rounds at it and at the `lookback` steps before it.

    Returns:
      By segment, the canonical steps `[L]` of its first `lookback + len(cycle)` steps, or of all if
      it has fewer. From `start + lookback` on, the rounds before a step lie in its segment: the
      last `len(cycle)` values repeat.
    """
    ends = [*(segment.start for segment in segments[1:]), np.inf]
    steps = []
    windows = []
    for (start, cycle), end in zip(segments, ends, strict=True):
        stop = int(min(start + lookback + len(cycle), end))
        steps.append(np.arange(start, stop))
        windows.append(np.arange(start - lookback, stop))
    bounds = np.cumsum([len(part) for part in windows])[:-1]
    rounds = _list_rounds(segments, np.concatenate(windows))
    labels = np.split(_label_windows(rounds, lookback + 1), bounds)
    # A window that begins before its part of `windows` has no meaning.
    complete = np.concatenate([part[lookback:] for part in labels])
    _, first, inverse = np.unique(complete, return_index=True, return_inverse=True)
    canonical = np.concatenate(steps)[first[inverse]]
    return np.split(canonical, np.cumsum([len(part) for part in steps])[:-1])


def _list_rounds(segments: Sequence[Segment], steps: np.ndarray) -> np.ndarray:
    """Indices of the rounds at the given steps; steps before 0 wrap."""
    starts = np.array([segment.start for segment in segments])
    lengths = np.array([len(segment.cycle) for segment in segments])
    cycles = np.concatenate([segment.cycle for segment in segments])
    index = np.maximum(np.searchsorted(starts, steps, side="right") - 1, 0)
    offsets = np.cumsum(lengths) - lengths
    return cycles[offsets[index] + (steps - starts[index]) % lengths[index]]


def _label_windows(values: np.ndarray, width: int) -> np.ndarray:
    """Labels of the windows of `width` values that end at each position, `[len(values)]`.

    Equal windows have equal labels. Two windows are joined into one at a time, so that their width
    doubles.
    """
    labels = values
    labeled = 1
    while labeled < width:
        shift = min(labeled, width - labeled)
        pairs = labels * (labels.max() + 1)
        pairs[shift:] += labels[:-shift]
        distinct, refined = np.unique(pairs, return_inverse=True)
        if len(distinct) == labels.max() + 1 and labeled > 1:
            break  # what these windows do not tell apart, longer ones do not either
        labels = refined
        labeled += shift
    return labels
