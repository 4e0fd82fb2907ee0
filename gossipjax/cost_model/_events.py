"""Nodes in simulated time: the events behind `simulate`. NumPy only."""

import bisect
import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gossipjax.cost_model._links import Key, Links, Message
from gossipjax.cost_model.exchange import BACKWARD
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.workload import Workload


class Slot(NamedTuple):
    """One message of every node in a round.

    Attributes:
      receivers: integers `[N]`; node `j` sends nothing where it is `j`.
      seconds: on the wire, `[N]`.
    """

    receivers: np.ndarray
    seconds: np.ndarray


class Pending:
    """What is not done yet of an exchange that some node has begun.

    Attributes:
      missing: messages that each node still waits for, `[N]`.
      begun: node -> when it began the exchange, in seconds.
    """

    def __init__(self, missing: np.ndarray):
        self.missing = missing
        self.begun: dict[int, float] = {}

    @property
    def is_done(self) -> bool:
        """Whether nobody will ask for it again."""
        return len(self.begun) == len(self.missing) and not self.missing.any()


class Events:
    """Runs the nodes of a method until they have made their steps.

    Args:
      method, workload, network: as in `simulate`.
      seconds: of the computation of each step of each node, `[T, N]`; repeated after T steps.
      steps: of each node; the mean of them, if nobody waits.

    Attributes:
      ends: of each node, when its steps ended, in seconds.
      busy_seconds: in which each node computed, `[N]`.
      sent, kept: times that a node that waits for nobody sent, or found its link busy.
      staleness: of every message of such nodes: the updates of its receiver while it travelled.
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
        self._arrived: list[list[Message]] = [[] for _ in range(self._nodes)]
        self._computed: list[list[float]] = [[] for _ in range(self._nodes)]
        self._slots: dict[tuple[int, int], list[Slot]] = {}
        self._count = 0  # of all steps that have ended
        self.ends: list[list[float]] = [[] for _ in range(self._nodes)]
        self.busy_seconds = np.zeros(self._nodes)
        self.sent = 0
        self.kept = 0
        self.staleness: list[int] = []

    def run(self) -> None:
        """Runs all steps."""
        for node in range(self._nodes):
            self._start_step(0.0, node)
        while self._queue and self._count < self._steps * self._nodes:
            time, _, act, argument = heapq.heappop(self._queue)
            act(time, argument)

    def _add_event(self, time: float, act: Callable[..., None], argument: object) -> None:
        heapq.heappush(self._queue, (time, next(self._order), act, argument))

    def _find_compute_seconds(self, node: int) -> float:
        return self._seconds[len(self.ends[node]) % len(self._seconds), node]

    def _start_step(self, time: float, node: int) -> None:
        if self._method.is_asynchronous or len(self.ends[node]) < self._steps:
            end = time + self._find_compute_seconds(node)
            self._add_event(end, self._end_computation, node)

    def _end_computation(self, time: float, node: int) -> None:
        self.busy_seconds[node] += self._find_compute_seconds(node)
        computed = self._computed[node]
        computed.append(time)
        for message in self._arrived[node]:
            self.staleness.append(len(computed) - bisect.bisect_right(computed, message.time))
        self._arrived[node].clear()
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
        if exchange.awaits == "all" or exchange.is_collective_at(key[1]):
            self._join_collective(key, time, node)
        elif exchange.awaits == "nobody":
            self._send_if_free(key, time, node)
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

    def _find_step_seconds(self, step: int) -> np.ndarray:
        """Of the computation of that step of every node, `[N]`."""
        return self._seconds[step % len(self._seconds)]

    def _end_collective(self, time: float, ended: tuple[Key, np.ndarray]) -> None:
        key, nodes = ended
        for node in nodes:
            self._complete(key, time, int(node))
        self._free(key)

    def _send_if_free(self, key: Key, time: float, node: int) -> None:
        slots = [slot for slot in self._list_slots(key) if slot.receivers[node] != node]
        if not slots:  # a round in which this node sends nothing anyway
            return
        if self._links.is_busy(node):
            self.kept += 1
            return
        self.sent += 1
        for slot in slots:
            self._send(key, slot, time, node)

    def _send_round(self, key: Key, time: float, node: int) -> None:
        slots = self._list_slots(key)
        if key not in self._pending:
            self._pending[key] = Pending(self._count_missing(key, slots))
        begun = self._pending[key].begun
        begun[node] = time
        exchange = self._method.exchanges[key[0]]
        meets = exchange.is_half_duplex and exchange.awaits == "peers"
        for slot in slots:
            if not meets or slot.receivers[node] in begun:
                self._send(key, slot, time, node)
            if meets:  # what is sent to this node waits until it receives
                for source in np.flatnonzero(slot.receivers == node):
                    if source != node and source in begun:
                        self._send(key, slot, time, int(source))
        self._free(key)

    def _count_missing(self, key: Key, slots: list[Slot]) -> np.ndarray:
        """Messages that each node waits for: its own, and those that are sent to it."""
        nodes = np.arange(self._nodes)
        missing = np.zeros(self._nodes, int)
        for slot in slots:
            is_sent = slot.receivers != nodes
            missing += is_sent
            if self._method.exchanges[key[0]].awaits == "peers":
                missing += np.bincount(slot.receivers[is_sent], minlength=self._nodes)
        return missing

    def _list_slots(self, key: Key) -> list[Slot]:
        index, step = key
        exchange = self._method.exchanges[index]
        assert exchange.schedule is not None
        round_key = (index, exchange.schedule.index_at(step // exchange.every))
        if round_key not in self._slots:
            size = exchange.count_bytes(self._workload)
            times = 2 if exchange.is_half_duplex else 1
            self._slots[round_key] = [
                Slot(receivers, times * self._network.message_seconds(receivers, size))
                for receivers in exchange.messages_at(step)
            ]
        return self._slots[round_key]

    def _send(self, key: Key, slot: Slot, time: float, source: int) -> None:
        target = int(slot.receivers[source])
        if target == source:
            return
        exchange = self._method.exchanges[key[0]]
        copy = self._network.copy_seconds(exchange.count_bytes(self._workload))
        copy *= 2 if exchange.is_half_duplex else 1
        seconds = float(slot.seconds[source])
        self._links.add(Message(key, source, target, seconds, copy, time))
        self._begin_next(source, time)

    def _begin_next(self, node: int, time: float) -> None:
        begun = self._links.begin_next(node, time)
        if begun is not None:
            self._add_event(begun[0], self._receive, begun[1])

    def _receive(self, time: float, message: Message) -> None:
        self._links.release(message.source)
        self._begin_next(message.source, time)
        awaits = self._method.exchanges[message.key[0]].awaits
        if self._method.is_asynchronous:
            self._arrived[message.target].append(message)
        if awaits != "nobody":
            self._complete(message.key, time, message.source)
        if awaits == "peers":
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
