"""Draws tables of what fails at each step from a seed.

Row `k` depends on the arguments and on `k` alone, so a longer table begins with the shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gossipjax.exchanges.transform import require_number
from gossipjax.renamed import renamed


@renamed(n="nodes")
def independent_drops(nodes: int, steps: int, seed: int, rate: float) -> np.ndarray:
    """Draws which messages arrive: each is lost with probability `rate`, independently.

    Returns:
      bool `[T, N, N]` for T = `steps`. Entry `[k, i, j]` says whether the message of node `j` to
      node `i` at step `k` arrives.

    Raises:
      ValueError: if `rate` is not a number from 0 to 1.

    >>> round(float(independent_drops(4, 1000, seed=0, rate=0.1).mean()), 2)
    0.9
    """
    _require_rate(rate, "independent_drops")
    return np.random.default_rng([seed]).random((steps, nodes, nodes)) >= rate


@renamed(n="nodes")
def gilbert_elliott(
    nodes: int,
    steps: int,
    seed: int,
    rate: float,
    *,
    bad_to_good: float = 0.5,
    good_to_bad: float = 0.5,
) -> np.ndarray:
    """Draws which messages arrive, as `independent_drops` does, but losses come in bursts.

    Every sender is in a good or a bad state, and starts in either with probability 1/2. Before each
    step a sender changes its state with probability `good_to_bad` or `bad_to_good`. In the bad
    state each of its messages is lost with probability `rate`, in the good state none. In the long
    run a part of `rate good_to_bad / (good_to_bad + bad_to_good)` of all messages is lost.

    References:
      Gilbert, "Capacity of a Burst-Noise Channel", Bell System Technical Journal 1960, and Elliott
      1963. decent-bench 0.3.0 also has one chain per sender, this start and this order.

    >>> round(float(gilbert_elliott(8, 4000, seed=0, rate=0.4).mean()), 2)
    0.8
    """
    _require_rate(rate, "gilbert_elliott")
    # Two generators, so that a longer table begins with the shorter one.
    rng = np.random.default_rng([seed, 0])
    starts_bad = rng.random(nodes) < 0.5
    is_bad = _run_chains(starts_bad, rng.random((steps, nodes)), bad_to_good, good_to_bad)
    is_lost = np.random.default_rng([seed, 1]).random((steps, nodes, nodes)) < rate
    return ~(is_lost & is_bad[:, None, :])


def _run_chains(start: np.ndarray, draws: np.ndarray, leave: float, enter: float) -> np.ndarray:
    """Runs N chains that leave and enter the state True with these probabilities; `[T, N]`."""
    states = np.empty(draws.shape, bool)  # after each draw `[N]`
    for k, draw in enumerate(draws):
        before = states[k - 1] if k else start
        states[k] = np.where(before, draw >= leave, draw < enter)
    return states


@renamed(n="nodes")
def markov_activity(
    nodes: int, steps: int, seed: int, *, wake: float = 0.5, sleep: float = 0.5
) -> np.ndarray:
    """Draws which nodes are active, bool `[T, N]`: each falls asleep and wakes at random.

    All nodes are active at step 0. Before each later step, an active node falls asleep with
    probability `sleep`, and a sleeping node wakes with probability `wake`. In the long run a part
    of `wake / (wake + sleep)` of the nodes is active.

    >>> round(float(markov_activity(8, 9000, seed=0, wake=0.6, sleep=0.2).mean()), 2)
    0.75
    """
    draws = np.random.default_rng([seed]).random((steps, nodes))
    start = np.ones((1, nodes), bool)
    return np.concatenate([start, _run_chains(start[0], draws[1:], leave=sleep, enter=wake)])


@renamed(n="nodes")
def cyclic_activity(
    nodes: int, on: int, off: int, *, offsets: Sequence[int] | None = None
) -> np.ndarray:
    """Says which nodes are active: each is active for `on` steps, then sleeps for `off` steps.

    Args:
      offsets: N integers >= 0, by default `offsets[i] = i`. Node `i` is active at the steps `k`
        with `(k + offsets[i]) mod (on + off) < on`.

    Returns:
      bool `[on + off, N]`, one cycle.

    >>> cyclic_activity(3, on=2, off=1).astype(int).tolist()
    [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    """
    period = on + off
    shifts = range(nodes) if offsets is None else offsets
    return (np.arange(period)[:, None] + np.array(shifts)) % period < on


@renamed(n="nodes")
def poisson_activity(nodes: int, steps: int, seed: int, *, mean: float = 1.0) -> np.ndarray:
    """Draws which nodes are active, bool `[T, N]`: each sleeps between two active steps.

    A node sleeps for a Poisson number of steps with the given `mean`. In the long run a part of
    `1 / (1 + mean)` of the nodes is active.

    >>> round(float(poisson_activity(4, 4000, seed=0, mean=1.0).mean()), 2)
    0.5
    """
    active = np.zeros((steps, nodes), bool)
    for node in range(nodes):
        sleeps = np.random.default_rng([seed, node]).poisson(mean, steps)
        active_steps = np.cumsum(sleeps + 1) - 1
        active[active_steps[active_steps < steps], node] = True
    return active


@renamed(n="nodes")
def uniform_delays(nodes: int, steps: int, seed: int, max_delay: int) -> np.ndarray:
    """Draws by how many steps each message is late, uniformly from 0 to `max_delay`.

    Returns:
      int `[T, N, N]`. Entry `[k, i, j]` is the delay of the message of `j` to `i` at step `k`.

    >>> np.unique(uniform_delays(4, 100, seed=0, max_delay=2)).tolist()
    [0, 1, 2]
    """
    return np.random.default_rng([seed]).integers(0, max_delay + 1, (steps, nodes, nodes))


def _require_rate(value: Any, name: str) -> None:
    """Raises `ValueError` unless `value` is a probability, so from 0 to 1 and not in percent."""
    require_number(value, f"rate of {name}", "from 0 to 1", lambda rate: 0 <= rate <= 1)
