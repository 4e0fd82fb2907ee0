"""Simulated: learners and a syncer that steps when a quorum has come; learners die and return.

As in Decoupled DiLoCo (Douillard et al., 2026, arXiv:2604.21428), without its fragments, its grace
and its norms: K of N learners make H local steps each and send how far they have moved; the syncer
averages these movements, makes an outer step with Nesterov momentum, and hands its model to the
senders. The others go on, and what they send counts in the round in which it arrives.

The clock is simulated; the gradients are not.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.training.task import Task

BEGINS, ARRIVES, DIES = range(3)  # in this order at one moment
ROUNDING = 1e-9  # of a number of steps


class Rule(NamedTuple):
    """When whom what costs: all in seconds of the simulated clock."""

    quorum: int  # K, arrivals that a round needs
    every: int  # H, local steps of a learner from one arrival to the next
    step_seconds: Sequence[float]  # of each learner, `[N]`
    message_seconds: float  # to send a movement, and as long to get a model
    restart_seconds: float  # from a death to the next local step


class Push(NamedTuple):
    """What arrives at the syncer: H local steps from the model of a round."""

    seconds: float  # when it arrives
    learner: int
    begun: float  # when the first of its steps began
    version: int  # rounds before the model that they began with
    closes: bool  # whether it makes the quorum


class Events(NamedTuple):
    """What happened, and where all local steps are: made = counted + lost + open."""

    pushes: list[Push]
    made: int  # by all learners
    counted: int  # in a round
    lost: int  # of learners that died before they arrived
    open: int  # since then, or in a round that did not end

    @property
    def difference(self) -> int:
        """Steps that are missing (negative) or too many: 0."""
        return self.counted + self.lost + self.open - self.made


def list_pushes(rule: Rule, deaths: Sequence[tuple[float, int]], seconds: float) -> Events:
    """Plays the clock: who arrives when, and whose steps are lost.

    Args:
      rule: of the learners.
      deaths: moments in seconds, and who dies then; a learner that is away dies again.
      seconds: length of the run.

    >>> rule = Rule(quorum=1, every=2, step_seconds=[1.0, 1.0], message_seconds=0.0,
    ...             restart_seconds=3.0)
    >>> events = list_pushes(rule, [(3.5, 1)], 9.0)
    >>> [(push.seconds, push.learner) for push in events.pushes][:4]
    [(2.0, 0), (2.0, 1), (4.0, 0), (6.0, 0)]
    >>> events.counted, events.lost, events.open
    (12, 1, 1)
    """
    size = len(rule.step_seconds)
    lives = [0] * size  # how often each has died
    begun = [math.inf] * size
    versions = [0] * size
    # When, what happens, to whom, in which of its lives.
    queue = [(0.0, BEGINS, i, 0) for i in range(size)]
    queue += [(when, DIES, learner, 0) for when, learner in deaths]
    heapq.heapify(queue)
    pushes: list[Push] = []
    waiting: list[tuple[int, int]] = []
    rounds = made = counted = lost = 0

    def count_steps(learner: int, now: float) -> int:
        steps = math.floor((now - begun[learner]) / rule.step_seconds[learner] + ROUNDING)
        is_here = (learner, lives[learner]) in waiting
        return 0 if is_here else min(max(steps, 0), rule.every)

    while queue and queue[0][0] <= seconds:
        now, kind, learner, life = heapq.heappop(queue)
        if kind == DIES:
            steps = count_steps(learner, now) if begun[learner] <= now else 0
            made += steps
            lost += steps
            lives[learner] += 1
            begun[learner] = math.inf
            back = now + rule.restart_seconds
            heapq.heappush(queue, (back, BEGINS, learner, lives[learner]))
        elif life != lives[learner]:
            continue
        elif kind == BEGINS:
            begun[learner] = now
            versions[learner] = rounds
            arrival = now + rule.every * rule.step_seconds[learner] + rule.message_seconds
            heapq.heappush(queue, (arrival, ARRIVES, learner, life))
        else:
            made += rule.every
            waiting.append((learner, life))
            closes = len(waiting) == rule.quorum
            pushes.append(Push(now, learner, begun[learner], versions[learner], closes))
            if closes:
                rounds += 1
                counted += rule.every * rule.quorum
                for sender, its_life in waiting:
                    heapq.heappush(queue, (now + rule.message_seconds, BEGINS, sender, its_life))
                waiting = []
    living = [i for i in range(size) if begun[i] <= seconds]
    underway = sum(count_steps(i, seconds) for i in living)
    still = underway + rule.every * len(waiting)
    return Events(pushes, made + underway, counted, lost, still)


def train(
    task: Task,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    events: Events,
    rule: Rule,
    batch_size: int,
    seed: int,
) -> list[tuple[float, float]]:
    """Trains in the order of the events; returns seconds and losses of the steps that arrived.

    A learner keeps its optimizer's state and its place in the data, also when it has died.
    """
    size = len(rule.step_seconds)

    def walk(variables: Any, state: Any, batches: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            params, state = carry

            def loss(params: Any) -> jax.Array:
                return task.loss({"params": params}, batch)[0]

            value, grads = jax.value_and_grad(loss)(params)
            updates, state = inner.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (variables, state), batches)

    walk = jax.jit(walk)
    needed = rule.every * max(
        [1, *(sum(p.learner == i for p in events.pushes) for i in range(size))]
    )
    stream = itertools.islice(task.batches(gx.Nodes(size), batch_size, seed, 0), needed)
    batches = jnp.stack([jnp.asarray(batch) for batch in stream])  # [steps, N, ...]
    anchor = task.init(seed)["params"]
    model_of = [anchor]  # after each round
    outer_state = outer.init(anchor)
    states = [inner.init(anchor)] * size
    made = [0] * size
    curve: list[tuple[float, float]] = []
    movements: list[Any] = []
    for push in events.pushes:
        i = push.learner
        part = batches[made[i] : made[i] + rule.every, i]
        made[i] += rule.every
        (params, states[i]), losses = walk(model_of[push.version], states[i], part)
        movements.append(jax.tree.map(jnp.subtract, model_of[push.version], params))
        for k, loss in enumerate(losses.tolist(), start=1):
            curve.append((push.begun + k * rule.step_seconds[i], loss))
        if push.closes:
            average = jax.tree.map(lambda *parts: sum(parts) / len(parts), *movements)
            updates, outer_state = outer.update(average, outer_state, model_of[-1])
            model_of.append(optax.apply_updates(model_of[-1], updates))
            movements = []
    return sorted(curve)
