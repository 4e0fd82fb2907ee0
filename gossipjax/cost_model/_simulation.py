"""Nodes that are not equally fast, by a simulation of their events. NumPy only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gossipjax.cost_model._events import Events
from gossipjax.cost_model._require import require_number_of_nodes
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.slowness import Slowness
from gossipjax.cost_model.workload import Workload
from gossipjax.topology.schedule import require_int

DEFAULT_STEPS = 60
MAX_CYCLE = 1000  # steps; longer cycles are not completed
MAX_NODE_STEPS = 2**22  # of all nodes together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What nodes did in simulated time.

    Attributes:
      seconds: per step, `N` over the steps per second of all nodes.
      examples_per_second: of all nodes.
      steps_nodes: number of steps of each node, `[N]`.
      waiting: fraction of the time in which a node does not compute, mean over the nodes.
      staleness: updates that a node makes from the moment at which a message leaves for it to the
        one at which it uses it, the mean; of nodes that wait for each other, what the method says.
      kept: fraction of the times at which a node that waits for nobody would have sent, but found
        its link busy; 0 of others.
    """

    seconds: float
    examples_per_second: float
    steps_nodes: tuple[int, ...]
    waiting: float
    staleness: float
    kept: float


def simulate(
    method: Method,
    workload: Workload,
    network: Network,
    nodes: int,
    slowness: Slowness | np.ndarray | None = None,
    steps: int | None = None,
    seed: int = 0,
    warm_up: int | None = None,
) -> Simulation:
    """Simulates the steps of nodes that may be slow, event by event. Modelled, not measured.

    The computation of node i at its step t takes `f[t, i] c` seconds. Then

    - an all-reduce begins when the slowest of all nodes is ready;
    - a node waits for what a round of gossip sends to it, and for what it sends, and for no others;
    - a node of AD-PSGD waits until its last message has left its link, and for nobody else;
    - a node of asynchronous SGP waits for nothing: if its link is busy, it keeps its share.

    What overlaps with k computations is waited for k computations later. A node's link carries
    one message at a time each way, first come, first served; an all-reduce takes all links,
    once all are free. The seconds of a message are those of `Network.message_seconds`. Without
    slowness the result is that of `predict_step`, which does not see two messages that meet at
    one receiver (as of random peers), or an all-reduce that waits for messages on their way
    (SlowMo around OSGP).

    Args:
      method, workload, network, nodes: as in `predict_step`.
      slowness: of the nodes; or the factors f, `[T, N]`, repeated after T steps; None: all are
        equally fast.
      steps: of each node, after those of `warm_up`; of asynchronous nodes the mean. None: the whole
        cycles that have 60 or more.
      seed: of the draws of `slowness`.
      warm_up: first steps that are not counted. None: those of one cycle, 60 at most, and of the
        overlap.

    Raises:
      ValueError: as `predict_step`; if `steps` or `warm_up` is not an integer of at least 1 or 0,
        for more than 2^22 steps of all nodes together, or if factors are not numbers above 0.

    >>> from gossipjax.cost_model import Network, Slowness, Workload, allreduce, simulate
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2)
    >>> slow = Slowness("constant", 4.0)
    >>> round(simulate(allreduce(), workload, Network(1e9), 8, slow).seconds, 6)
    0.975
    """
    for value, kind in ((method, Method), (workload, Workload), (network, Network)):
        if not isinstance(value, kind):
            raise ValueError(
                f"simulate must be given a {kind.__name__} of gossipjax.cost_model, got {value!r}."
            )
    nodes = require_number_of_nodes(nodes)
    for exchange in method.exchanges:
        exchange.require_nodes(nodes)
    cycle = min(MAX_CYCLE, _count_cycle(method))
    if steps is None:
        steps = cycle * math.ceil(DEFAULT_STEPS / cycle)
    steps = require_int(steps, "steps of simulate", 1)
    if warm_up is None:
        overlap = max((exchange.overlap for exchange in method.exchanges), default=0)
        warm_up = min(cycle, DEFAULT_STEPS) + overlap
    warm_up = require_int(warm_up, "warm_up of simulate", 0)
    total = warm_up + steps
    if nodes * total > MAX_NODE_STEPS:
        raise ValueError(
            f"steps of simulate must be at most {MAX_NODE_STEPS // nodes - warm_up} for {nodes} "
            f"nodes, got {steps}: give fewer."
        )
    factors = _find_factors(slowness, nodes, total, seed)
    events = Events(method, workload, network, factors * workload.compute_seconds, total)
    events.run()
    return _summarize(events, method, workload, warm_up)


def _count_cycle(method: Method) -> int:
    """Steps after which all exchanges repeat."""
    cycles = [exchange.every * _count_rounds(exchange.schedule) for exchange in method.exchanges]
    return math.lcm(*cycles) if cycles else 1


def _count_rounds(schedule: Any) -> int:
    return 1 if schedule is None else len(schedule.segments[-1].cycle)


def _find_factors(
    slowness: Slowness | np.ndarray | None, nodes: int, steps: int, seed: int
) -> np.ndarray:
    if slowness is None:
        slowness = Slowness()
    if isinstance(slowness, Slowness):
        return slowness.draw(nodes, steps, seed)
    factors = np.asarray(slowness, float)
    if factors.ndim != 2 or factors.shape[1] != nodes or not len(factors):
        raise ValueError(
            f"factors of slowness must be [T, N] with N = {nodes}, got shape {factors.shape}. "
            "Slowness.draw makes such."
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(
            f"factors of slowness must be finite and above 0, got {factors.min()} to "
            f"{factors.max()}: 1 is a step that is not slow."
        )
    return factors


def _summarize(events: Events, method: Method, workload: Workload, warm_up: int) -> Simulation:
    counts = np.array([len(ends) for ends in events.ends])
    last = np.array([ends[-1] if ends else math.inf for ends in events.ends])
    # A node that is far slower than the others may not have made its first steps.
    skipped = np.minimum(warm_up, np.maximum(counts - 1, 0))
    begins = np.array(
        [ends[k - 1] if k else 0.0 for ends, k in zip(events.ends, skipped, strict=True)]
    )
    seconds = last - begins
    is_timed = bool((seconds > 0).all())  # where nothing takes time, they are 0
    rate = float(((counts - skipped) / seconds).sum()) if is_timed else math.inf
    tries = events.sent + events.kept
    return Simulation(
        seconds=len(counts) / rate,
        examples_per_second=rate * workload.examples,
        steps_nodes=tuple(counts.tolist()),
        waiting=_find_waiting(events),
        staleness=_find_staleness(events, method),
        kept=events.kept / tries if tries else 0.0,
    )


def _find_waiting(events: Events) -> float:
    """The mean over the nodes that have ended a step, up to the end of their last."""
    fractions = [
        1 - busy / ends[-1]
        for busy, ends in zip(events.busy_seconds, events.ends, strict=True)
        if ends and ends[-1] > 0
    ]
    return max(0.0, float(np.mean(fractions))) if fractions else 0.0


def _find_staleness(events: Events, method: Method) -> float:
    if method.is_asynchronous and events.staleness:
        return float(np.mean(events.staleness))
    return float(method.staleness)
