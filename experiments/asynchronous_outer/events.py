"""Simulated: in which order workers of given speeds hand over what they have learned.

Pure functions of speeds and rules. Messages take no time; nothing is trained, and no clock is read.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

ROUNDING = 1e-9  # steps: so far may the rounding of times move a whole number of steps


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who computes.

    Attributes:
      step_seconds: of a local step of each worker, `[N]`.
      every: H, local steps from one exchange to the next.
      tokens_per_step: of each worker, `[N]`; None: 1.
      deaths: worker -> the moment at which it dies, in seconds. All others know it at once.
    """

    step_seconds: Sequence[float]
    every: int
    tokens_per_step: Sequence[int] | None = None
    deaths: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = tuple(self.step_seconds)
        tokens = (1,) * self.size if self.tokens_per_step is None else self.tokens_per_step
        if not seconds or not all(0 < s < math.inf for s in seconds):
            raise ValueError(
                f"step_seconds of Workers must be numbers above 0, one or more, got {seconds}."
            )
        if self.every < 1:
            raise ValueError(f"every of Workers must be at least 1, got {self.every}.")
        if len(tokens) != self.size or min(tokens) < 1:
            raise ValueError(
                f"tokens_per_step of Workers must be {self.size} integers from 1 on, one for each "
                f"worker, got {tuple(tokens)}."
            )
        if not all(i in range(self.size) and d >= 0 for i, d in self.deaths.items()):
            raise ValueError(
                f"deaths of Workers must be seconds from 0 on, of workers 0 to {self.size - 1}, "
                f"got {dict(self.deaths)}."
            )

    @property
    def size(self) -> int:
        """N."""
        return len(self.step_seconds)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of a step of each worker, `[N]`."""
        return (
            np.ones(self.size) if self.tokens_per_step is None else np.array(self.tokens_per_step)
        )

    def death(self, worker: int) -> float:
        """When it dies, in seconds; infinite if it lives."""
        return self.deaths.get(worker, math.inf)


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a server steps, and what it counts.

    A round ends `grace` seconds after the arrival that makes the quorum, or as soon as nobody else
    may come. All that has arrived is averaged, weighted by tokens^2 / steps of each worker, and
    these workers begin again at the new model.

    Attributes:
      quorum: K, arrivals that a round needs: 1 is asynchronous, N synchronous. A quorum that deaths
        have left out of reach is waited for for ever.
      grace: seconds; infinite: until all have come. With 0, arrivals at one moment are not one
        round.
      goes_on: whether who has made its H steps makes more until the round ends, of which the
        average has those that are complete by then; else it waits.
      late: what becomes of a movement from a model that is not the newest any more: it counts in
        the round in which it arrives ("next"), or is dropped, and its worker begins again ("drop").
      dynamic: whether slower workers make fewer steps, `H_i = max(1, floor(H v_i / max v))`, v the
        speeds.
      momentum_every: rounds from one step of the momentum to the next (`training.Server`).

    References:
      Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026,
      arXiv:2604.21428: quorum, grace, weights, and learners that never wait. Its text was not
      available; the weights were checked against two open implementations and a summary. There the
      grace adapts to the slack of the network, and models travel in fragments: not here.
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv:2401.09135:
      dynamic local steps, after notes on it.
    """

    quorum: int = 1
    grace: float = 0.0
    goes_on: bool = False
    late: Literal["next", "drop"] = "next"
    dynamic: bool = False
    momentum_every: int = 1

    def __post_init__(self) -> None:
        for name in ("quorum", "momentum_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of Rule must be at least 1, got {getattr(self, name)}.")
        if not self.grace >= 0:
            raise ValueError(f"grace of Rule must be seconds from 0 on, got {self.grace}.")
        if self.late not in ("next", "drop"):
            raise ValueError(f"late of Rule must be 'next' or 'drop', got {self.late!r}.")


class Arrivals(NamedTuple):
    """What a server gets, in the order in which it counts it: E arrivals.

    Attributes:
      worker: integers `[E]`.
      steps: local steps of the movement, `[E]`.
      share: its part of the average of its round, `[E]`; 0 of what is dropped.
      closes: whether it is the last of its round, `[E]`.
      handed: who gets the server's model afterwards, `[E, N]`.
      seconds: when it is counted, `[E]`.
      tokens: of all steps up to it, `[E]`.
      staleness: rounds of the server since its worker got its model, without this one, `[E]`.
    """

    worker: np.ndarray
    steps: np.ndarray
    share: np.ndarray
    closes: np.ndarray
    handed: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    staleness: np.ndarray


def list_arrivals(workers: Workers, rule: Rule, seconds: float) -> Arrivals:
    """Returns what a server gets in these seconds.

    Raises:
      ValueError: if the quorum is larger than N, or nothing arrives.

    >>> arrivals = list_arrivals(Workers([1.0, 1.0, 4.0], every=2), Rule(quorum=2), 9.0)
    >>> list(zip(arrivals.worker.tolist(), arrivals.seconds.tolist(), arrivals.staleness.tolist()))
    [(0, 2.0, 0), (1, 2.0, 0), (0, 4.0, 0), (1, 4.0, 0), (0, 6.0, 0), (1, 6.0, 0), (0, 8.0, 0), \
(1, 8.0, 0)]
    """
    if rule.quorum > workers.size:
        raise ValueError(
            f"quorum of Rule must be at most the number of workers, {workers.size}, got "
            f"{rule.quorum}."
        )
    server = _Server(workers, rule)
    server.run(seconds)
    if not server.rows:
        raise ValueError(f"seconds must be enough for one round, got {seconds}.")
    arrivals = Arrivals(*(np.array(column) for column in zip(*server.rows, strict=True)))
    tokens = arrivals.steps * workers.tokens[arrivals.worker]
    return arrivals._replace(tokens=np.cumsum(tokens))


class _Server:
    """Counts arrivals. `rows` are the fields of `Arrivals`, with no tokens yet."""

    def __init__(self, workers: Workers, rule: Rule):
        self._workers = workers
        self._rule = rule
        speeds = min(workers.step_seconds) / np.asarray(workers.step_seconds)
        fewer = np.maximum(1, np.floor(workers.every * speeds + ROUNDING)).astype(int)
        self._steps = fewer if rule.dynamic else np.full(workers.size, workers.every)
        self._begun = np.zeros(workers.size)  # when each worker got its model, in seconds
        self._version = np.zeros(workers.size, int)  # the round whose model that is
        self._round = 0
        self._waiting: list[int] = []
        # (seconds, worker, round); the worker N is the end of the grace of that round.
        self._queue: list[tuple[float, int, int]] = []
        self.rows: list[tuple[object, ...]] = []

    def run(self, seconds: float) -> None:
        for worker in range(self._workers.size):
            self._begin(worker, 0.0)
        while self._queue and self._queue[0][0] <= seconds:
            time, worker, of_round = heapq.heappop(self._queue)
            if worker < self._workers.size:
                self._arrive(worker, time)
            elif of_round == self._round:
                self._close(time)

    def _begin(self, worker: int, time: float) -> None:
        self._begun[worker] = time
        self._version[worker] = self._round
        arrival = time + float(self._steps[worker] * self._workers.step_seconds[worker])
        if arrival <= self._workers.death(worker):
            heapq.heappush(self._queue, (arrival, worker, self._round))

    def _arrive(self, worker: int, time: float) -> None:
        size = self._workers.size
        if self._rule.late == "drop" and self._version[worker] < self._round:
            self._add(worker, int(self._steps[worker]), 0.0, np.arange(size) == worker, time)
            self._begin(worker, time)
            return
        self._waiting.append(worker)
        may_come = any(
            other < size and (self._rule.late == "next" or of_round == self._round)
            for _, other, of_round in self._queue
        )
        if len(self._waiting) >= self._rule.quorum and not (self._rule.grace and may_come):
            self._close(time)
        elif len(self._waiting) == self._rule.quorum:
            heapq.heappush(self._queue, (time + self._rule.grace, size, self._round))

    def _close(self, time: float) -> None:
        steps = [self._count_steps(worker, time) for worker in self._waiting]
        weights = [
            (n * self._workers.tokens[worker]) ** 2 / n
            for worker, n in zip(self._waiting, steps, strict=True)
        ]
        last = len(self._waiting) - 1
        everyone = np.isin(np.arange(self._workers.size), self._waiting)
        for k, worker in enumerate(self._waiting):
            share = weights[k] / sum(weights)
            self._add(worker, steps[k], share, everyone & (k == last), time, k == last)
        self._round += 1
        for worker in self._waiting:
            self._begin(worker, time)
        self._waiting = []

    def _count_steps(self, worker: int, time: float) -> int:
        if not self._rule.goes_on:
            return int(self._steps[worker])
        alive = min(time, self._workers.death(worker)) - self._begun[worker]
        made = math.floor(alive / self._workers.step_seconds[worker] + ROUNDING)
        return max(int(self._steps[worker]), made)

    def _add(
        self,
        worker: int,
        steps: int,
        share: float,
        handed: np.ndarray,
        time: float,
        closes: bool = False,
    ) -> None:
        staleness = self._round - self._version[worker]
        self.rows.append((worker, steps, share, closes, handed, time, 0, staleness))


class Shares(NamedTuple):
    """What nodes without a server send each other, in order: E outer steps.

    Attributes:
      node: who makes an outer step, integers `[E]`.
      steps: local steps that it makes before, since the last event that names it, `[E]`.
      target: who gets half of what it has, `[E]`; the node itself if nobody else lives.
      target_steps: local steps that the target makes before, `[E]`.
      living: who lives, `[E, N]`.
      seconds: `[E]`.
      tokens: of all steps up to it, `[E]`.
    """

    node: np.ndarray
    steps: np.ndarray
    target: np.ndarray
    target_steps: np.ndarray
    living: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray


def list_shares(workers: Workers, seconds: float, seed: int) -> Shares:
    """Returns the outer steps of `gx.asynchronous.outer(every)` in these seconds.

    Nobody waits. What arrives at a node while it computes is added after that local step.

    Args:
      seed: of the peers, which are drawn uniformly from the living.

    Raises:
      ValueError: if the seconds are not enough for one outer step.

    >>> shares = list_shares(Workers([1.0, 1.5], every=2), 4.0, seed=0)
    >>> [field.tolist() for field in (shares.node, shares.steps, shares.target_steps)]
    [[0, 1, 0], [2, 0, 1], [2, 1, 1]]
    """
    rng = np.random.default_rng(seed)
    everyone = range(workers.size)
    made = np.zeros(workers.size, int)  # local steps of each node
    queue = [(workers.every * workers.step_seconds[i], i, 1) for i in everyone]
    heapq.heapify(queue)
    rows = []
    while queue and queue[0][0] <= seconds:
        time, node, phase = heapq.heappop(queue)
        if time > workers.death(node):
            continue
        living = [i for i in everyone if workers.death(i) > time or i == node]
        peers = [i for i in living if i != node]
        target = int(rng.choice(peers)) if peers else node
        steps = phase * workers.every - made[node]
        made[node] += steps
        # The step in which it arrives ends first.
        begun = math.ceil(time / workers.step_seconds[target] - ROUNDING)
        target_steps = max(0, begun - made[target])
        made[target] += target_steps
        tokens = float(made @ workers.tokens)
        rows.append((node, steps, target, target_steps, np.isin(everyone, living), time, tokens))
        end = (phase + 1) * workers.every * workers.step_seconds[node]
        heapq.heappush(queue, (end, node, phase + 1))
    if not rows:
        raise ValueError(f"seconds must be enough for one outer step, got {seconds}.")
    return Shares(*(np.array(column) for column in zip(*rows, strict=True)))
