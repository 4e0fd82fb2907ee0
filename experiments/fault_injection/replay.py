"""Makes the steps of asynchronous nodes again, in one process, from the journals of a job.

It shares no code with `gossipjax.asynchronous`, so the tests compare nodes with it: it reads the
lines of the journals, and adds masses in float64 with NumPy.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

Gradients = Callable[..., tuple[Any, Any]]
Inputs = Callable[[int, int], Sequence[Any]]
NO_EFFECT = ("admit", "decline", "declined", "write off")  # after the last, a life joins anew


class ReplayedStep(NamedTuple):
    """A local step that was made again."""

    place: int  # the place of the node
    step: int  # the number of the step in the node's process
    params: Any  # the model `z` at which the gradient was taken


class Node:
    """The rest of a journal, and what its node holds after the events so far."""

    def __init__(self, lines: Iterable[str]):
        self.lines = deque[dict[str, Any]](map(json.loads, lines))
        self.process = ""
        self.place = 0
        self.opt_state: Any = None
        self.held = np.zeros((3, 1))  # x, m, w
        self.moved: Any = 0.0  # the movement since the last outer step, which x does not have yet
        self.ended: Any = None  # the movement and the optimizer's state if the step now ends
        self.estate: Any = 0.0
        self.outer: Any = None  # every, rate, momentum

    def move(self, line: dict[str, Any], rate: float = 1.0, momentum: float = 0.0) -> None:
        """Moves the mass by the node's own movement, or the part of it that a line says."""
        x, m, w = self.held
        moved = line.get("part", 1.0) * w * self.moved
        new = momentum * m - moved
        pull = moved - momentum * new
        self.held = np.array([x + rate * pull, new if momentum else m, w])
        self.moved = 0.0

    def receive(self, mass: np.ndarray, *parts: float) -> None:
        """Adds a share, of whose distance from the own model and momentum only parts may count."""
        if parts:
            own = self.held[:2] / self.held[2]
            part = np.array([parts[:1], parts[-1:]])
            mass = np.array([*mass[2] * (own + part * (mass[:2] / mass[2] - own)), mass[2]])
        self.held = self.held + mass


def replay(
    journals: Iterable[Path],
    tx: optax.GradientTransformation,
    params: Any,
    gradients: Gradients,
    inputs: Inputs,
) -> Iterator[ReplayedStep]:
    """Yields every local step, in an order in which the job may have made them.

    The events of each node keep their order, and a mass is received after it was sent. The models
    are the same as in the job up to the rounding of sums, if no message was narrow, and no schedule
    depends on the step.

    Args:
      journals: the journals of all nodes, whole, one file for each place.
      tx, params, gradients: as in the job.
      inputs: a function `(place, step) -> inputs` that returns the inputs of a local step.

    Raises:
      ValueError: if an event is missing that another event needs, or a node had a saved model.
    """
    job = _Job(tx, params, gradients, inputs)
    nodes = [Node(path.read_text().splitlines()) for path in journals]
    while any(node.lines for node in nodes):
        waits = True
        for node in nodes:
            while node.lines and job.is_possible(line := node.lines[0]):
                waits = False
                node.lines.popleft()
                if line["event"] == "life":
                    job.begin_life(node, line)
                elif line["event"] == "begin":
                    yield job.begin_step(node, line["number"])
                else:
                    job.apply(node, line)
        if waits:
            line = next(node.lines[0] for node in nodes if node.lines)
            raise ValueError(f"the journals must have what {line} needs: give all, whole.")


class _Job:
    """What all nodes share: masses on their way, and answers, by asker, answerer and number."""

    def __init__(self, tx: Any, params: Any, gradients: Gradients, inputs: Inputs):
        self._tx = tx
        self._params = params
        self._start, self._unravel = ravel_pytree(params)
        self._inputs = inputs
        self._update = jax.jit(lambda z, state, *xs: tx.update(gradients(z, *xs)[0], state, z))
        self._sent: dict[tuple[str, str, int], np.ndarray] = {}
        self._answers: dict[tuple[str, str, int], np.ndarray] = {}

    def is_possible(self, line: dict[str, Any]) -> bool:
        """Whether everything has happened that an event needs from other nodes."""
        key = (line.get("peer"), line["life"], line.get("number"))
        if line["event"] in ("receive", "average"):
            return key in self._sent
        own = (line["life"], line.get("peer"), line.get("number"))
        return line["event"] != "averaged" or own in self._answers

    def begin_life(self, node: Node, line: dict[str, Any]) -> None:
        """Begins a life, and at its first a process."""
        if line["is_continued"]:
            raise ValueError(f"nodes must begin anew, got place {line['place']}, which had saved.")
        if line["process"] != node.process:
            node.process = line["process"]
            node.place = line["place"]
            node.outer = line["outer"]
            node.opt_state = self._tx.init(self._params)

    def begin_step(self, node: Node, number: int) -> ReplayedStep:
        """Makes an update, which counts when the step ends."""
        z = self._unravel((node.held[0] / node.held[2] + node.moved).astype(self._start.dtype))
        inputs = self._inputs(node.place, number)
        updates, state = self._update(z, node.opt_state, *inputs)
        node.ended = node.moved + np.asarray(ravel_pytree(updates)[0], np.float64), state
        return ReplayedStep(node.place, number, z)

    def apply(self, node: Node, line: dict[str, Any]) -> None:
        """Applies another event to what a node holds."""
        sent = (line["life"], line["peer"], line["number"])
        arrived = (line["peer"], line["life"], line["number"])
        match line["event"]:
            case "found":
                start = np.asarray(self._start, np.float64)
                node.held = np.array([start, 0 * start, 1 + 0 * start])
                node.moved = 0.0
            case "join":
                node.held = np.zeros((3, self._start.size))
                node.moved = 0.0
            case "share" | "grant":
                self._sent[sent] = node.held = node.held / 2
            case "hand over":
                self._sent[sent] = node.held
                node.held = 0 * node.held
            case "ask":
                self._sent[sent] = node.held
            case "receive":
                node.receive(self._sent[arrived], *line.get("part", ()))
            case "return":
                node.held = node.held + self._sent[sent]
            case "average":
                self._answers[arrived] = (self._sent[arrived] - node.held) / 2
                node.held = node.held + self._answers[arrived]
            case "averaged":
                node.held = node.held - self._answers[sent]
            case "undo":
                node.held = node.held - self._answers.pop(arrived)
            case "give up":
                node.estate = node.held
            case "revive":
                node.held = node.held + node.estate
            case "end":
                node.moved, node.opt_state = node.ended
                if node.outer is None:
                    node.move(line)
            case "outer":
                node.move(line, *node.outer[1:])
            case "finish":
                node.move(line)
            case event:
                assert event in NO_EFFECT, event
