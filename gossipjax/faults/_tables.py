"""Tables of what fails at each step, drawn from a seed.

Row `k` depends on the arguments and on `k` alone: a longer table begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gossipjax.algorithms.transform import require_number
from gossipjax.topology.schedule import require_int

MAX_DELAY = 2**10  # steps: each costs a copy of the model on every link


def independent_drops(n: int, steps: int, seed: int, rate: float) -> np.ndarray:
    """Which messages arrive where each is lost with probability `rate`, whatever else is lost.

    Returns:
      bool `[T, N, N]` for T = `steps`: whether what node `j` sends node `i` at step `k` arrives.

    Raises:
      ValueError: if an argument is out of its range.

    >>> round(float(independent_drops(4, 1000, seed=0, rate=0.1).mean()), 2)
    0.9
    """
    rate = _require_rate(rate, "rate of independent_drops")
    return _make_rng(seed).random((steps, n, n)) >= rate


def gilbert_elliott(
    n: int,
    steps: int,
    seed: int,
    rate: float,
    bad_to_good: float = 0.5,
    good_to_bad: float = 0.5,
) -> np.ndarray:
    """Which messages arrive, if losses come in bursts.

    Every sender has a chain of two states. It starts in either with probability 1/2 and moves
    before each step, from bad to good and back with the given probabilities. In the bad state each
    of its messages is lost with probability `rate`, in the good one none. In the long run a part of
    `rate good_to_bad / (good_to_bad + bad_to_good)` is lost.

    Returns:
      bool `[T, N, N]`, as of `independent_drops`.

    References:
      Gilbert, "Capacity of a Burst-Noise Channel", Bell System Technical Journal 1960, and Elliott
      1963; with the start, the order and the chain per sender of decent-bench 0.3.0.

    >>> round(float(gilbert_elliott(8, 4000, seed=0, rate=0.4).mean()), 2)
    0.8
    """
    name = "gilbert_elliott"
    rate = _require_rate(rate, f"rate of {name}")
    leave_bad = _require_rate(bad_to_good, f"bad_to_good of {name}")
    leave_good = _require_rate(good_to_bad, f"good_to_bad of {name}")
    # Two streams, so that a longer table begins with the shorter one.
    is_bad = _walk(_make_rng(seed, 0), leave_bad, leave_good, (steps, n))
    is_lost = _make_rng(seed, 1).random((steps, n, n)) < rate
    return ~(is_lost & is_bad[:, None, :])


def _walk(rng: np.random.Generator, leave: float, enter: float, shape: Sequence[int]) -> np.ndarray:
    """Chains of two states from an even start, bool `[T, N]`; each moves before its first row."""
    state = rng.random(shape[1]) < 0.5
    draws = rng.random(shape)
    states = np.empty(shape, bool)
    for k, draw in enumerate(draws):
        state = np.where(state, draw >= leave, draw < enter)
        states[k] = state
    return states


def markov_activity(
    n: int, steps: int, seed: int, wake: float = 0.5, sleep: float = 0.5
) -> np.ndarray:
    """Which nodes are active: all at step 0, and then each by a chain of two states.

    Before every other step an active node falls asleep with probability `sleep`, and one that
    sleeps wakes with probability `wake`. In the long run a part of `wake / (wake + sleep)` of the
    nodes is active.

    Returns:
      bool `[T, N]`.

    >>> round(float(markov_activity(8, 9000, seed=0, wake=0.6, sleep=0.2).mean()), 2)
    0.75
    """
    name = "markov_activity"
    wake = _require_rate(wake, f"wake of {name}")
    sleep = _require_rate(sleep, f"sleep of {name}")
    draws = _make_rng(seed).random((steps, n))
    active = np.ones((steps, n), bool)
    for k in range(1, steps):
        active[k] = np.where(active[k - 1], draws[k] >= sleep, draws[k] < wake)
    return active


def cyclic_activity(n: int, on: int, off: int, offsets: Sequence[int] | None = None) -> np.ndarray:
    """Which nodes are active: node `i` where `(k + offsets[i]) mod (on + off) < on`.

    Args:
      offsets: N integers from 0; by default `offsets[i] = i`.

    Returns:
      bool `[on + off, N]`, one cycle.

    >>> cyclic_activity(3, on=2, off=1).astype(int).tolist()
    [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    """
    period = on + off
    given = range(n) if offsets is None else offsets
    return (np.arange(period)[:, None] + np.array(given)) % period < on


def poisson_activity(n: int, steps: int, seed: int, mean: float = 1.0) -> np.ndarray:
    """Which nodes are active: each sleeps a Poisson number of steps, is active for one, and again.

    In the long run a part of `1 / (1 + mean)` of the nodes is active.

    Returns:
      bool `[T, N]`.

    >>> round(float(poisson_activity(4, 4000, seed=0, mean=1.0).mean()), 2)
    0.5
    """
    mean = require_number(mean, "mean of poisson_activity", "from 0", lambda mean: mean >= 0)
    active = np.zeros((steps, n), bool)
    for node in range(n):
        awake = np.cumsum(_make_rng(seed, node).poisson(mean, steps) + 1) - 1
        active[awake[awake < steps], node] = True
    return active


def uniform_delays(n: int, steps: int, seed: int, max_delay: int) -> np.ndarray:
    """How late each message arrives: 0 to `max_delay` steps, each with the same probability.

    Returns:
      int `[T, N, N]`: the steps by which what node `j` sends node `i` at step `k` is late.

    >>> np.unique(uniform_delays(4, 100, seed=0, max_delay=2)).tolist()
    [0, 1, 2]
    """
    max_delay = require_int(max_delay, "max_delay of uniform_delays", 0, MAX_DELAY)
    return _make_rng(seed).integers(0, max_delay + 1, (steps, n, n))


def _require_rate(value: Any, name: str) -> float:
    """Returns a probability; raises `ValueError` unless it is a number from 0 to 1."""
    return require_number(value, name, "from 0 to 1", lambda rate: 0 <= rate <= 1)


def _make_rng(seed: int, *stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, *stream])
