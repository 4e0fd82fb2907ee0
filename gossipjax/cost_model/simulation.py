"""Nodes that are not equally fast, by a simulation of their events. NumPy only."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gossipjax.cost_model._require import require_number_of_nodes
from gossipjax.cost_model.exchange import BACKWARD, Workload
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.prediction import ROUNDING, find_share
from gossipjax.cost_model.slowness import Slowness
from gossipjax.topology.schedule import require_int

DEFAULT_STEPS = 60
MAX_CYCLE = 1000  # steps; longer cycles are not completed
MAX_NODE_STEPS = 2**22  # of all nodes together

Key = tuple[int, int]
"""Number of an exchange in its method, and the step at which it begins."""


class Message(NamedTuple):
    """One message of a round of gossip; times are in seconds."""

    key: Key  # of its exchange
    source: int
    target: int
    seconds: float  # on the wire
    copy_seconds: float  # through the memory of the source, before the wire


class Links:
    """The link of every node: one message at a time each way, first come, first served."""

    def __init__(self, nodes: int):
        self._out_free = np.zeros(nodes)  # when the last message that has begun ends, in seconds
        self._in_free = np.zeros(nodes)
        self._queues: list[collections.deque[Message]] = [collections.deque() for _ in range(nodes)]
        self._is_sending = [False] * nodes

    def add(self, message: Message) -> None:
        """Puts a message behind those that wait for the link of its source."""
        self._queues[message.source].append(message)

    def begin_next(self, node: int, time: float) -> tuple[float, Message] | None:
        """Begins the next message of a node, if it can be sent, and returns when it arrives."""
        if self._is_sending[node] or not self._queues[node]:
            return None
        message = self._queues[node].popleft()
        copied = max(time, self._out_free[node]) + message.copy_seconds
        end = max(copied, self._in_free[message.target]) + message.seconds
        self._out_free[node] = end
        self._in_free[message.target] = end
        self._is_sending[node] = True
        return end, message

    def release(self, node: int) -> None:
        """Says that the message that this node was sending has arrived."""
        self._is_sending[node] = False

    def begin_collective(self, ready: np.ndarray, seconds: float) -> float:
        """Occupies all links with an all-reduce in parts, once all are free: when the last ends.

        Args:
          ready: when each part may begin, in order, in seconds.
          seconds: of all parts together.
        """
        end = max(self._out_free.max(), self._in_free.max())
        for begin in ready:
            end = max(begin, end) + seconds / len(ready)
        self._out_free[:] = end
        self._in_free[:] = end
        return float(end)


@dataclasses.dataclass
class Pending:
    """What is not done yet of an exchange that some node has begun."""

    missing: np.ndarray  # messages that each node still waits for, [N]
    begun: dict[int, float] = dataclasses.field(default_factory=dict)  # node -> seconds

    @property
    def is_done(self) -> bool:
        """Whether nobody will ask for it again."""
        return len(self.begun) == len(self.missing) and not self.missing.any()


class Events:
    """Runs the nodes of a method until they have made their steps.

    What overlaps with k computations is waited for k computations later.

    Args:
      method, workload, network: as in `simulate`.
      seconds: of the computation of each step of each node, `[T, N]`; repeated after T steps.
      steps: of each node; the mean of them, if nobody waits.

    Attributes:
      ends: of each node, when its steps ended, in seconds.
    """

    def __init__(
        self, method: Method, workload: Workload, network: Network, seconds: np.ndarray, steps: int
    ):
        self._method = method
        self._workload = workload
        self._network = network
        self._seconds = seconds
        self._steps = steps
        self._nodes = seconds.shape[1]
        self._links = Links(self._nodes)
        self._queue: list[tuple[float, int, Callable[..., None], object]] = []
        self._order = itertools.count()  # of events at the same time
        self._next_exchange = [0] * self._nodes  # of those of the step
        self._awaited: list[Key | None] = [None] * self._nodes
        self._pending: dict[Key, Pending] = {}
        times = [2 if exchange.is_half_duplex else 1 for exchange in method.exchanges]
        sizes = [exchange.count_bytes(workload) for exchange in method.exchanges]
        pairs = list(zip(times, sizes, strict=True))
        # Of a message of each exchange: on the wire, and through the memory of its source.
        self._wire_seconds = [n * network.message_seconds(size) for n, size in pairs]
        self._copy_seconds = [n * network.copy_seconds(size) for n, size in pairs]
        self._slots: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._count = 0  # of all steps that have ended
        self.ends: list[list[float]] = [[] for _ in range(self._nodes)]

    def run(self) -> None:
        """Runs all steps."""
        for node in range(self._nodes):
            self._start_step(0.0, node)
        while self._queue and self._count < self._steps * self._nodes:
            time, _, act, argument = heapq.heappop(self._queue)
            act(time, argument)

    def _add_event(self, time: float, act: Callable[..., None], argument: object) -> None:
        heapq.heappush(self._queue, (time, next(self._order), act, argument))

    def _find_step_seconds(self, step: int) -> np.ndarray:
        """Of the computation of that step of every node, `[N]`."""
        return self._seconds[step % len(self._seconds)]

    def _start_step(self, time: float, node: int) -> None:
        if self._method.is_asynchronous or len(self.ends[node]) < self._steps:
            end = time + self._find_step_seconds(len(self.ends[node]))[node]
            self._add_event(end, self._end_computation, node)

    def _end_computation(self, time: float, node: int) -> None:
        self._next_exchange[node] = 0
        self._advance(time, node)

    def _advance(self, time: float, node: int) -> None:
        """Goes on with a step whose computation has ended, as far as possible."""
        step = len(self.ends[node])
        exchanges = self._method.exchanges
        while self._next_exchange[node] < len(exchanges):
            index = self._next_exchange[node]
            self._next_exchange[node] += 1
            if exchanges[index].happens_at(step):
                self._begin((index, step), time, node)
                if exchanges[index].overlap == 0 and self._must_wait((index, step), node):
                    return
        for index, exchange in enumerate(exchanges):
            begin = step - exchange.overlap
            is_due = exchange.overlap > 0 and begin >= 0 and exchange.happens_at(begin)
            if is_due and self._must_wait((index, begin), node):
                return
        self._awaited[node] = None
        self.ends[node].append(time)
        self._count += 1
        self._start_step(time, node)

    def _must_wait(self, key: Key, node: int) -> bool:
        pending = self._pending.get(key)
        is_missing = pending is not None and pending.missing[node] > 0
        self._awaited[node] = key if is_missing else None
        return is_missing

    def _begin(self, key: Key, time: float, node: int) -> None:
        exchange = self._method.exchanges[key[0]]
        # An all-reduce waits for the slowest of all nodes, a round of gossip for what it sends and
        # for what is sent to it, and AD-PSGD for its own link.
        if exchange.awaits == "all" or exchange.is_collective_at(key[1]):
            self._join_collective(key, time, node)
        else:
            self._send_round(key, time, node)

    def _join_collective(self, key: Key, time: float, node: int) -> None:
        pending = self._pending.setdefault(key, Pending(np.ones(self._nodes, int)))
        pending.begun[node] = time
        if len(pending.begun) < self._nodes:
            return
        index, step = key
        exchange = self._method.exchanges[index]
        computed = np.array([pending.begun[node] for node in range(self._nodes)])
        backward = BACKWARD * self._find_step_seconds(step)
        # Of the backward pass, after each part; and of the next forward pass, before the last part.
        remaining = exchange.list_layers() / exchange.layers if exchange.layers else np.zeros(1)
        ready = (computed - remaining[:, None] * backward).max(axis=1)
        forward = (1 - BACKWARD) * self._find_step_seconds(step + exchange.overlap + 1)
        seconds = exchange.find_seconds(step, self._workload, self._network, self._nodes).max()
        end = self._links.begin_collective(ready, seconds)
        needed = np.maximum(time, end - remaining[-1] * forward)
        for moment in np.unique(needed):
            nodes = np.flatnonzero(needed == moment)
            self._add_event(moment, self._end_collective, (key, nodes))

    def _end_collective(self, time: float, ended: tuple[Key, np.ndarray]) -> None:
        key, nodes = ended
        for node in nodes:
            self._complete(key, time, int(node))
        self._free(key)

    def _send_round(self, key: Key, time: float, node: int) -> None:
        slots = self._list_slots(key)
        if key not in self._pending:
            self._pending[key] = Pending(self._count_missing(key, slots))
        self._pending[key].begun[node] = time
        for slot in slots:
            if slot[node] != node:
                self._send(key, time, node, int(slot[node]))
        self._free(key)

    def _count_missing(self, key: Key, slots: tuple[np.ndarray, ...]) -> np.ndarray:
        """Messages that each node waits for: its own, and those that are sent to it."""
        nodes = np.arange(self._nodes)
        missing = np.zeros(self._nodes, int)
        for slot in slots:
            is_sent = slot != nodes
            missing += is_sent
            if self._method.exchanges[key[0]].awaits == "peers":
                missing += np.bincount(slot[is_sent], minlength=self._nodes)
        return missing

    def _list_slots(self, key: Key) -> tuple[np.ndarray, ...]:
        """As `Exchange.messages_at`."""
        index, step = key
        exchange = self._method.exchanges[index]
        assert exchange.schedule is not None
        round_key = (index, exchange.schedule.index_at(step // exchange.every))
        if round_key not in self._slots:
            self._slots[round_key] = exchange.messages_at(step)
        return self._slots[round_key]

    def _send(self, key: Key, time: float, source: int, target: int) -> None:
        seconds = self._wire_seconds[key[0]], self._copy_seconds[key[0]]
        self._links.add(Message(key, source, target, *seconds))
        self._begin_next(source, time)

    def _begin_next(self, node: int, time: float) -> None:
        begun = self._links.begin_next(node, time)
        if begun is not None:
            self._add_event(begun[0], self._receive, begun[1])

    def _receive(self, time: float, message: Message) -> None:
        self._links.release(message.source)
        self._begin_next(message.source, time)
        self._complete(message.key, time, message.source)
        if self._method.exchanges[message.key[0]].awaits == "peers":
            self._complete(message.key, time, message.target)
        self._free(message.key)

    def _complete(self, key: Key, time: float, node: int) -> None:
        missing = self._pending[key].missing
        missing[node] -= 1
        if missing[node] == 0 and self._awaited[node] == key:
            self._advance(time, node)

    def _free(self, key: Key) -> None:
        if key in self._pending and self._pending[key].is_done:
            del self._pending[key]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What nodes did in simulated time.

    Attributes:
      seconds: per step, `N` over the steps per second of all nodes.
      examples_per_second: of all nodes.
      staleness: updates that a node makes while a message for it travels, `ceil(s / c)` with the
        seconds s of a message and those of a step, c; of nodes that wait for each other, what the
        method says.
      kept: fraction of the times at which an asynchronous node would have sent, but finds its link
        busy, by the formula of `predict_step`; 0 of others.

    >>> from gossipjax.cost_model import Network, Workload, allreduce
    >>> found = simulate(allreduce(), Workload(1e6, 0.5, 8), Network(1e9), nodes=4, steps=20)
    >>> round(found.seconds, 3)
    0.506
    """

    seconds: float
    examples_per_second: float
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

    The computation of node i at its step t takes `f[t, i] c` seconds. Without slowness the result
    is that of `predict_step`, which does not see two messages that meet at one receiver (as of
    random peers), or an all-reduce that waits for messages on their way (SlowMo around OSGP).

    Args:
      method, workload, network, nodes: as in `predict_step`.
      slowness: of the nodes, or the factors f, `[T, N]`, repeated after T steps; None: there is
        none.
      steps: of each node, after those of `warm_up`; of asynchronous nodes the mean. None: the
        whole cycles that have 60 or more.
      seed: of the draws of `slowness`.
      warm_up: first steps that are not counted. None: those of one cycle, 60 at most, and of the
        overlap.

    >>> from gossipjax.cost_model import Network, Slowness, Workload, allreduce, simulate
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2)
    >>> slow = Slowness("constant", 4.0)
    >>> round(simulate(allreduce(), workload, Network(1e9), 8, slow).seconds, 6)
    0.975
    """
    nodes = require_number_of_nodes(nodes)
    for exchange in method.exchanges:
        exchange.require_nodes(nodes)
    cycle = min(MAX_CYCLE, math.lcm(*(exchange.cycle for exchange in method.exchanges)))
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
    if all(exchange.awaits == "nobody" for exchange in method.exchanges) and method.exchanges:
        rate = float((1 / (factors[warm_up:].mean(axis=0) * workload.compute_seconds)).sum())
        return _summarize(rate, method, workload, network, nodes)
    events = Events(method, workload, network, factors * workload.compute_seconds, total)
    events.run()
    return _summarize(_find_rate(events, warm_up), method, workload, network, nodes)


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
    return factors


def _find_rate(events: Events, warm_up: int) -> float:
    """Steps per second of all nodes together; infinite where nothing takes time."""
    counts = np.array([len(ends) for ends in events.ends])
    last = np.array([ends[-1] if ends else math.inf for ends in events.ends])
    # A node that is far slower than the others may not have made its first steps.
    skipped = np.minimum(warm_up, np.maximum(counts - 1, 0))
    begins = np.array(
        [ends[k - 1] if k else 0.0 for ends, k in zip(events.ends, skipped, strict=True)]
    )
    seconds = last - begins
    return float(((counts - skipped) / seconds).sum()) if (seconds > 0).all() else math.inf


def _summarize(
    rate: float, method: Method, workload: Workload, network: Network, nodes: int
) -> Simulation:
    step = nodes / rate
    staleness = float(method.staleness)
    kept = 0.0
    if method.is_asynchronous and step > 0:
        (exchange,) = method.exchanges
        rounds = exchange.list_steps()
        seconds = np.array([exchange.find_seconds(k, workload, network, nodes) for k in rounds])
        seconds = seconds.max(axis=1)
        staleness = float(max(1, math.ceil(seconds.max() / step - ROUNDING)))
        if exchange.awaits == "nobody" and seconds.any():
            kept = 1 - float(find_share(seconds, step * exchange.every)[seconds > 0].mean())
    return Simulation(
        seconds=step,
        examples_per_second=rate * workload.examples,
        staleness=staleness,
        kept=kept,
    )
